"""Progress of long work: a bar on a terminal, a log line every tenth otherwise."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["progress_bar"]

logger = logging.getLogger(__name__)


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
        yield _log_tenths(what)


def _log_tenths(what: str) -> Callable[[int, int], None]:
    last = -1

    def report(done: int, total: int) -> None:
        nonlocal last
        tenth = 10 * done // max(total, 1)
        if tenth > last:
            last = tenth
            logger.info("%s: %d %%", what, 10 * tenth)

    return report
