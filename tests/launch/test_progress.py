"""Progress of long work."""

from __future__ import annotations

import logging

import pytest

from moe_runtime.launch import progress
from moe_runtime.launch.progress import progress_bar


def test_without_a_terminal_progress_is_logged_now_and_then(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LOG_INTERVAL_S", 0.0)
    with caplog.at_level(logging.INFO), progress_bar("loading", shown=True) as report:
        report(1, 4)
        report(4, 4)
    assert [r.getMessage() for r in caplog.records] == ["loading: 1 of 4", "loading: 4 of 4"]


def test_other_ranks_show_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), progress_bar("loading", shown=False) as report:
        report(4, 4)
    assert not caplog.records
