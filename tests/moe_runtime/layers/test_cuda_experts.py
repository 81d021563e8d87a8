"""All experts on one device: few rows through the slot table and many in expert order have the same bits."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.comm.groups import RankGroup  # noqa: F401  # comm before kernels, as the package imports
from tests.bits import assert_bits_equal, hostile
from tests.gpu_engine import gpu_llm, write_gpu_checkpoint
from tests.kernels.triton_interpreter import DEVICE

from moe_runtime.comm.gpu_exchange import StepShape  # isort: skip
from moe_runtime.layers import cuda_experts  # isort: skip
from moe_runtime.layers.cuda_experts import ExpertScratch, LayerExperts, LocalExperts  # isort: skip

LIMITS = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "kv_cache_blocks": 4}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    folder = write_gpu_checkpoint(tmp_path_factory.mktemp("local"), kind="cancelling", num_hidden_layers=1)
    return gpu_llm(folder, **LIMITS).model.decoder


def run(decoder, num_rows: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    config = decoder.config
    experts = LocalExperts(config, decoder.schedules, 16, decoder.dtype, decoder.device)
    shape = StepShape.of_tokens([num_rows])
    routed = experts.routed_rows(shape)
    rows = slice(first, first + num_rows)
    routed.x.copy_(
        hostile("cancelling", (16, config.hidden_size), seed=1).to(DEVICE, decoder.dtype)[rows] * 2.0**-12
    )
    generator = torch.Generator().manual_seed(3)
    ids = torch.rand(16, config.num_experts, generator=generator).argsort(1)[:, : config.num_experts_per_tok]
    routed.ids.copy_(ids[rows])
    routed.weights.copy_(torch.rand(16, config.num_experts_per_tok, generator=generator)[rows])
    if routed.slot_table is not None:
        routed.slot_table.fill_(-1)
        for token, row in enumerate(ids[rows].tolist()):
            for slot, expert in enumerate(row):
                routed.slot_table[expert, token] = slot
    residual = (
        torch.randn(16, config.hidden_size, generator=generator).to(DEVICE, decoder.dtype)[rows].clone()
    )
    normed = torch.full_like(residual, float("nan"))
    count = torch.tensor([num_rows], dtype=torch.int32, device=DEVICE)
    norm = torch.ones(config.hidden_size, device=DEVICE)
    experts.run(0, decoder.layers[0].experts, shape, count, residual, norm, normed, pdl=False)
    return residual, normed


def test_few_and_sorted_rows_and_a_row_alone_have_the_same_bits(decoder, monkeypatch):
    few = run(decoder, 16)
    alone = [run(decoder, 1, i) for i in range(16)]
    monkeypatch.setattr(cuda_experts, "MAX_CAPACITY", 0)
    for by_slot, by_expert, part in zip(few, run(decoder, 16), zip(*alone, strict=True), strict=True):
        assert_bits_equal(by_slot, by_expert)
        assert_bits_equal(by_slot, torch.cat(part))


def test_control_weights_of_another_expert_differ(decoder):
    weights = decoder.layers[0].experts
    before = run(decoder, 4)[0]
    kept = weights.w2.clone()
    weights.w2.copy_(weights.w2.flip(0))
    assert not torch.equal(run(decoder, 4)[0], before)
    weights.w2.copy_(kept)


def test_a_part_of_the_experts_is_a_view(decoder):
    weights = decoder.layers[0].experts
    part = weights.part(1, 3)
    assert isinstance(part, LayerExperts)
    assert part.w13.data_ptr() == weights.w13[1].data_ptr()
    assert part.w2.shape[0] == 2


def test_a_process_without_experts_of_a_layer_does_nothing(decoder):
    scratch = ExpertScratch(decoder.config, decoder.schedules, 16, decoder.dtype, decoder.device)
    none = decoder.layers[0].experts.part(0, 0)
    ids = torch.zeros(4, 2, dtype=torch.int32, device=DEVICE)
    x = torch.zeros(4, decoder.config.hidden_size, dtype=decoder.dtype, device=DEVICE)
    rows = torch.full((4, 2, decoder.config.hidden_size), 7.0, dtype=decoder.dtype, device=DEVICE)
    scratch.grouped(none, x, ids, ids.float(), rows, None, scratch.gathered(8), 0, False)
    assert bool((rows == 7).all())
