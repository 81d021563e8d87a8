"""Embedding and head: exact copies in, fp32 logits out, the same bits tied or not."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.tensor_parallel import TensorParallel, open_tensor_parallel
from moe_runtime.kernels.gemm import linear_reference
from moe_runtime.layers.embedding import Embedding, LMHead
from tests.bits import assert_bits_equal, hostile
from tests.ranks import RankContext

TOLERANCE = 2e-6  # fp32 logits, relative to sum |x| |w|


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 130])
def test_a_tied_embedding_reads_the_same_bits_out_of_the_head(vocab, dtype):
    weight = hostile("heavy_tailed", (vocab, 40), seed=1).to(dtype)
    head = LMHead(weight)
    ids = torch.tensor([0, vocab - 1, vocab // 2, 0])
    own = Embedding(weight, head, dtype)(ids)
    assert_bits_equal(own, weight[ids])
    assert_bits_equal(Embedding(None, head, dtype)(ids), own)
    assert Embedding(None, head, dtype)(ids[:0]).shape == (0, 40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_fp32_and_the_same_in_every_batch(dtype):
    weight, x = (hostile(k, (n, 40), seed=2).to(dtype) for k, n in (("normal", 130), ("cancelling", 65)))
    head = LMHead(weight)
    logits = head(x)
    assert logits.dtype == torch.float32
    error = (logits.double() - linear_reference(x, weight)).abs()
    assert (error <= TOLERANCE * (x.double().abs() @ weight.double().abs().T)).all()
    for num_rows in (1, 15, 17, 33, 64):
        assert_bits_equal(head(x[-num_rows:]), logits[-num_rows:])


def vocabulary(vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """With values that a sum over ranks would not keep."""
    weight = hostile("heavy_tailed", (vocab, 40), seed=3)
    weight[:, ::3] = -0.0
    return weight.to(dtype)


IDS = (0, 64, 7, 64, 1, 63, 12, 30, 31, 32, 33, 2)


def share(context: RankContext, dtype: torch.dtype) -> list[tuple[torch.Tensor, ...]]:
    tp = open_tensor_parallel(context.group, context.world_size, "collective")
    results = []
    for vocab in (65, 130):
        weight = vocabulary(vocab, dtype)
        head = LMHead(weight, tp)
        ids = torch.tensor(IDS)
        untied, tied = Embedding(weight, head, dtype), Embedding(None, head, dtype)
        rows = hostile("cancelling", (17, 40), seed=4).to(dtype)
        results.append((untied(ids), tied(ids), tied(ids[:0]), untied(ids[:1]), head(rows), head(rows[:0])))
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tp", [2, 3, 8])
def test_a_vocabulary_over_several_ranks_gives_the_bits_of_one(ranks, tp, dtype):
    for rank, results in enumerate(ranks(tp, share, dtype)):
        for vocab, (untied, tied, none, one, logits, no_logits) in zip((65, 130), results, strict=True):
            weight = vocabulary(vocab, dtype)
            assert_bits_equal(untied, weight[torch.tensor(IDS)])
            assert_bits_equal(tied, untied)
            assert_bits_equal(one, untied[:1])
            assert none.shape == (0, 40)
            whole = LMHead(weight)(hostile("cancelling", (17, 40), seed=4).to(dtype))
            assert_bits_equal(logits, whole if rank == 0 else whole[:0])
            assert no_logits.shape == (0, vocab)


def test_control_a_sum_of_shares_would_not_be_the_stored_values():
    rows = vocabulary(65, torch.float32)[torch.tensor(IDS)]
    summed = rows + torch.zeros_like(rows)
    assert torch.equal(summed, rows), "equal in value"
    assert not torch.equal(summed.view(torch.int32), rows.view(torch.int32)), "not in bits"


def test_a_rank_keeps_the_rows_of_its_share_alone():
    tp = TensorParallel(group=RankGroup(rank=1, size=2))
    weight = vocabulary(130, torch.float32)
    embedding = Embedding(weight, LMHead(weight, tp), torch.float32)
    assert embedding.weight is not None
    assert_bits_equal(embedding.weight, weight[65:])
    assert embedding.weight.untyped_storage().nbytes() == 65 * 40 * 4


def test_a_vocabulary_with_fewer_ids_than_ranks_is_refused():
    with pytest.raises(ValueError, match=r"vocab_size \(1\) must be at least tp \(2\)"):
        LMHead(torch.ones(1, 4), TensorParallel(group=RankGroup(rank=0, size=2)))
