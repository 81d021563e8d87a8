"""Exit codes of every command, in one place; docs/faults.md says what to do about each.

torchrun itself ends with 1 whatever a rank's code was, and names that in its report.
"""

from __future__ import annotations

import signal

__all__ = [
    "EXIT_FAULT",
    "EXIT_MISSED_CONTROL",
    "EXIT_NO_FIT",
    "EXIT_OK",
    "EXIT_SELF_CHECK",
    "EXIT_USAGE",
    "exit_code_of_signal",
]

EXIT_OK = 0  # drained
EXIT_FAULT = 1  # a rank, the front end or the launcher has gone or hangs
EXIT_USAGE = 2  # a bad flag, a port in use, a checkpoint that cannot be loaded, ranks started differently
EXIT_NO_FIT = 3  # does not fit in memory
EXIT_SELF_CHECK = 4  # the invariance self-check failed
EXIT_MISSED_CONTROL = 5  # moe_runtime.check: a control was not noticed


def exit_code_of_signal(signum: int) -> int:
    """What shells call a process ended by a signal: 130 for SIGINT, 143 for SIGTERM. Given after an abort."""
    return 128 + signal.Signals(signum)
