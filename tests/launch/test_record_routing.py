"""Routing logs of files of prompts: what the requests themselves are given, in order, on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moe_runtime.engine.llm import LLM
from moe_runtime.engine.request import SamplingParams
from moe_runtime.eplb.placement_file import read_placement
from moe_runtime.eplb.routing_log import iter_routing_log, read_routing_header, routing_log_counts
from moe_runtime.launch import plan_placement
from moe_runtime.launch.record_routing import main
from tests.checkpoints import tiny_config, write_checkpoint

PROMPTS = [[5, 9, 81], [7], list(range(20, 60))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("recorded"), tiny_config("qwen3_moe", num_experts=7))


def record(folder: Path, tmp_path: Path, *flags: str) -> Path:
    source, log = tmp_path / "in.jsonl", tmp_path / "log"
    lines = [{"prompt": prompt, "temperature": 0, "ignore_eos": True} for prompt in PROMPTS]
    lines[1] |= {"n": 2, "temperature": 1.0, "seed": 3, "max_tokens": 4}
    source.write_text("\n".join(map(json.dumps, lines)))
    flags = ("--input", str(source), "--output", str(log), "--model", str(folder), *flags)
    assert main(flags) == 0
    return log


def test_the_log_is_what_the_requests_were_given(folder, tmp_path):
    log = record(folder, tmp_path, "--max-tokens", "5", "--batch-size", "2")
    llm = LLM(str(folder))
    params = [SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, return_routed_experts=True)] * 3
    params[1] = SamplingParams(
        temperature=1.0, seed=3, n=2, max_tokens=4, ignore_eos=True, return_routed_experts=True
    )
    expected = [
        output.routed_experts for result in llm.generate(PROMPTS, params) for output in result.outputs
    ]
    found = list(iter_routing_log(log))
    assert [len(ids) for ids in found] == [3 + 4, 1 + 3, 1 + 3, 40 + 4]
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    header = read_routing_header(log)
    model = llm.model.plan.config
    assert header.fingerprint == f"fp_{llm.model.plan.fingerprint}"
    assert (header.moe_layer_ids, header.num_topk) == (tuple(model.moe_layer_ids), model.num_experts_per_tok)
    other = record(folder, tmp_path, "--max-tokens", "5", "--dispatcher", "loopback", "--loopback-ranks", "2")
    assert list(map(np.ndarray.tolist, iter_routing_log(other))) == list(map(np.ndarray.tolist, found))


def test_a_plan_is_made_from_a_log(folder, tmp_path, capsys):
    log = record(folder, tmp_path)
    target = tmp_path / "placement.json"
    flags = ["--load", str(log), "--output", str(target), "--ep-size", "2", "--num-redundant-experts", "1"]
    assert plan_placement.main(flags) == 0
    placement = read_placement(target)
    assert placement.slots_per_rank == (4, 4)
    assert "planned on the first half" in capsys.readouterr().err
    assert placement.num_layers == routing_log_counts(log).shape[1]
    llm = LLM(str(folder), dispatcher="loopback", loopback_ranks=2, initial_placement=str(target))
    assert llm.placement == placement


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-tokens", "-1"], r"max_tokens (-1) must not be negative"),
        (["--batch-size", "0"], r"batch_size (0) must be at least 1"),
    ],
)
def test_bad_flags_are_refused(tmp_path, capsys, flags, message):
    with pytest.raises(SystemExit) as end:
        main(["--input", "x", "--output", str(tmp_path / "log"), *flags])
    assert end.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_text_file_has_a_prompt_a_line_and_needs_a_tokenizer_here(folder, tmp_path, capsys):
    """The file is read as text: a line that is no JSON goes to the tokenizer, which this checkpoint lacks."""
    source = tmp_path / "in.txt"
    source.write_text("To be, or not\n\n")
    flags = ["--input", str(source), "--output", str(tmp_path / "log"), "--model", str(folder)]
    with pytest.raises(SystemExit):
        main([*flags, "--input-format", "text"])
    assert "has no tokenizer; give prompts as token ids" in capsys.readouterr().err
    assert not (tmp_path / "log").exists()
