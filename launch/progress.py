"""Progress of long work: a bar on a terminal, a log line every few seconds otherwise."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["progress_bar"]

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 2.0


@contextmanager
def progress_bar(what: str, *, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """A function to call with (done, total).

    Args:
        what: Shown beside the bar.
        shown: False gives a function that shows nothing, for ranks other than 0.
    """
    if not shown:
        yield lambda done, total: None
    elif sys.stderr.isatty():
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task(what, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)
    else:
        yield _log_now_and_then(what)


def _log_now_and_then(what: str) -> Callable[[int, int], None]:
    last_s = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= LOG_INTERVAL_S:
            last_s = time.monotonic()
            logger.info("%s: %d of %d", what, done, total)

    return report
