"""The end of a rank whose peer has gone, stalled or is late."""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn

from moe_runtime.exit_codes import EXIT_FAULT
from moe_runtime.launch.cli import print_error

__all__ = ["leave_at_once"]


def leave_at_once(reason: str) -> NoReturn:
    """Say why, and end this process without freeing anything: a kernel on its GPU may wait for the peer for ever, and
    freeing memory waits for that kernel.

    Args:
        reason: Names the peer.
    """
    print_error(reason)
    logging.shutdown()
    sys.stdout.flush()
    os._exit(EXIT_FAULT)
