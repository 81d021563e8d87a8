"""Fixtures for every test: the pool of rank processes, and the xdist group that keeps it on one worker."""

from __future__ import annotations

import os
from collections.abc import Callable
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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put every test that uses ``ranks`` into one xdist group, so that only one worker has a pool."""
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ranks"))


def pytest_sessionfinish() -> None:
    shutdown_ranks()


@pytest.fixture
def ranks() -> Callable[..., list[Any]]:
    """``ranks(world_size, fn, *args)``: results by rank; see ``tests/ranks.py``."""
    return run_ranks
