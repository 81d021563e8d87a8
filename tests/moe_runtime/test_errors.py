"""The error hierarchy that callers branch on."""

from __future__ import annotations

from moe_runtime.errors import (
    CapacityError,
    CheckpointError,
    InvalidRequestError,
    InvarianceError,
    MoERuntimeError,
)


def test_all_share_one_root_and_keep_the_builtin_meaning() -> None:
    for kind, builtin in (
        (InvalidRequestError, ValueError),
        (CheckpointError, ValueError),
        (CapacityError, RuntimeError),
        (InvarianceError, RuntimeError),
    ):
        assert issubclass(kind, MoERuntimeError)
        assert issubclass(kind, builtin)


def test_a_request_error_carries_field_code_and_status() -> None:
    error = InvalidRequestError("n (0) must be at least 1", param="n", code="bad", status=422)
    assert (str(error), error.param, error.code, error.status) == (
        "n (0) must be at least 1",
        "n",
        "bad",
        422,
    )
