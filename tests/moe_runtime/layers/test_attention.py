"""The attention block: a sequence's rows do not see how they were cut or who else is in the step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_runtime.kernels.attention import BLOCK_SIZE, make_attention_plan
from moe_runtime.layers.attention import Attention
from moe_runtime.layers.rotary import RotaryTable
from moe_runtime.models.registry import load_model_config
from tests.bits import HOSTILE_KINDS, assert_bits_equal, hostile
from tests.checkpoints import tiny_config, write_checkpoint

DTYPES = [torch.float32, torch.bfloat16]
VARIANTS = {
    "qwen": ("qwen3_moe", {}),
    "bias": ("qwen3_moe", {"attention_bias": True}),
    "mixtral": ("mixtral", {}),
    "window": ("mixtral", {"sliding_window": 8}),
}


class Block:
    """One attention block and a cache of scattered blocks."""

    def __init__(self, folder: Path, variant: str, dtype: torch.dtype) -> None:
        model_type, changes = VARIANTS[variant]
        self.config = load_model_config(write_checkpoint(folder, tiny_config(model_type, **changes)))
        generator = torch.Generator().manual_seed(1)
        heads, kv_heads = self.config.num_attention_heads, self.config.num_kv_heads
        sizes = {"q": heads, "k": kv_heads, "v": kv_heads}
        tensors = {f"{x}_proj": torch.randn(n * 16, 64, generator=generator) / 8 for x, n in sizes.items()}
        tensors |= {f"{x}_bias": torch.randn(n * 16, generator=generator) for x, n in sizes.items()}
        tensors |= {f"{x}_norm": 1 + torch.randn(16, generator=generator) / 8 for x in "qk"}
        tensors["o_proj"] = torch.randn(64, heads * 16, generator=generator) / 8
        tensors["o_bias"] = torch.randn(64, generator=generator)
        self.layer = Attention(self.config, 0, lambda role: tensors[role].to(dtype), dtype)
        self.rotary = RotaryTable(self.config.rope, 16, 512)
        shape = (12, kv_heads, BLOCK_SIZE, 16)
        self.k, self.v = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))

    def __call__(self, parts: list[tuple[torch.Tensor, int, list[int]]]) -> list[torch.Tensor]:
        """Run (rows, start position, block table) of several sequences in one step."""
        lengths = [rows.shape[0] for rows, _, _ in parts]
        positions = [torch.arange(start, start + n) for (_, start, _), n in zip(parts, lengths, strict=True)]
        slots = [
            torch.tensor(table)[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
            for (_, _, table), p in zip(parts, positions, strict=True)
        ]
        groups = self.config.num_query_heads_per_kv_head
        starts, tables = [start for _, start, _ in parts], [table for _, _, table in parts]
        plan = make_attention_plan(lengths, starts, tables, groups)
        rows = torch.cat([rows for rows, _, _ in parts])
        out = self.layer(rows, torch.cat(positions), torch.cat(slots), plan, self.rotary, self.k, self.v)
        return list(out.split(lengths))


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_do_not_depend_on_chunks_or_company(variant, dtype, kind, tmp_path):
    block = Block(tmp_path, variant, dtype)
    x, y = (hostile(kind, (n, 64), seed=n).to(dtype) for n in (130, 70))
    whole_x = block([(x, 0, [7, 2, 9])])[0]
    whole_y = block([(y, 0, [1, 4])])[0]
    assert whole_x.dtype == dtype
    assert whole_x.isfinite().all()
    first = block([(y[:30], 0, [3, 8]), (x[:63], 0, [5, 0, 6])])
    second = block([(x[63:64], 63, [5, 0, 6]), (y[30:], 30, [3, 8])])
    third = block([(x[64:], 64, [5, 0, 6])])
    assert_bits_equal(torch.cat([first[1], second[0], third[0]]), whole_x, "x")
    assert_bits_equal(torch.cat([first[0], second[1]]), whole_y, "y")
