"""Expert load where steps overlap: the counts of steps that do not, whichever way sequences end.

On CPU ranks, and with the GPU's runner, which runs in Triton's interpreter where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_runtime.comm.groups import RankGroup
from moe_runtime.engine.disturbances import PlannedDisturbances
from moe_runtime.engine.engine import Engine
from moe_runtime.engine.llm import LLM, RequestOutput
from moe_runtime.engine.request import SamplingParams
from tests.checkpoints import tiny_config, write_checkpoint
from tests.gpu_engine import gpu_llm, write_gpu_checkpoint
from tests.mixed_requests import random_prompts
from tests.ranks import RankContext

SLOTS = 4
PLAIN = SamplingParams(
    temperature=1.0,
    max_tokens=10,
    ignore_eos=True,
    logprobs=1,
    return_routed_experts=True,
    cache_prompt=False,
)
LENGTHS = (5, 70, 33, 1, 20, 9)
PROMPTS = random_prompts(8, LENGTHS)
STEPS = {"load_window_steps": 16}  # each step's counts apart


def params_of(whole: list[RequestOutput]) -> tuple[list[SamplingParams], int]:
    """Sequences that end by an EOS id, by stop ids and by length, early and late, from what they are without ends; and
    the EOS id."""
    params = [replace(PLAIN, seed=i) for i in range(len(whole))]
    ids = [result.outputs[0].token_ids for result in whole]
    eos_id = ids[0][6]
    params[0] = replace(params[0], ignore_eos=False)
    params[1] = replace(params[1], stop_token_ids=(ids[1][3],))
    if len(whole) > 3:
        params[3] = replace(params[3], stop_token_ids=(ids[3][0],))
        params[4] = replace(params[4], stop_token_ids=(ids[4][8],))
        params[5] = replace(params[5], max_tokens=4, forced_token_ids=(3, 1, 4, 1))
    return params, eos_id


def counted(
    llm: LLM,
    prompts: list[list[int]],
    params: list[SamplingParams],
    eos_id: int,
    overlap: str,
    **options: object,
) -> tuple[list[RequestOutput], torch.Tensor, torch.Tensor, int]:
    """Results; pairs ``[layers, experts]``; the same ``[steps, layers, experts]`` of each step; rows."""
    llm.reconfigure(overlap=overlap)  # type: ignore[arg-type]
    engine = llm.engine
    assert isinstance(engine, Engine)
    assert engine.runner.overlaps is (overlap == "on")
    engine.eos_token_ids = frozenset((eos_id,))
    results = llm.generate(prompts, params, **options)  # type: ignore[arg-type]
    window = engine.runner.expert_load.mark().window()
    steps = torch.from_numpy(window.buckets().copy())
    return results, torch.from_numpy(window.totals().copy()), steps, engine.num_computed_tokens


def pairs_of(results: list[RequestOutput], like: torch.Tensor) -> torch.Tensor:
    """``[layers, experts]`` by what the requests were given."""
    found = torch.zeros_like(like)
    for result in results:
        for output in result.outputs:
            for layer in range(like.shape[0]):
                ids = torch.from_numpy(output.routed_experts[:, layer].astype("int64")).reshape(-1)
                found[layer] += torch.bincount(ids, minlength=like.shape[1])
    return found


def num_rows(pairs: torch.Tensor) -> int:
    """Tokens with ``SLOTS`` experts in each layer."""
    (num_pairs,) = {int(layer) for layer in pairs.sum(1)}
    return num_pairs // SLOTS


def assert_same_steps(on: torch.Tensor, off: torch.Tensor) -> None:
    """Each step's counts; at the end overlap may run steps of nothing but sequences that have ended."""
    assert torch.equal(on[: len(off)], off)
    assert not on[len(off) :].any()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), tiny_config("qwen3_moe"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    llm = LLM(str(folder), max_num_seqs=8, max_num_batched_tokens=256, kv_cache_blocks=30, **STEPS)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def requests(llm: LLM) -> tuple[list[SamplingParams], int]:
    llm.reconfigure(overlap="off")
    return params_of(llm.generate(PROMPTS, [replace(PLAIN, seed=i) for i in range(len(PROMPTS))]))


def test_each_step_counts_what_it_counts_without_overlap(
    llm: LLM, requests: tuple[list[SamplingParams], int]
) -> None:
    off, on = (counted(llm, PROMPTS, *requests, way) for way in ("off", "on"))
    assert on[0] == off[0]
    assert {r.outputs[0].finish_reason for r in on[0]} == {"stop", "length"}
    assert {r.outputs[0].stop_reason is None for r in on[0]} == {True, False}
    assert torch.equal(on[1], off[1])
    assert_same_steps(on[2], off[2])
    assert torch.equal(on[1], pairs_of(on[0], on[1]))
    assert on[3] == off[3] == num_rows(on[1])


def test_control_rows_of_sequences_that_ended_are_seen(
    llm: LLM, requests: tuple[list[SamplingParams], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    off = counted(llm, PROMPTS, *requests, "off")
    monkeypatch.setattr(Engine, "_forget_ended", lambda engine: None)
    on = counted(llm, PROMPTS, *requests, "on")
    num_stopped = sum(r.outputs[0].finish_reason == "stop" for r in on[0])
    assert num_stopped >= 4
    assert not torch.equal(on[1], off[1])
    assert on[3] - off[3] == num_rows(on[1] - off[1]) == num_stopped


def test_preemptions_and_late_arrivals_change_no_count(
    llm: LLM, requests: tuple[list[SamplingParams], int]
) -> None:
    """Recomputed tokens count again, as without overlap; nobody's rows count after its end."""
    planned = PlannedDisturbances(preempt_at={1: (70, 72), 2: (33, 40), 4: (20,)})
    off, on = (
        counted(llm, PROMPTS, *requests, way, disturbances=planned, arrival_steps=[0, 1, 1, 3, 4, 6])
        for way in ("off", "on")
    )
    assert on[0] == off[0]
    assert llm.engine.stats().num_preemptions == 5
    assert torch.equal(on[1], off[1])
    assert on[3] == off[3]
    assert not torch.equal(on[1], pairs_of(on[0], on[1])), "control: tokens were recomputed"


def on_ranks(
    context: RankContext, folder: str, drafts: str
) -> list[tuple[list[RequestOutput], torch.Tensor, int]]:
    """Off, on, and on with the old behaviour, on this rank."""
    group = RankGroup(rank=context.rank, size=context.world_size, process_group=context.process_group)
    llm = LLM(folder, group=group, max_num_seqs=8, max_num_batched_tokens=256, speculative=drafts, **STEPS)  # type: ignore[arg-type]
    whole = llm.generate(PROMPTS, [replace(PLAIN, seed=i) for i in range(len(PROMPTS))])
    params, eos_id = params_of(whole)
    found = [counted(llm, PROMPTS, params, eos_id, way) for way in ("off", "on")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "_forget_ended", lambda engine: None)
        found.append(counted(llm, PROMPTS, params, eos_id, "on"))
    llm.close()
    return [(results, pairs, rows) for results, pairs, _, rows in found]


@pytest.mark.parametrize("drafts", ["off", "ngram"])
def test_every_rank_counts_what_it_counts_without_overlap(ranks, folder: Path, drafts: str) -> None:
    found = ranks(2, on_ranks, str(folder), drafts)
    for off, on, _ in found:
        assert on[0] == off[0]
        assert torch.equal(on[1], off[1])
    total, too_many = (sum(one[i][1] - one[0][1] * (i == 2) for one in found) for i in (1, 2))
    assert num_rows(too_many) >= (4 if drafts == "off" else 1), "control"
    assert torch.equal(total, pairs_of(found[0][1][0], total))


def test_a_stop_string_s_sequence_counts_no_row_after_it() -> None:
    """It is seen in the text: the engine is told by ``abort``, when the next step is under way."""
    llm = LLM(kv_cache_blocks=20)
    params = SamplingParams(temperature=0, seed=0, max_tokens=24, ignore_eos=True, return_routed_experts=True)
    [whole] = llm.generate(["To be"], params)
    text = whole.outputs[0].text
    params = replace(params, stop=(text[len(text) // 2 :][:3],), cache_prompt=False)
    off, on = (counted(llm, ["To be"], [params], -1, way) for way in ("off", "on"))  # type: ignore[list-item]
    assert on[0] == off[0]
    assert on[0][0].outputs[0].finish_reason == "stop"
    assert torch.equal(on[1], off[1])
    assert on[3] == off[3]
    llm.close()


def test_the_gpu_s_counts_are_those_without_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence ends before a step with a prompt, one before a step of decodes."""
    folder = write_gpu_checkpoint(tmp_path, num_hidden_layers=1)
    llm = gpu_llm(folder, max_num_seqs=4, max_num_batched_tokens=64, kv_cache_blocks=8, **STEPS)
    prompts, arrivals = [[5, 6], [61], [9, 8]], [0, 0, 1]
    params = [replace(PLAIN, max_tokens=2, seed=i) for i in range(3)]
    ids = [result.outputs[0].token_ids for result in llm.generate(prompts, params)]
    assert ids[0][0] != ids[0][1], "its EOS id is its second token"
    params[0] = replace(params[0], ignore_eos=False, max_tokens=5)
    params[1] = replace(params[1], stop_token_ids=(ids[1][0],))
    requests = params, ids[0][1]
    off, on = (counted(llm, prompts, *requests, way, arrival_steps=arrivals) for way in ("off", "on"))
    assert on[0] == off[0]
    assert [len(r.outputs[0].token_ids) for r in on[0]] == [2, 1, 2]
    assert torch.equal(on[1], off[1])
    assert_same_steps(on[2], off[2])
    assert torch.equal(on[1], pairs_of(on[0], on[1]))
    monkeypatch.setattr(Engine, "_forget_ended", lambda engine: None)
    old = counted(llm, prompts, *requests, "on", arrival_steps=arrivals)
    assert int((old[1] - off[1])[0].sum()) == 2 * 2, "control: two rows of two slots"
