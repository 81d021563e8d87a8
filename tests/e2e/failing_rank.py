"""``moe_runtime.serve`` with a rank that fails in the step after it has run ``FAIL_AFTER_TOKENS`` tokens.

``FAILURE`` is ``raise``; ``hold``, native code that keeps the interpreter's lock; ``stuck``, native code without it; or
``stuck-thread``, the same in the thread that runs the steps (``--overlap on``).
"""

from __future__ import annotations

import ctypes
import os
import sys

from moe_runtime.engine.cpu_runner import CpuRunner
from moe_runtime.engine.engine import Engine
from moe_runtime.launch.serve import main


class InjectedError(Exception):
    """What the rank raises; no exception that the server knows."""


def fail_in_step(engine: Engine) -> None:
    """The original place, to be found in the log."""
    if os.environ["FAILURE"] == "stuck-thread":
        CpuRunner._run = lambda *arguments: ctypes.CDLL(None).sleep(100)  # type: ignore[method-assign]
        return
    if os.environ["FAILURE"] == "hold":
        ctypes.PyDLL(None).sleep(100)
    if os.environ["FAILURE"] == "stuck":
        ctypes.CDLL(None).sleep(100)
    raise InjectedError(f"after {engine.num_generation_tokens} tokens")


if __name__ == "__main__":
    step = Engine.step

    def failing_step(self: Engine, **arguments: object) -> object:
        is_it = os.environ["RANK"] == os.environ["FAILING_RANK"]
        if is_it and self.num_generation_tokens >= int(os.environ["FAIL_AFTER_TOKENS"]):
            fail_in_step(self)
        return step(self, **arguments)  # type: ignore[arg-type]

    Engine.step = failing_step  # type: ignore[method-assign, assignment]
    sys.exit(main())
