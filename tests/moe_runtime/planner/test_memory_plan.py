"""The planner's verdict is the engine's own, at the edge; and the recorded one of a real GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from moe_runtime.comm.groups import RankGroup
from moe_runtime.engine.config import EngineConfig
from moe_runtime.engine.kv_cache import gpu_num_blocks, kv_block_bytes
from moe_runtime.engine.model_loader import plan_model
from moe_runtime.errors import CapacityError
from moe_runtime.planner.cost_model import Topology
from moe_runtime.planner.hardware import load_hardware
from moe_runtime.planner.memory import check_fit, rank_memory
from moe_runtime.planner.memory_plan import CHUNK_KEYS, plan_memory
from moe_runtime.planner.shape_configs import load_shape, read_shape, shape_of
from tests.model_shapes import DEEPSEEK_V3, QWEN3_30B_A3B

H200 = load_hardware("h200")
RECORDED_BLOCKS = 10883
"""benchmarks/results/prefill_h200.txt: what the engine gave itself on an H200 for Qwen3-30B-A3B."""


def test_the_recorded_kv_blocks_of_a_real_gpu():
    """Weights, buffers and KV bytes of a real load, within 1 %."""
    found = plan_memory(
        read_shape(QWEN3_30B_A3B), H200, Topology(ep_size=1), max_num_batched_tokens=16384, max_model_len=4096
    )
    assert found.num_kv_blocks == pytest.approx(RECORDED_BLOCKS, rel=0.01)


@pytest.mark.parametrize(
    ("ep_size", "tp", "redundant"), [(1, 1, 0), (4, 1, 0), (4, 1, 8), (4, 2, 0), (8, 4, 4)]
)
@pytest.mark.parametrize("level", ["topology", "batch"])
def test_blocks_are_the_engines_to_the_last_one_wherever_the_edge_is(
    ep_size, tp, redundant, level, tmp_path, monkeypatch
):
    pytest.importorskip("triton")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(QWEN3_30B_A3B | {"rms_norm_eps": 1e-6, "num_hidden_layers": 4})
    )
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: ep_size)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    config = EngineConfig(
        model=str(folder), load_format="dummy", max_model_len=2048, max_num_seqs=4096, max_num_batched_tokens=4096,
        tp=tp, num_redundant_experts=redundant, invariance=level,
    )  # fmt: skip
    plan = plan_model(config, RankGroup(size=ep_size))
    topology = Topology(ep_size=ep_size, tp=tp, num_redundant_experts=redundant, level=level)
    fits = set()
    for free_bytes in range(3 * 2**30, 16 * 2**30, 2**29 + 12345):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None, free=free_bytes: (free, free))
        found = plan_memory(
            shape_of(plan.config), H200, topology, max_num_batched_tokens=4096, max_model_len=2048,
            free_bytes=free_bytes,
        )  # fmt: skip
        try:
            engine = gpu_num_blocks(plan, config, ep_size, "symmetric" if ep_size > 1 else "collective")
        except CapacityError:
            assert found.max_sequences(2048) == 0
            fits.add(False)
        else:
            assert min(found.num_kv_blocks, 4096 * 32) == engine
            fits.add(True)
    assert fits == {False, True}


def test_cpu_ranks_hold_what_the_engine_counts(monkeypatch):
    plan = plan_model(EngineConfig(device="cpu"))
    block_bytes = kv_block_bytes(plan.config, plan.torch_dtype)
    engine = rank_memory(plan.config, plan.placement, 0, 100, block_bytes)
    found = plan_memory(
        load_shape("builtin"),
        load_hardware("cpu"),
        Topology(ep_size=1),
        max_num_batched_tokens=512,
        max_model_len=1024,
    )
    assert (found.weight_bytes, found.block_bytes) == (engine.weight_bytes, block_bytes)
    assert check_fit([engine], engine.total_bytes) == found.weight_bytes + 100 * found.block_bytes


def test_more_ranks_leave_more_room_and_copies_less():
    shape = read_shape(DEEPSEEK_V3)
    common = {"max_num_batched_tokens": 1024, "max_model_len": 4096}
    one, eight = (plan_memory(shape, H200, Topology(ep_size=n), **common) for n in (1, 8))
    assert one.max_sequences(4096) == 0 < eight.max_sequences(4096)
    copies = plan_memory(shape, H200, Topology(ep_size=8, num_redundant_experts=8), **common)
    assert copies.weight_bytes - eight.weight_bytes == pytest.approx(58 * 3 * 7168 * 2048, rel=0.001)
    assert copies.num_kv_blocks < eight.num_kv_blocks
    assert replace(eight, num_kv_blocks=-5).max_sequences(64) == 0


def test_the_chunk_is_the_attentions():
    tree = pytest.importorskip("moe_runtime.kernels.attention_tree_triton", exc_type=ImportError)
    assert tree.TREE.chunk_keys == CHUNK_KEYS
