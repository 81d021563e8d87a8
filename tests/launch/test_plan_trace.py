"""The command with a trace: exit codes, files, the front end's routing."""

from __future__ import annotations

import json

import pytest

from moe_runtime.launch.plan import main
from moe_runtime.launch.plan_trace import replay
from moe_runtime.planner.config import PlanConfig


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"arrival_s": i / 10, "prompt_tokens": 300, "output_tokens": 9, "session": f"user {i % 4}"}
        for i in range(40)
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def test_a_trace_decides_whether_it_fits(trace, tmp_path, capsys):
    words = ["--model", "builtin", "--gpus", "1..4", "--trace", str(trace)]
    output = tmp_path / "plan.json"
    assert main([*words, "--ttft", "1", "--json", str(output)]) == 0
    assert "fits: 100.0% of 40 requests" in capsys.readouterr().out
    found = json.loads(output.read_text())
    assert found["fits"] is True
    assert found["workload"]["input_tokens"] == 300
    assert found["simulation"]["requests"]["finished"] == 40
    assert main([*words, "--ttft", "1e-6", "--json", "-"]) == 3
    assert json.loads(capsys.readouterr().out)["fits"] is False


def test_sessions_stay_where_their_cache_is(trace):
    config = PlanConfig(model="builtin", gpus="4", ep_size=4, tp=1, trace=trace)
    _, found = replay(config, trace)
    assert found.layout.num_groups == 4
    assert found.metrics.num_hit_tokens == 36 * 256  # all but each session's first


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--input-tokens", "5"], "input_tokens (5) must be left out: the trace says it"),
        (["--request-rate", "5"], "request_rate (5.0) must be left out"),
        (["--fail", "9@1", "--gpus", "2"], "fail ('9@1') must name a rank below the fleet's 2"),
        (["--goodput", "1.5"], "goodput (1.5) must be in (0, 1]"),
        (["--max-num-seqs", "0"], "max_num_seqs (0) must be at least 1"),
    ],
)
def test_bad_input_is_one_message(trace, words, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(["--model", "builtin", "--trace", str(trace), *words])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_a_bad_trace_and_a_failure_without_one(tmp_path, capsys):
    (tmp_path / "empty").write_text("")
    for words, message in (
        (["--trace", str(tmp_path / "empty")], "is empty; it must hold at least one request"),
        (["--fail", "0@1"], "fail (0@1) must be left out without a trace"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["--model", "builtin", *words])
        assert end.value.code == 2
        assert message in capsys.readouterr().err
