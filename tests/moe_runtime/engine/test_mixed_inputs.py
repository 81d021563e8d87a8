"""The mixed form's buffer: what a step writes into its own layout and into a larger one of a graph, and equal bits.

Without a GPU every kernel runs in Triton's interpreter, and a graph is its launches once more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_runtime.engine.cuda_runner import MIXED, CudaRunner
from moe_runtime.engine.mixed_inputs import MixedLayout, StepTiles
from moe_runtime.engine.request import SamplingParams
from moe_runtime.engine.step_plan import StepPlan
from moe_runtime.kernels.prefill_attention_triton import ROW_SCHEDULES
from tests.gpu_engine import gpu_llm, write_gpu_checkpoint

MAX_BLOCKS = 3
TILES = StepTiles(schedules=(ROW_SCHEDULES[3], ROW_SCHEDULES[1]), groups=4)
PLAN = StepPlan(
    token_ids=tuple(range(10, 22)),
    query_lens=(1, 9, 2),
    start_positions=(70, 60, 0),
    block_tables=((4, 5), (7, 2), (1,)),
    row_token_idx=(),
    wants_routing=False,
)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.sampled_from([1, 2, 4, 8]))
def test_there_is_room_for_the_tiles_of_any_step(lens, groups):
    tiles = replace(TILES, groups=groups)
    made = tiles.make(lens, [0] * len(lens))
    for part, most in zip(made, tiles.most(sum(lens), len(lens)), strict=True):
        assert len(part) <= most
    assert sum(int(part[:, 2].sum()) for part in made) == sum(lens)
    grown = tiles.most(sum(lens) + 5, len(lens) + 2)
    assert all(small <= large for small, large in zip(tiles.most(sum(lens), len(lens)), grown, strict=True))


def filled(layout: MixedLayout) -> Any:
    host = np.full(layout.size(3), 99, dtype=np.int32)
    layout.fill(host, PLAN, [6, -1, 8], TILES.make(PLAN.query_lens, PLAN.start_positions))
    device = torch.full((layout.size(layout.num_seqs),), 77, dtype=torch.int32)
    device[: len(host)] = torch.from_numpy(host)
    token_ids, slots = layout.unknown_tokens(device)
    return token_ids, slots, layout.inputs(device, token_ids, None, TILES)  # type: ignore[arg-type]


def test_a_step_in_a_larger_layout_is_the_step_and_nothing_else():
    own = MixedLayout(num_tokens=12, num_seqs=3, max_blocks=MAX_BLOCKS, num_tiles=(1, 2))
    large = MixedLayout(num_tokens=20, num_seqs=5, max_blocks=MAX_BLOCKS, num_tiles=TILES.most(20, 5))
    (ids, slots, step), (all_ids, all_slots, padded) = filled(own), filled(large)
    assert ids.tolist() == list(PLAN.token_ids)
    assert slots.tolist() == [6] + [-1] * 10 + [8]
    assert step.positions.tolist() == [70, *range(60, 69), 0, 1]
    assert step.slot_mapping.tolist() == [
        5 * 64 + 6, *(7 * 64 + i for i in range(60, 64)), *(2 * 64 + i for i in range(5)), 64, 65
    ]  # fmt: skip
    assert step.block_table.tolist() == [[4, 5, -1], [7, 2, -1], [1, -1, -1]]
    for part, whole in (
        (ids, all_ids),
        (slots, all_slots),
        (step.positions, padded.positions),
        (step.slot_mapping, padded.slot_mapping),
    ):
        assert torch.equal(whole[:12], part)
        assert whole[12:].tolist() == [-1] * 8
    assert torch.equal(padded.num_tokens, step.num_tokens)
    assert step.num_tokens.tolist() == [12]
    assert torch.equal(padded.block_table[:3], step.block_table)
    for part, whole in zip(step.tiles, padded.tiles, strict=True):
        assert torch.equal(whole.tiles[: len(part.tiles)], part.tiles)
        assert not whole.tiles[len(part.tiles) :].any()
        assert len(whole.tiles) > len(part.tiles)


def test_an_inert_layout_has_no_tokens_and_no_tiles():
    layout = MixedLayout(num_tokens=20, num_seqs=5, max_blocks=MAX_BLOCKS, num_tiles=TILES.most(20, 5))
    device = torch.full((layout.size(5) + 4,), 77, dtype=torch.int32)
    layout.make_inert(device)
    ids, slots = layout.unknown_tokens(device)
    step = layout.inputs(device, ids, None, TILES)  # type: ignore[arg-type]
    for part in (ids, slots, step.positions, step.slot_mapping):
        assert part.tolist() == [-1] * 20
    assert step.num_tokens.tolist() == [0]
    assert not any(part.tiles.any() for part in step.tiles)
    assert device[layout.size(5) :].tolist() == [77] * 4


# ---- bits

GREEDY = SamplingParams(
    temperature=0, max_tokens=3, seed=0, logprobs=3, ignore_eos=True, return_routed_experts=True
)
PARAMS = [
    GREEDY,
    replace(GREEDY, temperature=0.9, seed=11, top_k=20, frequency_penalty=0.5),
    replace(GREEDY, max_tokens=2, prompt_logprobs=2),
]
PROMPTS = [[i * 7 % 96 for i in range(length)] for length in (2, 9, 5)]
LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "kv_cache_blocks": 8}


class Launches:
    """As ``StepGraphs``, without a device: a replay launches everything."""

    def __init__(self, run: Callable[[int, str, bool], None]) -> None:
        self.run = run
        self.captured: list[tuple[int, str]] = []
        self.replayed: list[tuple[int, str]] = []

    def has(self, bucket: int, variant: str) -> bool:
        return (bucket, variant) in self.captured

    def capture(self, bucket: int, variant: str) -> None:
        for rehearse in (True, False):
            self.run(bucket, variant, rehearse)
        self.captured.append((bucket, variant))

    def replay(self, bucket: int, variant: str) -> None:
        self.replayed.append((bucket, variant))
        self.run(bucket, variant, False)


@pytest.mark.parametrize(
    "options", [{}, {"dispatcher": "loopback", "loopback_ranks": 3}], ids=["one", "three"]
)
def test_a_step_as_a_graph_with_inert_rows_has_its_bits_and_counts(options, tmp_path):
    llm = gpu_llm(write_gpu_checkpoint(tmp_path), **LIMITS, **options)
    runner = llm.engine.runner
    assert isinstance(runner, CudaRunner)
    reference = llm.generate(PROMPTS, PARAMS)
    counts = runner.decoder.expert_counts.clone()
    llm.reconfigure(**LIMITS | {"max_num_batched_tokens": 7})
    chunked = llm.generate(PROMPTS, PARAMS)
    assert chunked == reference
    counts_twice = runner.decoder.expert_counts.clone()

    for num_tokens in (32, 7):
        llm.reconfigure(**LIMITS | {"max_num_batched_tokens": num_tokens})
        runner = llm.engine.runner
        assert isinstance(runner, CudaRunner)
        runner.graphs = graphs = Launches(runner._launch_graph)  # type: ignore[assignment]
        runner.set_mixed_graphs(40)
        b = runner.decoder.buffers
        for buffer in (b.residual, b.normed, b.branch, b.qkv, b.q, b.attention, b.router_logits):
            buffer.fill_(float("nan"))  # what inert rows may hold
        before = runner.decoder.expert_counts.clone()
        assert llm.generate(PROMPTS, PARAMS) == reference
        mixed = [bucket for bucket, variant in graphs.replayed if variant == MIXED]
        assert set(mixed) == {40}
        assert len(mixed) == {32: 1, 7: 3}[num_tokens]
        assert (40, MIXED) in graphs.captured
        assert torch.equal(runner.decoder.expert_counts - before, counts)
    assert torch.equal(counts_twice, 2 * counts)


def test_control_inert_rows_that_count_are_seen(tmp_path, monkeypatch):
    llm = gpu_llm(write_gpu_checkpoint(tmp_path), **LIMITS)
    reference = llm.generate(PROMPTS, PARAMS)
    fill = MixedLayout.fill

    def fill_whole(layout, host, *args):
        fill(layout, host, *args)
        host[5 * layout.num_tokens] = layout.num_tokens

    monkeypatch.setattr(MixedLayout, "fill", fill_whole)
    runner = llm.engine.runner
    runner.graphs = Launches(runner._launch_graph)
    runner.set_mixed_graphs(40)
    counts = runner.decoder.expert_counts.clone()
    llm.flush_cache()
    found = llm.generate(PROMPTS, PARAMS)
    assert not torch.equal(runner.decoder.expert_counts - counts, counts)
    assert found == reference, "a row's bits are its own all the same"
