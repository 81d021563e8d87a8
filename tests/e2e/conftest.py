"""A server for the tests that do not break it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers import RunningServer, running_server


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """Two ranks, the built-in model; used from the xdist group ``servers`` alone."""
    flags = ("--max-num-batched-tokens", "128", "--max-num-seqs", "32", "--kv-events")
    with running_server(2, *flags) as running:
        yield running
