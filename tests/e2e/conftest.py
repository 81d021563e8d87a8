"""A server for the tests that do not break it, and the log of any server that a test has lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers import RunningServer, note_lost_servers, running_server


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """Two ranks, the built-in model; used from the xdist group ``servers`` alone."""
    flags = ("--max-num-batched-tokens", "128", "--max-num-seqs", "32", "--kv-events")
    with running_server(2, *flags) as running:
        yield running


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Fixtures do not see the errors of the tests that use their server."""
    if call.excinfo is not None and isinstance(item, pytest.Function):
        note_lost_servers(call.excinfo.value, item.funcargs.values())
    return (yield)
