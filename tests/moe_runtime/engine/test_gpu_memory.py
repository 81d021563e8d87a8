"""What buffers take and blocks are left; that engine and planner use it: test_backend.py, test_memory_plan.py."""

from __future__ import annotations

import pytest

from moe_runtime.comm.exchange_bytes import row_gather_bytes, shard_sum_bytes
from moe_runtime.engine.gpu_memory import (
    BLOCK_TOKENS,
    GPU_RESERVE_BYTES,
    NCCL_BYTES,
    BufferShape,
    GpuBuffers,
    gpu_buffers,
    kv_blocks_of,
)
from moe_runtime.kernels.attention import BLOCK_SIZE

SHAPE = BufferShape(
    hidden=64, vocab=100, num_topk=2, expert_width=32, num_heads=4, num_kv_heads=2, head_dim=16, num_layers=3,
    num_moe_layers=2, item_bytes=2,
)  # fmt: skip


def buffers(**change):
    return gpu_buffers(
        SHAPE, **({"max_rows": 100, "num_ranks": 1, "transport": "collective", "workspace_bytes": 7} | change)
    )


def test_one_gpu_exchanges_nothing():
    found = buffers()
    rows = 100 * (4 * 64 + 3 * 64 + 2 * 32) * 2
    assert found.activations == rows + (3 * 256 + 2 * 64) * 100 * 4 + 100 * 2 * 2 * 2 + 100 * 2 * 96 * 2
    assert (found.exchange, found.workspace) == (0, 7)
    assert found.total == found.activations + 7
    assert BLOCK_TOKENS == BLOCK_SIZE


@pytest.mark.parametrize("transport", ["symmetric", "collective", "deepep"])
def test_several_hold_what_their_transport_needs(transport):
    sizes = SHAPE.exchange(4, 100)
    expected = {
        "symmetric": sizes.symmetric_bytes + sizes.rehearsal_bytes,
        "collective": sizes.collective_bytes,
        "deepep": sizes.expanded_bytes,
    }[transport]
    found = buffers(num_ranks=4, transport=transport)
    assert found.exchange == expected + NCCL_BYTES
    assert found.activations > buffers().activations


@pytest.mark.parametrize("adds", [True, False])
def test_a_tensor_parallel_group_has_room_for_rows_and_for_parts_where_it_adds_some(adds):
    found = buffers(num_ranks=4, gathering_ranks=2, adding_ranks=2 if adds else 1)
    parts = shard_sum_bytes(2, 64, 3, 100, 2) if adds else 0
    rows = row_gather_bytes(2, 64, 100, 3, 100, 2)
    assert found.exchange == buffers(num_ranks=4).exchange + parts + rows


def test_virtual_ranks_have_regions_of_their_own_and_presumming_rows():
    region_bytes = SHAPE.exchange(4, 25).symmetric_bytes
    assert buffers(transport="loopback", loopback_ranks=4).exchange == 4 * region_bytes
    extra = buffers(num_ranks=4, presums=True).activations - buffers(num_ranks=4).activations
    assert extra == 400 * 2 * 64 * 2


def test_blocks_are_what_is_left_of_the_share_that_may_be_used():
    some = GpuBuffers(activations=10, exchange=20, workspace=30)
    free = 2 * (GPU_RESERVE_BYTES + 1000 + 60 + 5 * 64)
    assert kv_blocks_of(free, 0.5, 1000, some, 64) == 5
    assert kv_blocks_of(free - 2, 0.5, 1000, some, 64) == 4
    assert kv_blocks_of(1000, 0.5, 1000, some, 64) < 0
