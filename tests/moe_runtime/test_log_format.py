"""Lines of the log, as text and as JSON."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from moe_runtime.log_format import formatter


def _record(message: str, **more: object) -> logging.LogRecord:
    record = logging.LogRecord("moe_runtime.x", logging.WARNING, __file__, 1, message, None, None)
    record.__dict__.update(more)
    return record


def test_text_carries_the_rank_or_the_process() -> None:
    assert formatter("text", 3).format(_record("hello")).endswith(" WARNING [rank 3] moe_runtime.x: hello")
    assert " WARNING front-end moe_runtime.x: hello" in formatter("text", "front-end").format(
        _record("hello")
    )


@pytest.mark.parametrize(("source", "rank", "process"), [(3, 3, "rank"), ("front-end", None, "front-end")])
def test_json_is_one_object_a_line(source: int | str, rank: int | None, process: str) -> None:
    text = formatter("json", source).format(_record('two\nlines "quoted"', fields={"step": 7}))
    assert "\n" not in text
    line = json.loads(text)
    assert line["message"] == 'two\nlines "quoted"'
    assert (line["level"], line["logger"], line["rank"], line["process"]) == (
        "warning",
        "moe_runtime.x",
        rank,
        process,
    )
    assert line["fields"] == {"step": 7}
    assert line["time"].endswith("+00:00")
    assert "traceback" not in line


def test_json_holds_the_traceback() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        record = _record("it failed", exc_info=sys.exc_info())
    line = json.loads(formatter("json", 0).format(record))
    assert "ValueError: broken" in line["traceback"]
