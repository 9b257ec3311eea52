"""What serving raises: each says who is to blame, as an HTTP status."""

from __future__ import annotations


class ServingError(Exception):
    """A request that gets no scores.

    Attributes:
        status: HTTP status: 4xx for the caller's mistake, 5xx for ours.
        retry_after_s: seconds after which to try again; None: there is no use.
    """

    status = 500

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BadRequestError(ServingError, ValueError):
    """A request that can never be scored: argument, rule, what came."""

    status = 400

    def __init__(self, argument: str, rule: str, got: str) -> None:
        super().__init__(f"{argument} {rule}; got {got}")
        self.argument, self.rule, self.got = argument, rule, got

    def __reduce__(self) -> tuple[type[BadRequestError], tuple[str, str, str]]:
        """Exceptions that cross processes are made anew from their arguments."""
        return type(self), (self.argument, self.rule, self.got)


class TooLargeError(BadRequestError):
    """A request with more rows or bytes than this server takes."""

    status = 413


class OverloadedError(ServingError):
    """The queue is full; `retry_after_s` says when it should have room."""

    status = 503


class StoppedError(ServingError):
    """The server drains or its worker ended; another replica may answer."""

    status = 503


class LateError(ServingError):
    """The request waited longer than it may."""

    status = 504


class ScoringError(ServingError):
    """The model failed on this request alone."""

    status = 500
