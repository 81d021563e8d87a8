"""Errors that callers branch on. Everything else is ValueError, RuntimeError or an assertion.

MoERuntimeError
+-- InvalidRequestError (ValueError)    a request field breaks a rule; carries param, code, HTTP status
+-- CheckpointError (ValueError)        a checkpoint that cannot be loaded as asked
+-- CapacityError (RuntimeError)        it does not fit
+-- InvarianceError (RuntimeError)      a path cannot keep the invariance level asked for
+-- PeerError (RuntimeError)            another rank has gone, is late, or is out of step
"""

from __future__ import annotations

__all__ = [
    "CapacityError",
    "CheckpointError",
    "InvalidRequestError",
    "InvarianceError",
    "MoERuntimeError",
    "PeerError",
]


class MoERuntimeError(Exception):
    """Root of the package's own errors."""


class InvalidRequestError(MoERuntimeError, ValueError):
    """A request breaks a rule. The message holds field, value and rule.

    Args:
        message: One sentence for the caller.
        param: Name of the offending field, as the caller spelled it.
        code: Short machine-readable reason, such as ``context_length_exceeded``.
        status: HTTP status the server answers with.
    """

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status


class CheckpointError(MoERuntimeError, ValueError):
    """A checkpoint that is missing, malformed, or uses something the code does not implement."""


class CapacityError(MoERuntimeError, RuntimeError):
    """The model or its buffers do not fit the memory at hand."""


class InvarianceError(MoERuntimeError, RuntimeError):
    """A path cannot keep the invariance level asked for; nothing falls back silently."""


class PeerError(MoERuntimeError, RuntimeError):
    """Another rank has gone, is late, or is out of step; the message names it.

    Args:
        message: What was seen.
        rank: The other rank, by its place in the world; None where that is not known.
    """

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
