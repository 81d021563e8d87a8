"""What is shown of a replay; ``tools/check_plan_page.py`` looks at the plots in a browser."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from moe_runtime.planner.answer import answer
from moe_runtime.planner.config import PlanConfig
from moe_runtime.planner.html_report import write_html
from moe_runtime.planner.replay import Turns
from moe_runtime.planner.simulation import simulate
from moe_runtime.planner.simulation_view import print_simulation, simulation_panels, verdict_of
from moe_runtime.planner.trace_files import open_trace


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    lines = [
        f'{{"arrival_s": {i / 4}, "prompt_tokens": {20 + i}, "output_tokens": {2 + i}}}' for i in range(12)
    ]
    lines.append('{"arrival_s": 9, "prompt_tokens": 2000, "output_tokens": 5}')
    path.write_text("\n".join(lines))
    trace = open_trace(path, 512)
    whole = answer(PlanConfig(model="builtin", gpus="2", gpu="cpu", ep_size=2).with_trace(trace.summary))
    return whole, simulate(
        whole, trace, lambda layout: Turns(layout.num_groups), max_num_seqs=8, failures=["1@2.6"]
    )


def test_tables_say_what_happened(found):
    console = Console(width=160, record=True, file=StringIO())
    print_simulation(found[1], console, 0.99)
    text = console.export_text()
    for words in ("TTFT", "ITL", "prefix cache hit rate", "EP 1 after", "start each replica: torchrun"):
        assert words in text
    assert verdict_of(found[1], 0.99)[0] is False
    assert "1 failed" in text or "failed" in text
    fits, words = verdict_of(found[1], 0.01)
    assert fits
    assert words.startswith("fits: ")


def test_every_panel_has_data_and_is_in_the_page(found, tmp_path):
    whole, simulation = found
    panels = simulation_panels(simulation)
    assert list(panels) == ["replay_latency", "replay_kv", "replay_queue"]
    for panel in panels.values():
        for curve in panel["data"]:
            assert len(curve["x"]) == len(curve["y"]) > 1
    assert max(panels["replay_kv"]["data"][0]["y"]) > 0
    assert {curve["name"] for curve in panels["replay_latency"]["data"]} == {
        "TTFT",
        "TPOT",
        "ITL",
        "end to end",
    }
    pytest.importorskip("plotly")
    write_html(whole, tmp_path / "plan.html", simulation)
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    for name in (*panels, "heat", "pareto"):
        assert f'id="{name}"' in text
    assert "requests ended within the SLO" in text
    assert text.count("<script src=") == 0
