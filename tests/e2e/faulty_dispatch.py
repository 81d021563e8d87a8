"""An entry of the package with a rank that fails in the middle of a dispatch: its rows are under way, those of others
not yet home.

``PROGRAM`` is ``serve``, ``generate``, ``check``, or ``llm``, a program of a user's own. ``FAULT`` is ``stop``
(SIGSTOP), ``kill``, ``late`` (asleep for a minute) or ``slow`` (busy for ``SLOW_S``). Every rank leaves ``RANK.pid`` in
``FOLDER``, the failing one ``fault`` when it begins.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from moe_runtime.comm.collective import CollectiveDispatcher

FOLDER = Path(os.environ["FOLDER"])
combine = CollectiveDispatcher.combine
num_calls = 0


def failing_combine(self: CollectiveDispatcher, *arguments: Any) -> Any:
    """After some steps' dispatches, by the failing rank alone."""
    global num_calls
    num_calls += 1
    if num_calls == int(os.environ["FAULT_AFTER"]) and os.environ["RANK"] == os.environ["FAULT_RANK"]:
        (FOLDER / "fault").touch()
        fault = os.environ["FAULT"]
        if fault in ("stop", "kill"):
            os.kill(os.getpid(), signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
        elif fault == "late":
            time.sleep(60)
        else:
            end_s = time.monotonic() + float(os.environ["SLOW_S"])
            while time.monotonic() < end_s:
                sum(range(1000))
    return combine(self, *arguments)


def run_llm(flags: list[str]) -> int:
    """A user's program, which knows nothing of peers."""
    from moe_runtime.engine.llm import LLM
    from moe_runtime.engine.request import SamplingParams
    from moe_runtime.launch.distributed import init_ranks

    options: dict[str, Any] = {
        name.removeprefix("--"): int(value) if value.isdigit() else value
        for name, value in zip(flags[::2], flags[1::2], strict=True)
    }
    llm = LLM("builtin", group=init_ranks("cpu"), **options)
    llm.generate([[5, 6, 7]] * 8, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    return 0


if __name__ == "__main__":
    (FOLDER / f"{os.environ['RANK']}.pid").write_text(str(os.getpid()))
    CollectiveDispatcher.combine = failing_combine  # type: ignore[method-assign]
    program = os.environ["PROGRAM"]
    if program == "llm":
        sys.exit(run_llm(sys.argv[1:]))
    sys.exit(import_module(f"moe_runtime.launch.{program}").main(sys.argv[1:]))
