"""Attention kernels on one GPU: decode by batch, context, tree and schedule; prefill in TFLOP/s; rope and cache write.

Dimensions of Qwen3-30B-A3B. Every time is the median over replays of a CUDA graph; decode graphs hold several launches
over distinct caches (cold keys), dependent launch on. ``python benchmarks/bench_attention.py`` prints tables and JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from moe_runtime.kernels.attention_tiles import make_row_tiles
from moe_runtime.kernels.attention_tree_triton import TREE, AttentionTree, attention_work
from moe_runtime.kernels.attention_triton import (
    DECODE_SCHEDULES,
    DecodeSchedule,
    attend_decode,
    decode_workspace,
)
from moe_runtime.kernels.prefill_attention_triton import ROW_SCHEDULES, attend_rows
from moe_runtime.kernels.rope_write_triton import ROPE_SCHEDULES, rope_and_write

__all__ = ["bench_attention"]

NUM_QUERY_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 4, 128
WIDTH = (NUM_QUERY_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
Workspace = tuple[torch.Tensor, torch.Tensor]
TREES = [AttentionTree(inner_keys=i, chunk_keys=c) for i in (64, 128) for c in (256, 512)]
BATCHES = (1, 8, 32, 128)
CONTEXTS = (200, 1000, 2500, 8000)
KV_BYTES = 6 * 2**30
DTYPE = torch.bfloat16


def bench_attention(device: str = "cuda", quick: bool = False) -> list[dict[str, Any]]:
    """Measure and print; returns the rows.

    Args:
        device: Where.
        quick: Only the tree of models.
    """
    trees = [TREE] if quick else TREES
    rows = [*_decode_rows(device, trees), *_prefill_rows(device, trees), *_rope_rows(device)]
    for row in rows:
        print(json.dumps(row))
    return rows


def _decode_rows(device: str, trees: list[AttentionTree]) -> list[dict[str, Any]]:
    rows = []
    for num_rows in BATCHES:
        for context in CONTEXTS:
            found = _decode_case(device, trees, num_rows, context)
            _print_decode(found, num_rows, context)
            rows += found
    return rows


def _decode_case(
    device: str, trees: list[AttentionTree], num_rows: int, context: int
) -> list[dict[str, Any]]:
    blocks = -(-context // 64)
    cache_bytes = 2 * num_rows * blocks * NUM_KV_HEADS * 64 * HEAD_DIM * 2
    num_layers = max(1, min(16, KV_BYTES // cache_bytes))
    shape = (num_rows * blocks, NUM_KV_HEADS, 64, HEAD_DIM)
    caches = [[torch.randn(shape, device=device, dtype=DTYPE) for _ in "kv"] for _ in range(num_layers)]
    table = torch.randperm(num_rows * blocks, device=device).int().view(num_rows, blocks)
    positions = torch.full((num_rows,), context - 1, dtype=torch.int32, device=device)
    qkv = torch.randn(num_rows, WIDTH, device=device, dtype=DTYPE)
    out = torch.empty(num_rows, NUM_QUERY_HEADS * HEAD_DIM, dtype=DTYPE, device=device)
    cos, norm = torch.rand(16384, HEAD_DIM // 2, device=device), torch.rand(HEAD_DIM, device=device)
    rows = []

    def run(schedule: DecodeSchedule, tree: AttentionTree, workspace: Workspace) -> None:
        for k_cache, v_cache in caches:
            attend_decode(
                qkv, k_cache, v_cache, positions, table, norm, norm, 1e-6, cos, cos, out,
                workspace=workspace, schedule=schedule, pdl=True, tree=tree,
            )  # fmt: skip

    for tree in trees:
        workspace = decode_workspace(num_rows, NUM_QUERY_HEADS, HEAD_DIM, context, device, tree)
        expected = None
        for schedule in DECODE_SCHEDULES[1:]:
            out.fill_(7.0)
            us = _graph_us(partial(run, schedule, tree, workspace)) / num_layers
            expected = out.clone() if expected is None else expected
            rows.append(
                {
                    "op": "attend_decode",
                    "rows": num_rows,
                    "context": context,
                    "inner": tree.inner_keys,
                    "chunk": tree.chunk_keys,
                    "form": "split" if schedule.split else "flat" if schedule.flat else "serial",
                    "warps": schedule.num_warps,
                    "stages": schedule.num_stages,
                    "us": round(us, 2),
                    "tb_per_s": round(cache_bytes / us / 1e6, 2),
                    "equal": torch.equal(out, expected),
                }
            )
    return rows


def _prefill_rows(device: str, trees: list[AttentionTree]) -> list[dict[str, Any]]:
    rows = []
    for num_seqs, length in ((16, 2048), (1, 8192)):
        num_tokens, blocks = num_seqs * length, length // 64
        shape = (num_seqs * blocks, NUM_KV_HEADS, 64, HEAD_DIM)
        k_cache, v_cache = (torch.randn(shape, device=device, dtype=DTYPE) for _ in "kv")
        table = torch.randperm(num_seqs * blocks, device=device).int().view(num_seqs, blocks)
        q = torch.randn(num_tokens, NUM_QUERY_HEADS, HEAD_DIM, device=device, dtype=DTYPE)
        out = torch.empty(num_tokens, NUM_QUERY_HEADS * HEAD_DIM, dtype=DTYPE, device=device)
        flops = num_seqs * _flops(length)
        for tree in trees:
            expected = None
            for schedule in ROW_SCHEDULES:
                if schedule.block_rows < 64:
                    continue
                tiles = torch.from_numpy(
                    make_row_tiles(
                        [length] * num_seqs,
                        [0] * num_seqs,
                        num_groups=NUM_QUERY_HEADS // NUM_KV_HEADS,
                        block_rows=schedule.block_rows,
                    )
                ).to(device)
                out.fill_(7.0)
                call = partial(attend_rows, q, k_cache, v_cache, tiles, table, out)
                us = _graph_us(partial(call, schedule=schedule, tree=tree))
                expected = out.clone() if expected is None else expected
                rows.append(
                    {
                        "op": "attend_rows",
                        "sequences": num_seqs,
                        "length": length,
                        "inner": tree.inner_keys,
                        "chunk": tree.chunk_keys,
                        "block_rows": schedule.block_rows,
                        "warps": schedule.num_warps,
                        "stages": schedule.num_stages,
                        "tma": schedule.tma,
                        "us": round(us, 1),
                        "tflops": round(flops / us / 1e6, 1),
                        "equal": torch.equal(out, expected),
                    }
                )
                print(rows[-1])
    return rows


def _rope_rows(device: str) -> list[dict[str, Any]]:
    rows = []
    cos = torch.rand(16384, HEAD_DIM // 2, device=device)
    norm = torch.rand(HEAD_DIM, device=device)
    for num_tokens in (64, 1024, 8192, 32768):
        qkv = torch.randn(num_tokens, WIDTH, device=device, dtype=DTYPE)
        k_cache, v_cache = (
            torch.zeros(num_tokens // 64, NUM_KV_HEADS, 64, HEAD_DIM, dtype=DTYPE, device=device)
            for _ in "kv"
        )
        positions = torch.arange(num_tokens, device=device, dtype=torch.int32) % 2048
        slots = torch.arange(num_tokens, device=device)
        q = torch.empty(num_tokens, NUM_QUERY_HEADS, HEAD_DIM, dtype=DTYPE, device=device)
        for schedule in ROPE_SCHEDULES:
            arguments = (qkv, positions, slots, norm, norm, 1e-6, cos, cos, k_cache, v_cache, q)
            us = _graph_us(partial(rope_and_write, *arguments, schedule=schedule))
            rows.append(
                {
                    "op": "rope_and_write",
                    "tokens": num_tokens,
                    "tokens_per_program": schedule.num_tokens,
                    "warps": schedule.num_warps,
                    "us": round(us, 2),
                    "tb_per_s": round(2 * qkv.numel() * 2 / us / 1e6, 2),
                }
            )
            print(rows[-1])
    return rows


def _flops(length: int) -> int:
    """Of one causal sequence: visible keys only."""
    return attention_work(
        range(length),
        num_query_heads=NUM_QUERY_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        window=None,
    )[0]


def _graph_us(run: Callable[[], None], replays: int = 11) -> float:
    """Median time of a replay of ``run`` captured in a graph, in microseconds."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(2):
        graph.replay()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times)[replays // 2]


def _print_decode(rows: list[dict[str, Any]], num_rows: int, context: int) -> None:
    """Best time of each form and tree at one batch and context."""
    cells = []
    for tree in TREES:
        best: dict[str, float] = {}
        for row in rows:
            key = (row["rows"], row["context"], row["inner"], row["chunk"])
            if key == (num_rows, context, tree.inner_keys, tree.chunk_keys):
                best[row["form"]] = min(row["us"], best.get(row["form"], float("inf")))
        if best:
            cells.append(f"{tree.inner_keys}/{tree.chunk_keys} {best}")
    print(f"M={num_rows} context={context} us: " + "; ".join(cells))


if __name__ == "__main__":
    bench_attention()
