"""Overlap: a step planned and launched while the one before is under way changes no result."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import pytest

from moe_runtime.engine.cpu_runner import CpuRunner
from moe_runtime.engine.llm import LLM, RequestOutput
from moe_runtime.engine.messages import TokenLogprobs
from moe_runtime.engine.ngram_proposer import NgramProposer
from moe_runtime.engine.request import SamplingParams
from moe_runtime.engine.runner import LaunchedStep, Runner
from moe_runtime.engine.sampler import ScoredRow
from moe_runtime.engine.scheduler import ScheduledChunk
from moe_runtime.engine.sequence import UNKNOWN_TOKEN, Sequence
from moe_runtime.engine.speculative import Speculation
from moe_runtime.engine.step_plan import StepPlan
from moe_runtime.verify.drafting import KnowingProposer


class LateRunner(Runner):
    """Runs on the CPU, but tells the engine a step's tokens only when they are collected.

    Like a device, it keeps each sequence's last token for itself and puts it where the engine does not know it yet.
    """

    overlaps = True

    def __init__(self, runner: CpuRunner) -> None:
        self.runner = runner
        self.expert_load = runner.expert_load
        self.last_token: dict[int, int] = {}
        self.num_overlapped = 0

    def launch(
        self, chunks: SequenceOf[ScheduledChunk], tokens_per_rank: SequenceOf[int], *, is_decode: bool
    ) -> LaunchedStep:
        unknown: list[Sequence] = [c.sequence for c in chunks if UNKNOWN_TOKEN in c.sequence.token_ids]
        self.num_overlapped += bool(unknown)
        for sequence in unknown:
            assert sequence.token_ids.count(UNKNOWN_TOKEN) == 1
            sequence.token_ids[-1] = self.last_token[id(sequence)]
        step = self.runner.launch(chunks, tokens_per_rank, is_decode=is_decode)
        results: list[ScoredRow] = step.collect()
        for row, result in zip(step.rows, results, strict=True):
            if row.prompt_position is None:
                self.last_token[id(row.sequence)] = result.token_id
        for sequence in unknown:
            sequence.token_ids[-1] = UNKNOWN_TOKEN
        return LaunchedStep(step.rows, lambda: results, step.routing)

    def uncount(self, token_idx: SequenceOf[int]) -> None:
        self.runner.uncount(token_idx)

    def follow(self, plan: StepPlan, tokens_per_rank: SequenceOf[int], *, is_decode: bool) -> None:
        raise AssertionError("nobody follows one rank")


def _requests() -> tuple[list[list[int]], list[SamplingParams]]:
    prompts = [[(7 * i + j) % 2000 for j in range(5 + 23 * i)] for i in range(10)]
    params = [
        SamplingParams(
            temperature=0.0 if i % 2 else 1.0,
            seed=i,
            max_tokens=20 + 6 * i,
            logprobs=2,
            prompt_logprobs=1 if i % 3 == 0 else None,
            n=1 + i % 2,
            stop_token_ids=(198,) if i % 4 == 1 else (),
            forced_token_ids=(5, 6, 7, 8) if i == 8 else None,
            stop=("e",) if i == 7 else (),
            return_routed_experts=i % 3 < 2,
        )
        for i in range(10)
    ]
    return prompts, params


@pytest.mark.parametrize("kv_cache_blocks", [200, 5])
def test_overlap_changes_no_result(kv_cache_blocks: int) -> None:
    llm = LLM()
    prompts, params = _requests()

    def run(overlap: bool) -> tuple[list[RequestOutput], LateRunner | None]:
        llm.reconfigure(max_num_batched_tokens=48, max_num_seqs=6, kv_cache_blocks=kv_cache_blocks)
        runner = llm.engine.runner
        assert isinstance(runner, CpuRunner)
        late = LateRunner(runner) if overlap else None
        if late is not None:
            llm.engine.runner = late
        results = llm.generate(prompts, params, arrival_steps=[3 * i for i in range(10)])
        assert llm.engine.scheduler.blocks.num_free_blocks == kv_cache_blocks
        return results, late

    expected, _ = run(overlap=False)
    actual, late = run(overlap=True)
    assert actual == expected
    assert late is not None
    assert late.num_overlapped > 10
    assert (llm.engine.scheduler.num_preemptions > 0) == (kv_cache_blocks == 5)


def test_drafts_between_overlapped_steps_change_no_result() -> None:
    llm = LLM()
    prompts, params = ([*requests[:6], *requests[7:9]] for requests in _requests())
    arrivals = [2 * i for i in range(8)]

    def run(speculation: Speculation | None) -> tuple[list[RequestOutput], int]:
        llm.reconfigure(max_num_batched_tokens=64, max_num_seqs=6, kv_cache_blocks=200)
        assert isinstance(llm.engine.runner, CpuRunner)
        late = LateRunner(llm.engine.runner)
        llm.engine.runner = late
        llm.engine.speculation = speculation
        results = llm.generate(prompts, params, arrival_steps=arrivals)
        assert llm.engine.scheduler.blocks.num_free_blocks == 200
        return results, late.num_overlapped

    expected, _ = run(None)
    answers = {str(i): result.outputs[0].token_ids for i, result in enumerate(expected)}
    for proposer, pauses in (
        (KnowingProposer("mixed", answers, 2048), False),
        (KnowingProposer("wrong", answers, 2048), True),
        (NgramProposer(), True),
    ):
        speculation = Speculation(proposer, 4)
        actual, num_overlapped = run(speculation)
        assert actual == expected
        assert speculation.stats().num_draft_tokens > 0
        assert (num_overlapped > 0) is pauses, "steps overlap where drafts pause"


def test_a_sequence_that_ended_leaves_nothing_behind_in_the_step_under_way() -> None:
    llm = LLM()
    llm.reconfigure(kv_cache_blocks=200)
    assert isinstance(llm.engine.runner, CpuRunner)
    llm.engine.runner = LateRunner(llm.engine.runner)
    free = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    [whole] = llm.generate([[5, 6, 7]], free)
    stop_id = whole.outputs[0].token_ids[4]
    first = whole.outputs[0].token_ids.index(stop_id)
    before = llm.engine.num_generation_tokens
    params = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(stop_id,), logprobs=0)
    [stopped] = llm.generate([[5, 6, 7]], params)
    assert stopped.outputs[0].token_ids == whole.outputs[0].token_ids[: first + 1]
    logprobs: tuple[TokenLogprobs, ...] | None = stopped.outputs[0].logprobs
    assert logprobs is not None
    assert len(logprobs) == first + 1
    assert llm.engine.num_generation_tokens == before + first + 1
