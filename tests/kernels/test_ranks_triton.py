"""Keys and chunk keys, on a GPU or in the interpreter: exact, one order with the CPU's ranks."""

from __future__ import annotations

import pytest
import torch

from tests.bits import HOSTILE_KINDS, hostile
from tests.kernels.triton_interpreter import DEVICE

from moe_runtime.kernels.ranks_triton import (  # isort: skip
    ID_BITS,
    KEY_SCHEDULES,
    KeySchedule,
    chunk_columns,
    chunk_keys,
    chunk_keys_reference,
    logits_shape,
)

EDGE_VALUES = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    1e-45,
    -1e-45,
    3.4e38,
    -3.4e38,
    float("inf"),
    -float("inf"),
    float("nan"),
]


def keys_of(logits, **schedule):
    return chunk_keys(logits.to(DEVICE), schedule=KeySchedule(**schedule), pdl=False).cpu()


@pytest.mark.parametrize("vocab", [1, 3, 127, 128, 129, 1000, 4097])
@pytest.mark.parametrize("kind", HOSTILE_KINDS)
def test_chunk_keys_are_the_reference_s(vocab, kind):
    logits = hostile(kind, (2, vocab), seed=1).round()
    assert torch.equal(keys_of(logits), chunk_keys_reference(logits))


def test_edge_values_rank_as_on_the_cpu():
    logits = torch.tensor(EDGE_VALUES).repeat_interleave(128)[None]  # a chunk for each value
    keys = keys_of(logits)
    assert torch.equal(keys, chunk_keys_reference(logits))
    assert ((keys >= 0) & (keys < 1 << 54)).all()
    order = torch.sort(keys[0], descending=True).indices.tolist()
    assert order == [8, 6, 2, 4, 0, 1, 5, 3, 7, 9, 10]  # both zeros by id; NaN as -inf, after it by id


def test_the_lowest_id_of_equal_logits_has_the_largest_key():
    logits = torch.full((1, 300), 2.0)
    ids = (keys_of(logits) & ((1 << ID_BITS.value) - 1)) ^ ((1 << ID_BITS.value) - 1)
    assert ids.tolist() == [[0, 128, 256]]


def test_schedules_and_views_give_the_same_keys():
    wide = hostile("normal", (3, 2100), seed=2)
    expected = chunk_keys_reference(wide[:, 1:2050])
    for columns in (128, 512, 4096):
        assert torch.equal(keys_of(wide[:, 1:2050], block_columns=columns), expected)


def test_chunks_grow_with_the_vocabulary():
    assert [chunk_columns(vocab) for vocab in (1, 151_936, 2**18, 2**18 + 1, 2**22)] == [
        128,
        128,
        128,
        256,
        2048,
    ]


def test_a_wrong_shape_or_dtype_is_refused():
    with pytest.raises(ValueError, match="float32"):
        logits_shape(torch.zeros(2, 3, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="vocab"):
        logits_shape(torch.zeros(2, 0))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_all_schedules_agree_at_a_real_size():
    logits = hostile("heavy_tailed", (33, 151_936), seed=3).to(DEVICE)
    expected = chunk_keys_reference(logits)
    for schedule in KEY_SCHEDULES:
        for pdl in (False, True):
            assert torch.equal(chunk_keys(logits, schedule=schedule, pdl=pdl), expected)
