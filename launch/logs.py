"""Logging of a rank's process: one handler on standard error, the rank in every line."""

from __future__ import annotations

import logging
import sys

from moe_runtime.log_format import LogFormat, formatter

__all__ = ["setup_logging"]


def setup_logging(rank: int, *, level: int = logging.INFO, log_format: LogFormat = "text") -> None:
    """Install the handler; ranks other than 0 log from warnings up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(log_format, rank))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level if rank == 0 else max(level, logging.WARNING))
