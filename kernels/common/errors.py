"""The error that an implementation raises when it cannot take a call."""


class UnsupportedError(NotImplementedError):
    """An explicitly chosen implementation cannot take this call.

    Args:
        impl: the implementation asked for, e.g. ``"gluon"``.
        op: the op's name, e.g. ``"linear_compression"``.
        reason: a sentence that says what it lacks.
    """

    def __init__(self, impl: str, op: str, reason: str) -> None:
        super().__init__(impl, op, reason)
        self.impl = impl
        self.op = op
        self.reason = reason

    def __str__(self) -> str:
        return f'impl="{self.impl}" cannot run {self.op}: {self.reason}'
