"""The batches that each axis makes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from moe_runtime.verify.axes import AXES, BUCKET_EDGES, FEWEST_STEP_TOKENS, AxisSetup, Verdict
from moe_runtime.verify.compare import Output
from moe_runtime.verify.prompts import PromptSource
from moe_runtime.verify.runner import Run
from moe_runtime.verify.topologies import Topology

SOURCE = PromptSource(seed=0, vocab_size=50, context=1024, max_tokens=50)
CASES = SOURCE.random_cases(64)
REFERENCE = {case.name: Output(token_ids=tuple(range(50)), logprobs=()) for case in CASES}
TOPOLOGIES = (Topology(ranks="all", tp=2), Topology(ranks="alone"))
SETUP = AxisSetup(
    source=SOURCE, cases=CASES, reference=REFERENCE, num_engines=4, block_size=64, topologies=TOPOLOGIES
)


def runs_of(name: str, setup: AxisSetup = SETUP) -> list[Run]:
    return AXES[name].make_runs(setup)


def names(run: Run) -> list[str]:
    return [case.name for case in run.cases]


def test_each_verdict_has_an_axis() -> None:
    assert {axis.verdict for axis in AXES.values()} == set(Verdict)


@pytest.mark.parametrize("name", AXES)
@pytest.mark.parametrize("full", [False, True])
def test_every_request_can_run(name: str, full: bool) -> None:
    setup = replace(SETUP, full=full, enforce_eager=False)
    for run in runs_of(name, setup):
        assert run.cases
        for case in run.cases:
            num_tokens = len(case.prompt_ids) + (case.params.max_tokens or 0)
            assert num_tokens <= 1024
            if run.kv_cache_blocks is not None:
                assert num_tokens <= run.kv_cache_blocks * 64
        for per_case in (run.ranks, run.arrival_steps):
            assert per_case is None or len(per_case) == len(run.cases)
        assert run.ranks is None or set(run.ranks) <= set(range(4))
        if run.max_num_batched_tokens is not None:
            assert (run.max_num_seqs or 0) <= run.max_num_batched_tokens


def test_the_same_batch_runs_again_and_in_another_order() -> None:
    (again,) = runs_of("again")
    (shuffled,) = runs_of("shuffled")
    assert list(again.cases) == CASES
    assert names(shuffled) != names(again)
    assert Counter(names(shuffled)) == Counter(names(again))


@pytest.mark.parametrize(("changes", "num_runs"), [({}, 8), ({"num_alone": 20}, 20), ({"full": True}, 64)])
def test_requests_run_alone_on_every_rank(changes: dict[str, Any], num_runs: int) -> None:
    runs = runs_of("alone", replace(SETUP, **changes))
    assert [len(run.cases) for run in runs] == [1] * num_runs
    assert {rank for run in runs for rank in run.ranks or ()} == {0, 1, 2, 3}
    assert {case.params.temperature for run in runs for case in run.cases} == {0.0, 0.8}


def test_arrivals_are_spread() -> None:
    (run,) = runs_of("arrival")
    assert len(set(run.arrival_steps or ())) > 10
    assert len(set(run.ranks or ())) == 4


def test_chunks_are_cut_around_the_block_size_and_not_at_all() -> None:
    runs = runs_of("chunks")
    assert [run.max_num_batched_tokens for run in runs][:3] == [63, 64, 65]
    whole = sum(len(case.prompt_ids) for case in runs[0].cases)
    assert runs[-1].max_num_batched_tokens == whole
    assert len(runs_of("chunks", replace(SETUP, full=True))) > len(runs)


@pytest.mark.parametrize("num_engines", [1, 2, 8])
def test_the_small_cache_is_full_at_the_start(num_engines: int) -> None:
    (run,) = runs_of("preempt", replace(SETUP, num_engines=num_engines))
    assert run.kv_cache_blocks is not None
    by_rank = Counter[int]()
    for case, rank in zip(run.cases, run.ranks or (), strict=True):
        by_rank[rank] += -(-(len(case.prompt_ids) + 1) // 64)
    assert all(blocks >= run.kv_cache_blocks for blocks in by_rank.values())


def test_prefixes_run_computed_cold_warm_flushed_shared_and_in_a_full_cache() -> None:
    runs = runs_of("radix_cache")
    assert [run.prefix_cache for run in runs[:5]] == ["off", "cold", "warm", "cold", "warm"]
    computed, *others = runs
    assert len({case.name for case in computed.cases}) == len(computed.cases)
    lengths = {len(case.prompt_ids) for case in computed.cases}
    assert {b * 64 + by for b in (1, 2, 4) for by in (-1, 0, 1)} <= lengths
    scored = [case for case in computed.cases if case.num_scored]
    assert [case.num_scored for case in scored] == [126, 127, 128]
    assert all(case.params.max_tokens == 0 for case in scored)
    salts = {case.params.cache_salt for run in others for case in run.cases}
    assert salts == {None, "a", "b"}
    assert {case.params.cache_prompt for run in others for case in run.cases} == {True, False}
    tight = [run for run in runs if run.kv_cache_blocks is not None]
    assert [run.prefix_cache for run in tight] == ["cold", "warm", "cold"]
    assert tight[0].kv_cache_blocks == tight[1].kv_cache_blocks
    (preempted,) = runs_of("preempt")
    assert tight[2].kv_cache_blocks == preempted.kv_cache_blocks
    assert runs_of("radix_cache", replace(SETUP, prefix_cache=False)) == []
    short = replace(SOURCE, context=110)
    assert runs_of("radix_cache", replace(SETUP, source=short)) == []


def test_every_other_axis_computes_all_of_every_request() -> None:
    setup = replace(SETUP, enforce_eager=False)
    assert {run.prefix_cache for name in AXES if name != "radix_cache" for run in runs_of(name, setup)} == {
        "off"
    }


def test_one_prompt_fills_batches_of_many_sizes() -> None:
    runs = runs_of("single")
    assert [len(run.cases) for run in runs] == [1, 2, 7, 16, 33, 64]
    assert len({name for run in runs for name in names(run)}) == 2
    assert len({case.prompt_ids for run in runs for case in run.cases}) == 1
    assert len(runs_of("single", replace(SETUP, full=True))) == 64


@pytest.mark.parametrize("name", ["mixed", "prefix"])
def test_random_batches_hold_half_or_more_of_the_prompts(name: str) -> None:
    first, *others = runs_of(name)
    assert len(others) >= 2
    for run in others:
        assert set(names(run)) <= set(names(first))
        assert len(first.cases) <= 2 * len(run.cases)
        assert names(run) != names(first)[: len(run.cases)]


def test_reference_tokens_are_forced_and_scored() -> None:
    (forced,) = runs_of("forced")
    (scored,) = runs_of("scored")
    assert all(case.params.forced_token_ids == tuple(range(50)) for case in forced.cases)
    assert all(case.prompt_ids[-50:] == tuple(range(50)) for case in scored.cases)
    assert all(case.params.prompt_logprobs == 5 for case in scored.cases)


@pytest.mark.parametrize(
    ("max_num_seqs", "full", "largest"), [(1, False, 1), (40, False, 33), (64, False, 64), (256, True, 257)]
)
def test_batches_and_steps_have_every_size_around_a_tile(max_num_seqs: int, full: bool, largest: int) -> None:
    runs = runs_of("buckets", replace(SETUP, max_num_seqs=max_num_seqs, full=full))
    batches = [len(run.cases) for run in runs if run.max_num_batched_tokens is None]
    assert batches == [edge for edge in BUCKET_EDGES if edge <= largest]
    assert names(runs[len(batches) - 1])[: batches[0]] == names(runs[0])
    steps = [run for run in runs if run.max_num_batched_tokens is not None]
    longest = max(len(case.prompt_ids) for case in CASES)
    assert longest >= 257
    step_sizes = [edge for edge in BUCKET_EDGES if edge <= longest and (full or edge >= FEWEST_STEP_TOKENS)]
    assert [run.max_num_batched_tokens for run in steps] == step_sizes
    assert {name for run in steps for name in names(run)} <= set(REFERENCE)


def test_graphs_are_switched_to_what_the_engine_did_not_start_with() -> None:
    assert runs_of("graph") == []
    for started in (False, True):
        (run,) = runs_of("graph", replace(SETUP, enforce_eager=started))
        assert run.enforce_eager is not started
        assert list(run.cases) == CASES


@pytest.mark.parametrize(("full", "num_cases", "num_tokens"), [(False, 8, 8), (True, 64, 50)])
def test_other_deployments_run_a_few_cases_in_a_small_cache(
    full: bool, num_cases: int, num_tokens: int
) -> None:
    runs = runs_of("topology", replace(SETUP, full=full))
    assert [(run.name, run.topology) for run in runs] == [(t.name, t) for t in TOPOLOGIES]
    for run in runs:
        assert Counter(names(run)) == Counter(case.name for case in CASES[:num_cases])
        assert names(run) != [case.name for case in CASES[:num_cases]]
        assert {case.params.max_tokens for case in run.cases} == {num_tokens}
        longest = max(len(case.prompt_ids) for case in run.cases) + num_tokens
        assert run.kv_cache_blocks is not None
        assert longest <= run.kv_cache_blocks * 64 <= 8 * (longest + 64)


def test_other_deployments_run_with_and_without_graphs_where_there_are_graphs() -> None:
    runs = runs_of("topology", replace(SETUP, enforce_eager=False))
    assert [(run.name, run.enforce_eager) for run in runs] == [
        ("collective tp 2 with graphs", False),
        ("collective tp 2 without graphs", True),
        ("EP 1 with graphs", False),
        ("EP 1 without graphs", True),
    ]


def test_without_other_deployments_there_is_nothing_to_run() -> None:
    assert runs_of("topology", replace(SETUP, topologies=())) == []
    assert list(AXES)[-1] == "topology"


@pytest.mark.parametrize(("full", "lengths"), [(False, [1, 3, 8]), (True, list(range(1, 9)))])
def test_drafts_are_of_every_kind_and_number(full: bool, lengths: list[int]) -> None:
    runs = runs_of("speculation", replace(SETUP, full=full))
    kinds = [run.drafting for run in runs if run.drafting is not None]
    assert len(kinds) == len(runs)
    assert [kind.kind for kind in kinds] == [
        "off",
        *["ngram"] * len(lengths),
        "right",
        "wrong",
        "mixed",
        "mixed",
    ]
    assert [kind.most_drafts for kind in kinds if kind.kind == "ngram"] == lengths
    assert any(case.num_scored for case in runs[-2].cases), "beside prompts that are scored"
    assert runs[-1].max_num_batched_tokens == 65
    (draft,) = set(names_of_kinds(replace(SETUP, has_draft_model=True))) - set(names_of_kinds(SETUP))
    assert draft == "draft"


def names_of_kinds(setup: AxisSetup) -> list[str]:
    return [run.drafting.kind for run in runs_of("speculation", setup) if run.drafting is not None]
