"""Counts of routed pairs: exact, of real tokens only, each on one rank, and taken without waiting."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_runtime.comm.groups import RankGroup
from moe_runtime.engine import expert_load
from moe_runtime.engine.expert_load import DeviceExpertLoad, HostExpertLoad
from moe_runtime.engine.llm import LLM
from moe_runtime.engine.request import SamplingParams
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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds, in an item of a list."""
    now = [100.0]
    monkeypatch.setattr(expert_load.time, "monotonic", lambda: now[0])
    return now


def test_the_host_s_counts_are_taken_when_new_and_once_in_a_while(clock):
    load = HostExpertLoad(2, 3)
    assert load.take() is None
    load.add(torch.tensor([[[0, 2]], [[1, 2]]], dtype=torch.int16))
    load.add(torch.empty(2, 0, 2, dtype=torch.int16))
    assert np.frombuffer(load.take(), "<i8").tolist() == [1, 0, 1, 0, 1, 1]
    load.add(torch.tensor([[[0, 1]], [[0, 1]]], dtype=torch.int16))
    assert load.take() is None
    clock[0] += expert_load.TAKE_INTERVAL_S
    assert np.frombuffer(load.take(), "<i8").tolist() == [2, 1, 1, 1, 2, 1]
    clock[0] += expert_load.TAKE_INTERVAL_S
    assert load.take() is None


class PlayedEvent:
    """A point in a device's work that is reached when told."""

    is_reached = False

    def query(self) -> bool:
        return self.is_reached


def test_a_device_s_counts_come_once_their_copy_has_ended(clock):
    counts = torch.zeros(1, 2, dtype=torch.int64)
    load = DeviceExpertLoad(counts)
    assert load.take() is None
    counts += 3
    load.step_launched()
    assert load.take() is None, "the copy is under way"
    load._copied = event = PlayedEvent()
    clock[0] += 5
    load.step_launched()
    assert load.take() is None
    event.is_reached = True
    assert np.frombuffer(load.take(), "<i8").tolist() == [3, 3]
    counts += 1
    assert load.take() is None, "the next copy"
    load._copied = event
    assert np.frombuffer(load.take(), "<i8").tolist() == [4, 4]
    assert load.take() is None, "nothing has run since"
