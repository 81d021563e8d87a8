"""The calls of a step over symmetric memory, by virtual ranks: sets, channels, forms."""

from __future__ import annotations

from tests.kernels.triton_interpreter import DEVICE  # isort: skip

import pytest
import torch

from moe_runtime.comm import symmetric_all_reduce
from moe_runtime.comm.symmetric_all_reduce import SymmetricAllReduce
from moe_runtime.comm.symmetric_memory import SymmetricSpace, carved_bytes
from moe_runtime.kernels.all_reduce_triton import all_reduce_reference
from moe_runtime.kernels.peer_flags_triton import PeerFlags
from tests.bits import assert_bits_equal, hostile

FIRST_CHANNEL, MAX_CALLS, MAX_ELEMENTS = 3, 4, 400
FP32, BF16 = torch.float32, torch.bfloat16


def reducers_of(size: int, part_dtype: torch.dtype = FP32) -> list[SymmetricAllReduce]:
    num_channels = FIRST_CHANNEL + SymmetricAllReduce.num_channels(MAX_CALLS)
    num_bytes = SymmetricAllReduce.num_bytes(MAX_ELEMENTS, part_dtype, BF16)
    num_bytes += carved_bytes((num_channels, size), torch.int32)
    spaces = SymmetricSpace.virtual(size, num_bytes, DEVICE)
    reducers = []
    for space in spaces:
        words = space.carve("words", (num_channels, size), torch.int32)
        step = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        flags = PeerFlags(words=words.local, offsets=words.offsets, step=step, rank=space.rank, size=size)
        reducers.append(
            SymmetricAllReduce(
                space, flags, FIRST_CHANNEL, max_calls=MAX_CALLS, max_elements=MAX_ELEMENTS,
                part_dtype=part_dtype, out_dtype=BF16,
            )
        )  # fmt: skip
        assert space.num_used_bytes == num_bytes
    return reducers


@pytest.mark.parametrize("one_shot", [True, False, None])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8])
def test_calls_of_several_steps_give_the_tree(size, one_shot):
    reducers = reducers_of(size)
    for step, shapes in enumerate(
        [[(3, 100), (7, 5), (400,)], [(1,)], [], [(11, 3), (400,), (5, 5), (2, 9)]]
    ):
        for call, shape in enumerate(shapes):
            parts = hostile("cancelling", (*shape, size), seed=10 * step + call).to(DEVICE).unbind(-1)
            residual = hostile("normal", shape, seed=step).bfloat16().to(DEVICE)
            for reducer, part in zip(reducers, parts, strict=True):
                reducer.part(*shape).copy_(part)
            sums = [reducer.reduce(*shape, residual=residual, one_shot=one_shot) for reducer in reducers]
            for actual in sums:
                expected = all_reduce_reference(parts, BF16, residual)
                assert_bits_equal(actual, expected, f"step {step}, call {call}")
        for reducer in reducers:
            reducer.end_step()


def test_sets_alternate_and_a_step_of_an_odd_number_ends_in_a_barrier(monkeypatch):
    (reducer,) = reducers_of(1)
    barriers = []
    monkeypatch.setattr(
        symmetric_all_reduce, "peer_barrier", lambda flags, channel, pdl: barriers.append(channel)
    )
    for num_calls, num_barriers in ((1, 1), (2, 0), (3, 1), (4, 0), (0, 0)):
        barriers.clear()
        parts, sums = [], []
        for _ in range(num_calls):
            parts.append(reducer.part(5).data_ptr())
            sums.append(reducer.reduce(5).data_ptr())
        reducer.end_step()
        assert barriers == [FIRST_CHANNEL + 2 * MAX_CALLS] * num_barriers
        assert len(set(parts)) == len(set(sums)) == min(2, num_calls)
        assert parts[2:] == parts[: max(0, num_calls - 2)], "every second call has the same set"


def test_calls_do_not_share_channels(monkeypatch):
    (reducer,) = reducers_of(1)
    used = []

    def exchange(part, offsets, flags, channel, *others, **options):
        used.extend([channel, channel + 1])

    monkeypatch.setattr(symmetric_all_reduce, "all_reduce_exchange", exchange)
    for _ in range(MAX_CALLS):
        reducer.reduce(5, one_shot=False)
    assert used == list(range(FIRST_CHANNEL, FIRST_CHANNEL + 2 * MAX_CALLS))
    with pytest.raises(AssertionError, match="more than 4 calls in a step"):
        reducer.reduce(5)


def test_the_form_follows_from_the_size(monkeypatch):
    forms = []
    monkeypatch.setattr(symmetric_all_reduce, "all_reduce_one_shot", lambda *a, **k: forms.append("one shot"))
    monkeypatch.setattr(symmetric_all_reduce, "all_reduce_exchange", lambda *a, **k: forms.append("exchange"))
    monkeypatch.setattr(symmetric_all_reduce, "prefers_one_shot", lambda num_bytes, size: num_bytes <= 40)
    (reducer,) = reducers_of(1)
    for num_elements in (10, 11):
        reducer.reduce(num_elements)
    assert forms == ["one shot", "exchange"]


def test_too_large_parts_are_refused():
    (reducer,) = reducers_of(1)
    with pytest.raises(ValueError, match=r"a part has 401 elements; it must have at most 400"):
        reducer.part(401)
