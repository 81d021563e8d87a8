"""Logging of a rank's process: one handler on standard error, the rank in every line."""

from __future__ import annotations

import logging
import sys

__all__ = ["setup_logging"]


class _RankFilter(logging.Filter):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = self.rank
        return True


def setup_logging(rank: int, *, level: int = logging.INFO) -> None:
    """Install the handler; ranks other than 0 log from warnings up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_RankFilter(rank))
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s [rank %(rank)d] %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level if rank == 0 else max(level, logging.WARNING))
