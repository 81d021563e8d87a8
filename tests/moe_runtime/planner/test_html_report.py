"""The HTML file: whole, self-contained, with every panel. ``tools/check_plan_page.py`` looks at it in a browser."""

from __future__ import annotations

import re
import sys

import pytest

from moe_runtime.planner.answer import answer
from moe_runtime.planner.config import PlanConfig
from moe_runtime.planner.html_report import check_plotly, write_html
from moe_runtime.planner.panels import panels


def test_every_panel_is_in_one_file_that_loads_nothing(tmp_path):
    pytest.importorskip("plotly")
    found = answer(PlanConfig(model="builtin", gpus="1..8", input_tokens=100, output_tokens=50))
    write_html(found, tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    for name in panels(found):
        assert f'id="{name}"' in text
    assert "<script src=" not in text
    assert not re.search(r'<link[^>]+href="http', text)
    assert "id='verdict'><b>fits" in text
    assert "torchrun --nproc-per-node" in text


def test_without_plotly_it_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ValueError, match=r"html needs plotly: install moe-runtime\[plan\]"):
        check_plotly()
