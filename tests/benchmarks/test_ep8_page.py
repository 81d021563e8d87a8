"""The page of a run on several ranks, and what counts as a fault of it: pure functions of the run's JSON."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.benchmark_modules import load_benchmark_module

results = load_benchmark_module("ep8_results")
make_page = load_benchmark_module("ep8_page").make_page


def step(part: str, name: str, result: Any, **changes: Any) -> dict[str, Any]:
    command = {"name": name, "command": "python x", "exit_code": 0, "result": result, "last_lines": []}
    return {
        "name": name,
        "part": part,
        "expected_s": 30.0,
        "state": "done",
        "reason": "",
        "limit_s": 60.0,
        "wall_s": 21.3,
        "commands": [command],
        **changes,
    }


def report(digest: str) -> dict[str, Any]:
    def axis(name: str, **changes: Any) -> dict[str, Any]:
        usual = {"num_cases": 64, "passed": True, "not_applicable": None, "deployments": {}, "not_run": {}}
        return {"name": name, **usual, **changes}

    return {
        "facts": {"model": "builtin", "prompts": 64, "output tokens": 50},
        "digest": digest,
        "axes": [
            axis("alone"),
            axis("graph", not_applicable="not applicable", passed=False),
            axis(
                "topology",
                deployments={"collective tp 1": 0, "EP 1": 0},
                not_run={"symmetric tp 8": "tp (8) must divide the heads (4)"},
            ),
        ],
        "wall_s": 12.0,
        "is_complete": True,
    }


def layer(tokens: int, **changes: Any) -> dict[str, Any]:
    numbers = {"us": 21.5, "gbps": 133.0, "floor_us": 7.4, "floor_fraction": 0.344, "exposed_us": 9.2}
    numbers |= {"dispatch_us": 8.0, "rows_us": 12.0}
    return {"kind": "layer", "tokens_per_rank": tokens, **numbers, "bits": "bits equal", **changes}


@pytest.fixture
def document() -> dict[str, Any]:
    """A run of every part, all of it right."""
    dispatch = {
        "shapes": {"hidden": 7168, "experts": 256, "topk": 8, "dtype": "bfloat16"},
        "link_gbps": 365.0,
        "results": [
            layer(128),
            {
                "kind": "collective",
                "tokens_per_rank": 128,
                "us": 78.0,
                "nccl_pair_us": 31.7,
                "nccl_pair_gbps": 90.1,
                "bits": "bits equal",
            },
            {"kind": "prefill", "transfer": "dispatch and barrier", "tokens_per_rank": 4096, "gbps": 334.8},
        ],
    }
    reduced = {
        "results": [
            {
                "shape": [128, 2048],
                "parts": "bfloat16",
                "floor_us": 1.4,
                "ours": [{"form": "one-shot", "chosen": True, "us": 4.6, "bits": "equal"}],
                "libraries_us": {"NCCL all_reduce": 9.9},
            }
        ]
    }
    engine = {
        "model": "Qwen3-30B-A3B dimensions, dummy bf16",
        "num_ranks": 8,
        "dispatcher": "symmetric",
        "load_s": 6.0,
        "steady": {
            "num_seqs": 2048,
            "prompt_tokens": 128,
            "output_tokens": 1024,
            "ms": 14.25,
            "decode_tokens_per_s": 143719.3,
            "output_tokens_per_s": 139000.0,
        },
        "prefill": {"tokens_per_s": 431000.0, "num_prompts": 64, "prompt_tokens": 2048},
        "decode": [{"num_seqs": 8, "ms": 3.5, "host_ms": 0.7}],
    }
    server = {
        "model": "Qwen3-30B-A3B dimensions, dummy bf16",
        "ranks": 8,
        "ready_s": 17.0,
        "requests": 1000,
        "streams": 512,
        "kinds": {"chat, whole": 300, "completion, streamed": 700},
        "incomplete": 0,
        "requests_per_s": 61.2,
        "prompt_tokens": 250000,
        "output_tokens": 128000,
        "output_tokens_per_s": 7833.6,
        "ttft_ms": {"p50": 80.0, "p90": 120.0, "p99": 200.0},
        "itl_ms": {"p50": 15.1, "p90": 20.2, "p99": 40.4},
        "front_end_share_of_a_core": 0.71,
        "repeated": 24,
        "repeated_equal": 24,
    }
    return {
        "command": "python benchmarks/ep8.py --ranks 8",
        "commit": "abc1234",
        "started": "2026-01-01T00:00:00+00:00",
        "device": "cuda",
        "devices": "8 x NVIDIA H200",
        "ranks": 8,
        "versions": {"python": "3.12.1", "torch": "2.11.0"},
        "budget_s": 560.0,
        "wall_s": 471.2,
        "is_complete": True,
        "steps": [
            step("check", "check built-in EP 8", report("a" * 64)),
            step("check", "check built-in EP 1", report("a" * 64)),
            step("dispatch", "hidden 7168", dispatch),
            step("dispatch", "all-reduce", reduced),
            step("engine", "engine", engine),
            step("server", "HTTP server", server),
        ],
    }


def test_a_run_without_faults(document: dict[str, Any]) -> None:
    assert results.faults(document) == []
    page = make_page(document)
    assert "Everything ran and passed." in page
    assert "One digest: built-in EP 8, built-in EP 1." in page
    for row in (
        "| commit | abc1234 |",
        "| versions | python 3.12.1, torch 2.11.0 |",
        "| check | check built-in EP 8 | done | 30 | 21 |",
        "| built-in EP 8 | 64 x 50 | aaaaaaaaaaaaaaaa | alone (64), topology (64) | - | 12 |",
        "| 128 | 21.5 | 133.0 | 7.4 | 34% | 9.2 | 8.0 | 12.0 | 31.7 | 90.1 | 78.0 | equal |",
        "| 128 x 2048 | bfloat16 | 4.6 | 1.4 | 30% | 9.9 | equal |",
        "| decode, 2048 sequences, 128 in, 1024 out | 14.25 ms a step, 143,719 tokens/s |",
        "| prefill, 64 x 2048 tokens | 431,000 tokens/s |",
        "| sent again alone, equal | 24 of 24 |",
    ):
        assert row in page, row
    assert "topology, equal on: collective tp 1, EP 1." in page
    assert "not run: symmetric tp 8: tp (8) must divide the heads (4)." in page
    assert "dispatch and barrier 334.8 GB/s" in page
    assert "about 25,100 tokens/s" in page
    assert "Last lines" not in page


def test_the_page_depends_on_the_json_alone(document: dict[str, Any]) -> None:
    before = copy.deepcopy(document)
    assert make_page(document) == make_page(document)
    assert document == before


def test_what_was_left_out_is_said_and_is_no_fault(document: dict[str, Any]) -> None:
    document["steps"][4] |= {
        "state": "left out",
        "reason": "it takes about 50 s, and 31 s were left",
        "commands": [],
    }
    document["steps"][2]["commands"][0]["result"]["results"].append(
        {"kind": "left out", "what": "collective at 4096"}
    )
    assert results.faults(document) == []
    page = make_page(document)
    assert "Everything that ran passed." in page
    assert "- engine: it takes about 50 s, and 31 s were left" in page
    assert "- hidden 7168: collective at 4096" in page
    assert "## Engine" not in page


def test_a_step_that_failed_shows_its_last_lines(document: dict[str, Any]) -> None:
    document["steps"][5] |= {"state": "failed", "reason": "server ended with exit code 1"}
    document["steps"][5]["commands"][0] |= {
        "exit_code": 1,
        "result": None,
        "last_lines": ["RuntimeError: a | b"],
    }
    assert results.faults(document) == ["HTTP server: failed, server ended with exit code 1"]
    page = make_page(document)
    assert "Not as it should be:\n\n- HTTP server: failed" in page
    assert "HTTP server, exit code 1:\n\n```\nRuntimeError: a | b\n```" in page


def test_a_run_that_was_cut_off_keeps_what_it_has(document: dict[str, Any]) -> None:
    document |= {"is_complete": False, "steps": document["steps"][:1]}
    page = make_page(document)
    assert "The run was cut off; what is here passed." in page
    assert "## Check" in page
    assert "## HTTP server" not in page
    document["steps"] = []
    assert "The run was cut off" in make_page(document)


def test_a_check_that_was_ended_shows_the_axes_that_ran(document: dict[str, Any]) -> None:
    document["steps"][0] |= {"state": "cut off", "reason": "check built-in EP 8 was ended after 60 s"}
    unfinished = document["steps"][0]["commands"][0]["result"]
    unfinished |= {"axes": unfinished["axes"][:1], "is_complete": False}
    page = make_page(document)
    assert "| built-in EP 8 (unfinished) | 64 x 50 | aaaaaaaaaaaaaaaa | alone (64) | - | 12 |" in page
    assert "- check built-in EP 8: cut off" in page


def wrong_digest(document: dict[str, Any]) -> None:
    document["steps"][1]["commands"][0]["result"]["digest"] = "b" * 64


def wrong_layer(document: dict[str, Any]) -> None:
    document["steps"][2]["commands"][0]["result"]["results"][0]["bits"] = "bits DIFFER: dispatch"


def failed_layer(document: dict[str, Any]) -> None:
    rows = document["steps"][2]["commands"][0]["result"]["results"]
    rows[1] = {"kind": "collective", "tokens_per_rank": 128, "error": "NCCL refuses"}


def wrong_sum(document: dict[str, Any]) -> None:
    document["steps"][3]["commands"][0]["result"]["results"][0]["ours"][0]["bits"] = "DIFFERENT"


def wrong_answer(document: dict[str, Any]) -> None:
    document["steps"][5]["commands"][0]["result"]["repeated_equal"] = 23


def lost_answer(document: dict[str, Any]) -> None:
    document["steps"][5]["commands"][0]["result"]["incomplete"] = 2


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (
            wrong_digest,
            "the digests differ: check built-in EP 8: aaaaaaaaaaaaaaaa; check built-in EP 1: bbbb",
        ),
        (wrong_layer, "hidden 7168: layer of 128 tokens: bits DIFFER: dispatch"),
        (failed_layer, "hidden 7168: collective of 128 tokens: NCCL refuses"),
        (wrong_sum, "all-reduce: all-reduce of bfloat16 [128, 2048]: other bits by one-shot"),
        (wrong_answer, "1 of 24 answers differ from those in company"),
        (lost_answer, "2 of 1000 answers are not complete"),
    ],
)
def test_other_bits_are_a_fault_though_every_program_ended_well(
    document: dict[str, Any], spoil: Any, fault: str
) -> None:
    spoil(document)
    (found,) = results.faults(document)
    assert found.startswith(fault)
    assert f"- {fault}" in make_page(document)
