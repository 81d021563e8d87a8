"""What a rank of a tensor-parallel group keeps of a layer's weights."""

from __future__ import annotations

import pytest
import torch

from tests.gpu_engine import gpu_llm, write_gpu_checkpoint
from tests.kernels.triton_interpreter import DEVICE

from moe_runtime.layers.cuda_layer import CudaLayer  # isort: skip
from moe_runtime.models.head_shard import head_shard  # isort: skip

LIMITS = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "kv_cache_blocks": 4}


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = write_gpu_checkpoint(tmp_path_factory.mktemp("layer"), num_hidden_layers=1, attention_bias=True)
    return gpu_llm(folder, **LIMITS).model.plan


def layer_of(plan, tp: int, rank: int, own_hidden: slice | None, local_experts=None) -> CudaLayer:
    config = plan.config
    dim, hidden = config.head_dim, config.hidden_size
    width = config.moe_intermediate_size
    shapes = {
        "q_proj": (config.num_attention_heads * dim, hidden), "k_proj": (config.num_kv_heads * dim, hidden),
        "v_proj": (config.num_kv_heads * dim, hidden), "o_proj": (hidden, config.num_attention_heads * dim),
        "q_bias": (config.num_attention_heads * dim,), "k_bias": (config.num_kv_heads * dim,),
        "v_bias": (config.num_kv_heads * dim,), "o_bias": (hidden,), "input_norm": (hidden,),
        "post_attention_norm": (hidden,), "q_norm": (dim,), "k_norm": (dim,),
        "router": (config.num_experts, hidden), "gate_proj": (width, hidden), "up_proj": (width, hidden),
        "down_proj": (hidden, width),
    }  # fmt: skip

    def load(role: str, layer_idx: int = -1) -> torch.Tensor:
        count = torch.Size(shapes[role]).numel()
        base = 10_000 * sorted(shapes).index(role)
        return (base + torch.arange(count, dtype=torch.float32)).view(shapes[role]).to(DEVICE)

    return CudaLayer(
        config, 0, load, lambda role, layer_idx, expert: load(role) + 0.5 * (expert or 0), local_experts,
        torch.device(DEVICE), head_shard(config, tp, rank), own_hidden,
    )  # fmt: skip


def test_shares_of_heads_put_together_are_the_whole(plan):
    whole = layer_of(plan, 1, 0, slice(0, plan.config.hidden_size))
    shares = [layer_of(plan, 2, rank, None) for rank in range(2)]
    config, dim = plan.config, plan.config.head_dim
    query, key = config.num_attention_heads * dim, config.num_kv_heads * dim
    bounds = {"q": (0, query), "k": (query, query + key), "v": (query + key, query + 2 * key)}
    local = {"q": query // 2, "k": shares[0].qkv.shape[0] - query // 2}
    assert local["k"] % 2 == 0
    for name, (low, high) in bounds.items():
        first = {"q": 0, "k": query // 2, "v": query // 2 + local["k"] // 2}[name]
        length = query // 2 if name == "q" else local["k"] // 2
        for weight in ("qkv", "qkv_bias"):
            parts = [getattr(share, weight)[first : first + length] for share in shares]
            if config.num_kv_heads == 1 and name != "q":
                assert torch.equal(parts[0], parts[1])  # the same head on both
                assert torch.equal(parts[0], getattr(whole, weight)[low:high])
            else:
                assert torch.equal(torch.cat(parts), getattr(whole, weight)[low:high])
    assert torch.equal(torch.cat([share.o_proj for share in shares], 1), whole.o_proj)


def test_ranks_that_gather_features_keep_rows_of_o_proj(plan):
    hidden = plan.config.hidden_size
    whole = layer_of(plan, 1, 0, slice(0, hidden))
    half = layer_of(plan, 2, 1, slice(hidden // 2, hidden))
    assert torch.equal(half.o_proj, whole.o_proj[hidden // 2 :])


def test_only_local_experts_are_kept(plan):
    layer = layer_of(plan, 1, 0, slice(0, plan.config.hidden_size), [2, 1])
    assert layer.experts.w2.shape[0] == 2
    assert torch.equal(layer.experts.w2[0] - layer.experts.w2[1], torch.full_like(layer.experts.w2[0], 0.5))
