"""Every kernel test starts from the canonical GEMM schedule, whatever audits ran before it."""

from __future__ import annotations

import pytest

from moe_runtime.kernels import schedules


@pytest.fixture(autouse=True)
def canonical_schedules(monkeypatch):
    monkeypatch.setattr(schedules, "_row_tiles", {})
