"""Counts of routed pairs: exact, of real tokens only, each on one rank, at steps that all ranks agree on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_runtime.comm.groups import RankGroup
from moe_runtime.engine.expert_load import DeviceExpertLoad, ExpertLoad, HostExpertLoad
from moe_runtime.engine.llm import LLM
from moe_runtime.engine.request import SamplingParams
from moe_runtime.engine.step import StepVector, StepView
from tests.checkpoints import tiny_config, write_checkpoint
from tests.gpu_engine import gpu_llm, write_gpu_checkpoint
from tests.ranks import RankContext

PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=3, ignore_eos=True, return_routed_experts=True)
PROMPTS = [[(7 * i + length) % 96 for i in range(length)] for length in (12, 1, 20)]


def counts_of(llm: LLM) -> np.ndarray:
    """``[layers, experts]`` of this rank, now."""
    load, config = llm.engine.runner.expert_load, llm.model.plan.config
    counts = load.counts if isinstance(load, HostExpertLoad) else load.counts.cpu().numpy()
    return counts.reshape(len(config.moe_layer_ids), config.num_experts).copy()


def counts_of_results(llm: LLM, results: list) -> np.ndarray:
    """The same from what the requests were given."""
    config = llm.model.plan.config
    counts = np.zeros((len(config.moe_layer_ids), config.num_experts), dtype=np.int64)
    for result in results:
        for output in result.outputs:
            for layer in range(counts.shape[0]):
                counts[layer] += np.bincount(
                    output.routed_experts[:, layer].reshape(-1), minlength=counts.shape[1]
                )
    return counts


def served(
    context: RankContext, folder: str, tp: int, on_gpu: bool
) -> tuple[np.ndarray, np.ndarray, list[bytes]]:
    """This rank's counts, those that all results come to, and the results."""
    group = RankGroup(rank=context.rank, size=context.world_size, process_group=context.process_group)
    options = {"group": group, "tp": tp, "dispatcher": "collective", "max_num_seqs": 4, "kv_cache_blocks": 8}
    llm = gpu_llm(folder, **options) if on_gpu else LLM(folder, **options)
    before = counts_of(llm)
    results = llm.generate(PROMPTS, PARAMS)
    assert (llm.engine.runner.expert_load.mark().window().totals() == counts_of(llm)).all()
    return (
        counts_of(llm) - before,
        counts_of_results(llm, results),
        [r.outputs[0].routing.data for r in results],
    )


@pytest.mark.parametrize(("world_size", "tp"), [(1, 1), (2, 1), (2, 2), (8, 2), (8, 1)])
def test_counts_add_up_to_what_the_requests_were_given(ranks, tmp_path, world_size, tp):
    folder = write_checkpoint(tmp_path, tiny_config("mixtral"))
    expected = ranks(1, served, str(folder), 1, False)[0]
    found = ranks(world_size, served, str(folder), tp, False)
    assert [f[1].tolist() for f in found] == [expected[1].tolist()] * world_size
    assert sum(f[0] for f in found).tolist() == expected[0].tolist() == expected[1].tolist()
    assert [f[2] for f in found] == [expected[2]] * world_size
    if world_size > 1:
        assert found[0][0].tolist() != expected[1].tolist(), "control: one rank has not all tokens"


@pytest.mark.parametrize("tp", [1, 2])
def test_gpu_counts_leave_inert_rows_out(ranks, tmp_path, tp):
    folder = write_gpu_checkpoint(tmp_path)
    found = ranks(2, served, str(folder), tp, True)
    assert sum(f[0] for f in found).tolist() == found[0][1].tolist()
    num_tokens = sum(len(prompt) + PARAMS.max_tokens - 1 for prompt in PROMPTS)
    assert sum(f[0] for f in found).sum(1).tolist() == [2 * num_tokens] * found[0][1].shape[0]


def test_graphs_rehearsals_and_idle_steps_count_nothing(tmp_path):
    llm = gpu_llm(
        write_gpu_checkpoint(tmp_path), max_num_seqs=4, max_num_batched_tokens=32, kv_cache_blocks=8
    )
    runner = llm.engine.runner
    runner._decode_inputs.fill_(-1)
    runner._decode_inputs[0] = 0
    for rehearse in (True, False):
        runner._launch_decode(4, "serial", rehearse)
    llm.engine.step()
    assert not counts_of(llm).any()
    llm.generate(PROMPTS[:1], replace(PARAMS, max_tokens=1))
    assert counts_of(llm).sum(1).tolist() == [2 * len(PROMPTS[0])] * 2


def view(*num_tokens: int) -> StepView:
    return StepView(tuple(StepVector(num_tokens=count) for count in num_tokens))


def told(load: ExpertLoad) -> list[tuple[int, list[int]]]:
    return [(report.num_steps, np.frombuffer(report.counts, "<i8").tolist()) for report in load.take()]


def test_ranks_copy_at_the_same_steps_whoever_has_tokens():
    """A bucket of 4 steps; a rank without tokens copies too, and idle steps copy what is new once."""
    first, second = (HostExpertLoad(1, 2, window_steps=64) for _ in range(2))
    for step in range(9):
        for load in (first, second):
            load.before_step(view(1, 0))
        first.add(torch.tensor([[[step % 2]]], dtype=torch.int16))
    for _ in range(2):
        first.before_step(view(0, 0))
        second.before_step(view(0, 0))
    assert told(first) == [(4, [2, 2]), (8, [4, 4]), (9, [5, 4])]
    assert told(second) == [(4, [0, 0]), (8, [0, 0]), (9, [0, 0])]
    assert told(first) == []


def test_a_mark_is_of_the_steps_before_it():
    load = HostExpertLoad(1, 2, window_steps=4)
    for step in range(7):
        load.before_step(view(1))
        if step == 6:
            mark = load.mark()
        load.add(torch.tensor([[[step % 2, 1]]], dtype=torch.int16))
    load.before_step(view(0))
    window = mark.window()
    assert (window.num_seen_steps, window.bucket_steps().tolist()) == (6, [1, 1, 1, 1])
    assert window.buckets().tolist() == [[[1, 1]], [[0, 2]], [[1, 1]], [[0, 2]]]
    assert load.mark().window().buckets()[-1].tolist() == [[1, 1]]


def test_a_model_without_experts_has_no_load():
    load = HostExpertLoad(0, 0)
    load.before_step(view(1))
    load.before_step(view(0))
    assert load.take() == ()


class PlayedEvent:
    """A point in a device's work that is reached when told, or waited for."""

    is_reached = False

    def query(self) -> bool:
        return self.is_reached

    def synchronize(self) -> None:
        self.is_reached = True


def test_a_device_s_counts_of_an_engine_before_are_not_in_the_window():
    counts = torch.full((1, 2), 5, dtype=torch.int64)
    load = DeviceExpertLoad(counts, window_steps=2)
    load.before_step(view(1))
    counts += 3
    load.before_step(view(0))
    assert load.mark().window().totals().tolist() == [[3, 3]]


def test_a_device_s_counts_come_in_order_once_their_copies_have_ended(monkeypatch):
    counts = torch.zeros(1, 2, dtype=torch.int64)
    load = DeviceExpertLoad(counts, window_steps=2)
    events = [PlayedEvent() for _ in range(4)]
    left = iter(events)
    monkeypatch.setattr(load, "_copy", lambda: (counts.clone(), next(left)))
    for _ in range(4):
        load.before_step(view(1))
        counts += 3
    assert told(load) == [], "the copies are under way"
    events[1].is_reached = True
    assert told(load) == [], "the first one is not there"
    events[0].is_reached = True
    assert told(load) == [(1, [3, 3]), (2, [6, 6])]
    mark = load.mark()
    counts += 100
    assert mark.window().totals().tolist() == [[6, 6]], "waits for the third, and holds two steps"
    assert events[2].is_reached
    assert told(load) == [(3, [9, 9])], "what the mark waited for is told as well"
