"""Running batches under other limits."""

from __future__ import annotations

import pytest

from moe_runtime.engine.llm import LLM
from moe_runtime.verify.prompts import PromptSource
from moe_runtime.verify.runner import Run, Runner

SOURCE = PromptSource(seed=1, vocab_size=128, context=512, max_tokens=6)


def test_outputs_come_in_the_order_of_the_cases(llm: LLM) -> None:
    cases = SOURCE.random_cases(3)
    runner = Runner(llm)
    outputs = runner.run(Run(name="all", cases=cases)).outputs
    turned = runner.run(Run(name="turned", cases=cases[::-1])).outputs
    assert turned[::-1] == outputs
    assert all(len(o.token_ids) == len(o.logprobs) == 6 for o in outputs)
    assert all(len(entry.top_ids) == 5 for o in outputs for entry in o.logprobs)


def test_a_scored_output_is_the_generated_one(llm: LLM) -> None:
    cases = SOURCE.random_cases(2)
    runner = Runner(llm)
    outputs = runner.run(Run(name="decode", cases=cases)).outputs
    scored = [case.scored(output.token_ids) for case, output in zip(cases, outputs, strict=True)]
    assert runner.run(Run(name="prefill", cases=scored)).outputs == outputs


def test_limits_hold_for_their_run_only(llm: LLM) -> None:
    runner = Runner(llm)
    cases = SOURCE.random_cases(2)
    started = llm.engine.stats().num_kv_blocks
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": 9, "kv_cache_blocks": 6}
    runner.run(Run(name="small", cases=cases, **limits))
    assert llm.engine.stats().num_kv_blocks == 6
    assert (llm.config.max_num_seqs, llm.config.max_num_batched_tokens) == (1, 9)
    assert llm.engine.num_steps > sum(len(case.prompt_ids) for case in cases) / 9
    runner.run(Run(name="normal", cases=cases))
    assert llm.engine.stats().num_kv_blocks == started
    assert (llm.config.max_num_seqs, llm.config.max_num_batched_tokens) == (64, 512)


def test_preemptions_are_counted_per_run(llm: LLM) -> None:
    source = PromptSource(seed=1, vocab_size=128, context=512, max_tokens=70)
    cases = [case for case in source.random_cases(6) if len(case.prompt_ids) < 256][:2]
    num_blocks = sum(-(-(len(case.prompt_ids) + 1) // 64) for case in cases)
    runner = Runner(llm)
    run = Run(name="tight", cases=cases, kv_cache_blocks=num_blocks)
    assert [runner.run(run).num_preemptions for _ in range(2)] == [1, 1]
    assert runner.run(Run(name="normal", cases=cases)).num_preemptions == 0


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_progress_counts_finished_requests(llm: LLM, max_tokens: int) -> None:
    counts: list[int] = []
    cases = [case.shortened(max_tokens) for case in SOURCE.random_cases(3)]
    Runner(llm).run(Run(name="all", cases=cases), on_finished=counts.append)
    assert counts[-1] == 3
    assert counts == sorted(counts)
