"""The error that a caller's index data can raise."""


class TreeError(ValueError):
    """An argument does not describe a tree, or does not fit the tree it is used with.

    Args:
        argument: the argument's name in the caller's words, e.g. ``'counts["item"]'``.
        rule: what it must be, e.g. ``"must not be negative"``.
        got: what came, e.g. ``"-3 at position 7"``.
    """

    def __init__(self, argument: str, rule: str, got: str) -> None:
        super().__init__(argument, rule, got)
        self.argument = argument
        self.rule = rule
        self.got = got

    def __str__(self) -> str:
        return f"{self.argument} {self.rule}; got {self.got}"
