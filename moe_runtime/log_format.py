"""What a line of the log looks like: text, or one JSON object with the same fields. Handlers are installed elsewhere.

A record's own data goes into ``extra={"fields": {...}}``. Prompts, outputs and keys never go into a log.
"""

from __future__ import annotations

import json
import logging
import traceback
from datetime import UTC, datetime
from typing import Literal

__all__ = ["LogFormat", "formatter"]

LogFormat = Literal["text", "json"]


def formatter(log_format: LogFormat, source: int | str) -> logging.Formatter:
    """A formatter.

    Args:
        log_format: ``text`` or ``json``.
        source: The rank, or the name of a process that is none.
    """
    return _JsonFormatter(source) if log_format == "json" else _TextFormatter(source)


class _TextFormatter(logging.Formatter):
    def __init__(self, source: int | str) -> None:
        name = f"[rank {source}]" if isinstance(source, int) else source
        super().__init__(f"%(asctime)s %(levelname)s {name} %(name)s: %(message)s")


class _JsonFormatter(logging.Formatter):
    """``time`` (UTC), ``level``, ``rank`` (None for no rank), ``process``, ``pid``, ``logger``, ``message``, then
    ``fields`` and ``traceback`` where there are any."""

    def __init__(self, source: int | str) -> None:
        super().__init__()
        self._rank = source if isinstance(source, int) else None
        self._process = "rank" if isinstance(source, int) else source

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "rank": self._rank,
            "process": self._process,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields = getattr(record, "fields", None)
        if fields is not None:
            line["fields"] = fields
        if record.exc_info is not None and record.exc_info[0] is not None:
            line["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(line, default=str)
