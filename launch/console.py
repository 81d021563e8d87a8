"""The ``moe-runtime`` command: the same programs as the ``-m`` targets, for one process.

``moe-runtime serve`` is ``python -m moe_runtime.serve``; several ranks are started by torchrun with the ``-m`` form.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from moe_runtime import __version__

__all__ = ["COMMANDS", "main", "module_of"]

COMMANDS = {
    "serve": "serve a model over HTTP",
    "generate": "generate for a file of prompts",
    "record-routing": "record which experts the tokens of a file of prompts go to",
    "plan-placement": "plan where experts go from their load",
    "check": "prove that results depend on nothing but the request",
    "audit": "find which schedules give the same bits on this device",
    "plan": "how many GPUs a model needs, and what invariance costs",
    "calibrate": "time kernels and transports here, for the plan",
    "demo-model": "make a small chat model to try",
}


def main(args: Sequence[str] | None = None) -> int:
    """Run a command. Returns its exit code."""
    words = list(sys.argv[1:] if args is None else args)
    if words[:1] == ["--version"]:
        print(__version__)
        return 0
    if not words or words[0] in ("-h", "--help"):
        print("usage: moe-runtime COMMAND [flags]\n")
        for name, what in COMMANDS.items():
            print(f"  {name:14} {what}")
        return 0
    if words[0] not in COMMANDS:
        print(f"error: {words[0]} is no command; known are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    result: int = importlib.import_module(f"moe_runtime.launch.{module_of(words[0])}").main(words[1:])
    return result


def module_of(command: str) -> str:
    """Name of the module, in ``launch`` and beside it, that runs a command."""
    return command.replace("-", "_")


if __name__ == "__main__":
    sys.exit(main())
