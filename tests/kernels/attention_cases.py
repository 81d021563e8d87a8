"""Steps of paged attention for kernel tests: several sequences, slots that hold no key filled with NaN."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tests.bits import hostile
from tests.kernels.triton_interpreter import DEVICE

from moe_runtime.kernels.attention_tiles import make_row_tiles  # isort: skip
from moe_runtime.kernels.attention_tree_triton import TREE, AttentionTree  # isort: skip
from moe_runtime.kernels.attention_triton import (  # isort: skip
    CANONICAL_DECODE,
    DecodeSchedule,
    attend_decode,
    decode_workspace,
)
from moe_runtime.kernels.prefill_attention_triton import (  # isort: skip
    CANONICAL_ROWS,
    RowSchedule,
    attend_rows,
)
from moe_runtime.kernels.rope_write_triton import (  # isort: skip
    CANONICAL_ROPE,
    RopeSchedule,
    rope_and_write,
)

__all__ = ["EPS", "POISON", "SMALL_TREE", "Step", "make_step", "run_decode", "run_rows", "take_sequences"]

SMALL_TREE = AttentionTree(inner_keys=64, chunk_keys=128)
POISON = 7.0
EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Inputs of a step; ``query_lens`` and ``starts`` by sequence."""

    qkv: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    query_lens: list[int]
    starts: list[int]
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor
    num_kv_heads: int
    num_groups: int
    head_dim: int

    @property
    def positions(self) -> torch.Tensor:
        spans = [torch.arange(s, s + n) for s, n in zip(self.starts, self.query_lens, strict=True)]
        return torch.cat(spans).int().to(DEVICE)

    @property
    def slots(self) -> torch.Tensor:
        sequence = torch.repeat_interleave(torch.arange(len(self.query_lens)), torch.tensor(self.query_lens))
        position = self.positions.cpu().long()
        block = self.block_table.cpu()[sequence, position // 64].long()
        return (block * 64 + position % 64).to(DEVICE)


def make_step(
    query_lens: list[int],
    starts: list[int],
    *,
    num_kv_heads: int = 2,
    num_groups: int = 4,
    head_dim: int = 32,
    dtype: torch.dtype = torch.bfloat16,
    kind: str = "normal",
    norm: bool = True,
    seed: int = 0,
) -> Step:
    """Every sequence has its own data, which does not depend on the other sequences."""
    max_blocks = max(s + n for s, n in zip(starts, query_lens, strict=True)) // 64 + 2
    num_seqs = len(starts)
    shape = (num_seqs * max_blocks + 1, num_kv_heads, 64, head_dim)
    k_cache, v_cache = torch.full(shape, float("nan")), torch.full(shape, float("nan"))
    order = torch.randperm(num_seqs * max_blocks, generator=torch.Generator().manual_seed(seed)) + 1
    table = order.view(num_seqs, max_blocks)
    width = (num_groups + 2) * num_kv_heads * head_dim
    rows = []
    for i, (num_tokens, start) in enumerate(zip(query_lens, starts, strict=True)):
        key = hostile(kind, (2, max_blocks * 64, num_kv_heads, head_dim), 1000 * seed + 2 * i)
        if kind != "normal":
            key[0] = key[0].clamp(-8.0, 8.0)  # sharp scores, but more than one key counts
        key[:, start:] = float("nan")
        pages = key.view(2, max_blocks, 64, num_kv_heads, head_dim).transpose(2, 3)
        k_cache[table[i]], v_cache[table[i]] = pages[0], pages[1]
        rows.append(hostile(kind, (num_tokens, width), 1000 * seed + 2 * i + 1))
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(2, head_dim, generator=generator) + 0.5
    frequency = 10000.0 ** (-torch.arange(head_dim // 2) * 2 / head_dim)
    angle = torch.arange(max_blocks * 64)[:, None] * frequency
    return Step(
        qkv=torch.cat(rows).to(dtype).to(DEVICE),
        k_cache=k_cache.to(dtype).to(DEVICE),
        v_cache=v_cache.to(dtype).to(DEVICE),
        block_table=table.int().to(DEVICE),
        query_lens=query_lens,
        starts=starts,
        q_norm=weights[0].to(DEVICE) if norm else None,
        k_norm=weights[1].to(DEVICE) if norm else None,
        cos=angle.cos().to(DEVICE),
        sin=angle.sin().to(DEVICE),
        num_kv_heads=num_kv_heads,
        num_groups=num_groups,
        head_dim=head_dim,
    )


def take_sequences(step: Step, sequences: list[int]) -> Step:
    """The step with these sequences only, in this order."""
    ends = torch.tensor(step.query_lens).cumsum(0).tolist()
    rows = [step.qkv[ends[i] - step.query_lens[i] : ends[i]] for i in sequences]
    return replace(
        step,
        qkv=torch.cat(rows),
        block_table=step.block_table[sequences].contiguous(),
        query_lens=[step.query_lens[i] for i in sequences],
        starts=[step.starts[i] for i in sequences],
    )


def run_decode(
    step: Step,
    schedule: DecodeSchedule = CANONICAL_DECODE,
    *,
    tree: AttentionTree = TREE,
    window: int | None = None,
    positions: torch.Tensor | None = None,
    max_context: int | None = None,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, key cache and value cache of ``attend_decode`` on poisoned outputs; one row per sequence."""
    k_cache, v_cache = step.k_cache.clone(), step.v_cache.clone()
    positions = step.positions if positions is None else positions
    num_heads = step.num_kv_heads * step.num_groups
    out = torch.full(
        (step.qkv.shape[0], num_heads * step.head_dim), POISON, dtype=step.qkv.dtype, device=DEVICE
    )
    context = max_context or max(step.starts) + 1
    workspace = decode_workspace(step.qkv.shape[0], num_heads, step.head_dim, context, DEVICE, tree)
    for part in workspace:
        part.fill_(POISON)
    attend_decode(
        step.qkv,
        k_cache,
        v_cache,
        positions,
        step.block_table,
        step.q_norm,
        step.k_norm,
        EPS,
        step.cos,
        step.sin,
        out,
        window=window,
        workspace=workspace,
        schedule=schedule,
        pdl=pdl,
        tree=tree,
    )
    return out, k_cache, v_cache


def run_rows(
    step: Step,
    schedule: RowSchedule = CANONICAL_ROWS,
    rope: RopeSchedule = CANONICAL_ROPE,
    *,
    tree: AttentionTree = TREE,
    window: int | None = None,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, key cache and value cache of ``rope_and_write`` and ``attend_rows`` on poisoned outputs."""
    k_cache, v_cache = step.k_cache.clone(), step.v_cache.clone()
    num_tokens, num_heads = step.qkv.shape[0], step.num_kv_heads * step.num_groups
    q = torch.full((num_tokens, num_heads, step.head_dim), POISON, dtype=step.qkv.dtype, device=DEVICE)
    out = torch.full_like(q.view(num_tokens, -1), POISON)
    rope_and_write(
        step.qkv,
        step.positions,
        step.slots,
        step.q_norm,
        step.k_norm,
        EPS,
        step.cos,
        step.sin,
        k_cache,
        v_cache,
        q,
        schedule=rope,
        pdl=pdl,
    )
    tiles = make_row_tiles(
        step.query_lens, step.starts, num_groups=step.num_groups, block_rows=schedule.block_rows
    )
    attend_rows(
        q,
        k_cache,
        v_cache,
        torch.from_numpy(tiles).to(DEVICE),
        step.block_table,
        out,
        window=window,
        schedule=schedule,
        pdl=pdl,
        tree=tree,
    )
    return out, k_cache, v_cache
