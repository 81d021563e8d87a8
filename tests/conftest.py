"""Fixtures for every test: the pool of rank processes; and the xdist groups that keep what is shared on one worker."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# One thread per process, as in service; set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    # Triton decorates its own library on import, so this comes before anything that imports it.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.ranks import run_ranks, shutdown_ranks

# The same examples in every run, and no verdict by the clock.
settings.register_profile("repository", derandomize=True, deadline=None, database=None)
settings.load_profile("repository")


FAKE_RANKS = Path(__file__).parent / "moe_runtime" / "server"
"""Its tests share a server of that kind."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group for xdist what shares something that is dear to make.

    Every test that uses ``ranks`` is in one group, so that only one worker has a pool. Tests that share a fixture of
    their module are in one group too, so that it is made once: that of ``ranks`` where the module has one, else
    the module's own. So are all tests of the server that fake ranks serve: these are threads of the worker, which must
    not be left to others' tests for minutes. Groups start before single tests, which even out the ends of the workers.
    """
    with_ranks = {item.path for item in items if "ranks" in getattr(item, "fixturenames", ())}
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ranks"))
        elif "server" in getattr(item, "fixturenames", ()) and FAKE_RANKS in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("fake ranks"))
        elif item.get_closest_marker("xdist_group") is None and _shares_with_its_module(item):
            group = (
                "ranks" if item.path in with_ranks else item.path.relative_to(item.config.rootpath).as_posix()
            )
            item.add_marker(pytest.mark.xdist_group(group))


def _shares_with_its_module(item: pytest.Item) -> bool:
    definitions = item._fixtureinfo.name2fixturedefs.values() if isinstance(item, pytest.Function) else ()
    return any(definition[-1].scope == "module" for definition in definitions if definition)


def pytest_sessionfinish() -> None:
    shutdown_ranks()


@pytest.fixture
def ranks() -> Callable[..., list[Any]]:
    """``ranks(world_size, fn, *args)``: results by rank; see ``tests/ranks.py``."""
    return run_ranks
