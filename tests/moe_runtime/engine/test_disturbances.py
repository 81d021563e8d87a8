"""Preemptions and aborts at given points: they come where they are planned, and what is left undone is told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moe_runtime.engine.disturbances import PlannedDisturbances
from moe_runtime.engine.engine import Engine
from moe_runtime.engine.llm import LLM
from moe_runtime.engine.request import SamplingParams
from moe_runtime.engine.scheduler import Scheduler
from moe_runtime.engine.sequence import Sequence
from tests.checkpoints import tiny_config, write_checkpoint

PARAMS = SamplingParams(
    temperature=0, max_tokens=12, ignore_eos=True, logprobs=1, prompt_logprobs=0, seed=0, cache_prompt=False
)
PROMPTS = [[(7 * i + j) % 128 for j in range(100 + i)] for i in range(3)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    llm = LLM(str(write_checkpoint(tmp_path_factory.mktemp("model"), tiny_config("mixtral"))), max_num_seqs=4)
    yield llm
    llm.close()


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_a_request_is_preempted_where_it_is_planned_and_goes_on(
    llm: LLM, overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.reconfigure(overlap=overlap, max_num_batched_tokens=64)  # type: ignore[arg-type]
    expected = llm.generate(PROMPTS, PARAMS)
    found: list[tuple[str, int]] = []
    preempt = Scheduler._preempt

    def seen(self: Scheduler, sequence: Sequence) -> None:
        assert -1 not in sequence.token_ids, "what is recomputed is known"
        found.append((sequence.request_id, sequence.num_computed_tokens))
        preempt(self, sequence)

    monkeypatch.setattr(Scheduler, "_preempt", seen)
    planned = PlannedDisturbances(preempt_at={0: (64, 64, 100), 2: (105,)})
    assert llm.generate(PROMPTS, PARAMS, disturbances=planned) == expected
    assert [count for name, count in found if name == "0"] == [64, 64, 100]
    assert [name for name, _ in found].count("2") == 1
    assert isinstance(llm.engine, Engine)
    assert llm.engine.stats().num_preemptions == 4


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_an_aborted_request_ends_there_and_the_others_do_not_notice(llm: LLM, overlap: str) -> None:
    llm.reconfigure(overlap=overlap)  # type: ignore[arg-type]
    expected = llm.generate(PROMPTS, PARAMS)
    first, aborted, last = llm.generate(PROMPTS, PARAMS, disturbances=PlannedDisturbances(abort_at={1: 5}))
    assert [first, last] == [expected[0], expected[2]]
    (choice,) = aborted.outputs
    assert choice.finish_reason == "abort"
    assert 4 <= len(choice.token_ids) <= 5
    assert choice.token_ids == expected[1].outputs[0].token_ids[: len(choice.token_ids)]
    assert llm.engine.stats().num_free_kv_blocks == llm.engine.stats().num_kv_blocks


@pytest.mark.parametrize(
    ("planned", "message"),
    [
        (
            PlannedDisturbances(preempt_at={1: (64, 200)}),
            "request 1 ended before it was preempted at 200 computed tokens",
        ),
        (PlannedDisturbances(abort_at={2: 12}), "request 2 ended before 12 output tokens"),
    ],
)
def test_what_did_not_come_is_told(llm: LLM, planned: PlannedDisturbances, message: str) -> None:
    llm.reconfigure(overlap="off")
    with pytest.raises(RuntimeError, match=message):
        llm.generate(PROMPTS, PARAMS, disturbances=planned)


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_a_preemption_that_finds_the_request_ended_is_told(llm: LLM, overlap: str) -> None:
    """Under overlap the step that computes the last of its tokens is under way: waited for, it ends the request."""
    llm.reconfigure(overlap=overlap)  # type: ignore[arg-type]
    num_computed = len(PROMPTS[1]) + 11
    planned = PlannedDisturbances(preempt_at={1: (num_computed,)})
    with pytest.raises(RuntimeError, match=f"request 1 ended before it was preempted at {num_computed} comp"):
        llm.generate(PROMPTS, PARAMS, disturbances=planned)
    llm.generate(PROMPTS, PARAMS, disturbances=PlannedDisturbances(preempt_at={1: (num_computed - 1,)}))
    assert llm.engine.stats().num_preemptions == 1
