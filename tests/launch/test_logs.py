"""Log lines carry the rank, in either format."""

from __future__ import annotations

import json
import logging

import pytest

from moe_runtime.launch.logs import setup_logging


@pytest.fixture(autouse=True)
def _restore_root() -> object:
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    yield
    root.handlers[:], level = before
    root.setLevel(level)


def test_rank_0_speaks_from_info_and_the_others_from_warning(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(0)
    logging.getLogger("moe_runtime.x").info("hello")
    setup_logging(5)
    logging.getLogger("moe_runtime.x").info("quiet")
    logging.getLogger("moe_runtime.x").warning("loud")
    text = capsys.readouterr().err
    assert "[rank 0] moe_runtime.x: hello" in text
    assert "quiet" not in text
    assert "[rank 5] moe_runtime.x: loud" in text


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(2, log_format="json")
    logging.getLogger("moe_runtime.x").warning("%d of %d", 3, 4)
    line = json.loads(capsys.readouterr().err)
    assert (line["rank"], line["message"], line["level"]) == (2, "3 of 4", "warning")
