"""Embedding and head: exact copies in, fp32 logits out, the same bits tied or not."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.kernels.gemm import linear_reference
from moe_runtime.layers.embedding import Embedding, LMHead
from tests.bits import assert_bits_equal, hostile

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
