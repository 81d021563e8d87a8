"""Launch metadata: every kernel tells Triton's profiler its operations and bytes, as counted by hand."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.triton_interpreter import DEVICE

from triton.tools.tensor_descriptor import TensorDescriptor  # isort: skip

from moe_runtime.kernels import (  # isort: skip
    attention_triton,
    experts_triton,
    prefill_attention_triton,
    rope_write_triton,
    softmax_triton,
    tokens_triton,
    topk_triton,
    triton_launch,
)

MODULES = sorted(Path(experts_triton.__file__).parent.glob("*_triton.py"))


def bf16(*shape):
    return torch.empty(*shape, dtype=torch.bfloat16, device=DEVICE)


def fp32(*shape):
    return torch.empty(*shape, dtype=torch.float32, device=DEVICE)


def int32(*shape):
    return torch.empty(*shape, dtype=torch.int32, device=DEVICE)


def cost_of(function, grid, name, **args):
    return function(grid, SimpleNamespace(name=name), args)


def jit_decorator(node):
    """The ``triton.jit`` decorator of a function, or None."""
    for decorator in getattr(node, "decorator_list", []):
        if ast.unparse(decorator).startswith("triton.jit"):
            return decorator
    return None


def launched_kernels(tree):
    """Decorators of kernels by name; a kernel is a ``triton.jit`` function that host code names."""
    jitted = {node.name: decorator for node in tree.body if (decorator := jit_decorator(node)) is not None}
    host = [node for node in tree.body if jit_decorator(node) is None]
    named = {name.id for node in host for name in ast.walk(node) if isinstance(name, ast.Name)}
    return {name: decorator for name, decorator in jitted.items() if name in named}


def test_every_launched_kernel_has_metadata():
    kernels = {
        (path.stem, name): decorator
        for path in MODULES
        for name, decorator in launched_kernels(ast.parse(path.read_text())).items()
    }
    assert len(kernels) >= 35, "launches are no longer found"
    assert {
        ("gemm_triton", "_gemm_kernel"),
        ("norm_triton", "_merge_kernel"),
        ("topk_triton", "_cut"),
    } <= set(kernels)
    bare = [
        f"{module}.{name}"
        for (module, name), decorator in kernels.items()
        if not isinstance(decorator, ast.Call)
        or not any(keyword.arg == "launch_metadata" for keyword in decorator.keywords)
    ]
    assert bare == []


@pytest.mark.parametrize("tma", [False, True])
def test_expert_kernels_count_pairs_and_the_experts_they_can_have(tma):
    num_pairs, num_experts, hidden, width = 6, 4, 64, 32
    w13, w2 = bf16(num_experts, 2 * width, hidden), bf16(num_experts, hidden, width)
    if tma:
        w13 = TensorDescriptor.from_tensor(w13.view(-1, hidden), [16, 16])
        w2 = TensorDescriptor.from_tensor(w2.view(-1, width), [16, 16])
    shape = {"H": hidden, "W": width}
    metadata = experts_triton.expert_metadata
    up = cost_of(metadata, (1, 4), "_gate_up", h=bf16(3, hidden), w=w13, ids=int32(3, 2), **shape)
    assert up == {
        "name": "experts_gate_up_6x64x64",
        "flops16": 2 * 6 * 64 * 64,
        "bytes": 2 * (4 * 64 * 64 + 6 * (64 + 64)),
    }
    down = cost_of(metadata, (1, 4), "_down", w=w2, ids=int32(3, 2), rows=bf16(3, 2, hidden), **shape)
    assert down == {
        "name": "experts_down_6x64x32",
        "flops16": 2 * 6 * 32 * 64,
        "bytes": 2 * (4 * 64 * 32 + 6 * (32 + 64)),
    }
    grouped = cost_of(
        metadata, (132,), "_down", w=w2, order=int32(num_pairs), rows=bf16(3, 2, hidden), **shape
    )
    assert grouped == {**down, "name": "grouped_experts_down_6x64x32"}
    # Two pairs have at most two experts.
    few = cost_of(metadata, (132,), "_gate_up", x=bf16(1, hidden), w=w13, order=int32(2), **shape)
    assert few["bytes"] == 2 * (2 * 64 * 64 + 2 * (64 + 64))


def test_fp32_experts_count_fp32_operations():
    args = {"w": fp32(4, 64, 64), "ids": int32(3, 2), "H": 64, "W": 32}
    cost = cost_of(experts_triton.expert_metadata, (1, 4), "_gate_up", **args)
    assert (cost["flops32"], cost["bytes"]) == (2 * 6 * 64 * 64, 4 * (4 * 64 * 64 + 6 * (64 + 64)))


def test_topk_counts_the_slot_table():
    cost = cost_of(topk_triton._topk_metadata, (2,), "_topk", num_rows=2, capacity=8, E=16, K=4)
    assert cost == {"name": "topk_2x16_4", "flops32": 2 * 16 * 6, "bytes": 4 * (2 * 16 + 2 * 2 * 4 + 16 * 8)}


@pytest.mark.parametrize(("has_norm", "per_element"), [(True, 7), (False, 3)])
def test_rope_reads_and_writes_each_head_once(has_norm, per_element):
    shape = {"NUM_QUERY_HEADS": 8, "NUM_KV_HEADS": 2, "HEAD_DIM": 64, "HAS_NORM": has_norm}
    cost = cost_of(rope_write_triton._rope_cost, (5,), "_rope_kernel", qkv=bf16(5, 12 * 64), **shape)
    assert cost == {
        "name": "rope_and_write_5",
        "flops32": 5 * 10 * 64 * per_element,
        "bytes": 2 * 5 * (12 * 64 + 12 * 64),
    }


def test_decode_attention_counts_its_own_key():
    shape = {"NUM_KV_HEADS": 2, "GROUPS": 4, "HEAD_DIM": 64, "HAS_NORM": True}
    metadata = attention_triton._decode_cost
    whole = cost_of(metadata, (5 * 2, 1), "_decode_kernel", qkv=bf16(5, 12 * 64), SPLIT=False, **shape)
    assert whole == {
        "name": "attention_decode_5",
        "flops32": 5 * 10 * 64 * 7,
        "flops16": 5 * 8 * 4 * 64,
        "bytes": 2 * 5 * (12 * 64 + 12 * 64),
    }
    split = cost_of(metadata, (5 * 2, 3), "_decode_kernel", qkv=bf16(5, 12 * 64), SPLIT=True, **shape)
    assert split["bytes"] == 2 * 5 * (12 * 64 + 4 * 64) + 4 * 5 * 8 * (64 + 2)
    exact = cost_of(metadata, (5 * 2, 1), "_decode_kernel", qkv=fp32(5, 12 * 64), SPLIT=False, **shape)
    assert exact["flops32"] == whole["flops32"] + whole["flops16"]


def test_merge_counts_one_chunk():
    args = {"out": bf16(5, 8 * 64), "HEAD_DIM": 64}
    cost = cost_of(attention_triton._merge_cost, (5 * 8,), "_merge_kernel", **args)
    assert cost == {"name": "attention_merge", "flops32": 40 * 4 * 64, "bytes": 40 * (4 * 66 + 2 * 64)}


def test_attention_of_rows_counts_the_tokens_own_keys():
    args = {"q": bf16(7, 8, 64), "out": bf16(7, 8 * 64), "GROUPS": 4}
    cost = cost_of(prefill_attention_triton._rows_cost, (4,), "_rows_kernel", **args)
    own_keys_and_values = 7 * 2 * 2 * 64
    assert cost == {
        "name": "attention_rows_7",
        "flops16": 4 * 7 * 8 * 64,
        "bytes": 2 * (2 * 7 * 8 * 64 + own_keys_and_values),
    }


def test_logprob_kernels_count_the_logits_they_pick():
    logits, rows = fp32(3, 1000), {"row_max": fp32(3), "row_log_sum": fp32(3)}
    metadata = softmax_triton._picked_cost
    args = {"logits": logits, "token_ids": int32(3), "out": fp32(3), "num_rows": 3, **rows}
    assert cost_of(metadata, (1,), "k", **args) == {
        "name": "k",
        "flops32": 6,
        "bytes": 3 * (4 + 4 + 4 + 4 + 4),
    }
    args = {"logits": logits, "keys": fp32(3, 8), "out_ids": int32(3, 2), "out_values": fp32(3, 2), **rows}
    cost = cost_of(metadata, (3,), "k", num_top=2, num_chunks=8, CHUNK=128, **args)
    assert cost["flops32"] == 3 * 2 * (8 + 2 * 128)
    assert cost["bytes"] == 4 * 3 * (2 * 128 + 8 + 2 + 2 + 2)


def test_tokens_count_an_integer_of_each_tensor():
    args = {"tokens": int32(300), "slots": int32(300), "last_token": int32(600), "num_rows": 300}
    assert cost_of(tokens_triton._token_cost, (2,), "_record", **args) == {
        "name": "_record",
        "flops32": 300,
        "bytes": 4 * 3 * 300,
    }


def test_tensors_count_once_unless_updated_or_left_out():
    args = {"a": int32(10), "b": bf16(3, 4), "n": 5}
    once = cost_of(triton_launch.tensors_cost("a"), (1,), "k", **args)
    assert once == {"name": "k", "flops32": 10, "bytes": 40 + 24}
    updated = cost_of(triton_launch.tensors_cost("b", "n", updated="b", besides="a"), (1,), "k", **args)
    assert updated == {"name": "k", "flops32": 60, "bytes": 48}
