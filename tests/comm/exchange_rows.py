"""Rows that three ranks exchange in tests, what experts make of them, and what must be home."""

from __future__ import annotations

from tests.kernels.triton_interpreter import DEVICE  # isort: skip

import torch

from moe_runtime.comm.gpu_exchange import ExchangeSizes, GpuExchange, StepShape  # isort: skip
from moe_runtime.kernels.dispatch_triton import TableSlice  # isort: skip

__all__ = [
    "FIRST",
    "HIDDEN",
    "NUM_TOPK",
    "SIZES",
    "TOKENS",
    "check_table",
    "expected_rows",
    "fill",
    "picked",
    "rows_of",
    "work",
]

HIDDEN, NUM_TOPK, FIRST = 32, 3, (0, 3, 5, 8)
TOKENS = (2, 0, 4)
SIZES = ExchangeSizes(
    size=3, max_rows=5, hidden=HIDDEN, num_topk=NUM_TOPK, num_layers=2, dtype=torch.bfloat16
)


def rows_of(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    count = TOKENS[rank]
    ids = torch.rand(count, FIRST[-1], generator=generator).argsort(1)[:, :NUM_TOPK].int()
    x = torch.randn(count, HIDDEN, generator=generator).bfloat16()
    return x.to(DEVICE), ids.to(DEVICE), torch.rand(count, NUM_TOPK, generator=generator).to(DEVICE)


def fill(exchange: GpuExchange, shape: StepShape) -> torch.Tensor:
    for target, source in zip(exchange.own_rows(shape), rows_of(exchange.rank), strict=True):
        target.copy_(source)
    return torch.tensor([TOKENS[exchange.rank]], dtype=torch.int32, device=DEVICE)


def work(exchange: GpuExchange, shape: StepShape, table) -> None:
    """Experts that put ``16 * token + slot`` of the position and the expert into a pair's row."""
    low, high = FIRST[exchange.rank], FIRST[exchange.rank + 1]
    for first in range(shape.capacity):
        piece = TableSlice(num_tokens=1, capacity=shape.capacity, first_token=first)
        target, homes = exchange.targets(shape, piece)
        for home, row in enumerate(piece.of(table.ids).tolist()):
            for slot, expert in enumerate(row):
                if low <= expert < high:
                    at = int(homes.offsets[home]) + (homes.slice.first_token * NUM_TOPK + slot) * HIDDEN
                    value = float(16 * (home * shape.capacity + first) + slot) + 256.0 * expert
                    target.view(-1)[at : at + HIDDEN] = value
        exchange.finish_slice(shape, piece, piece.of(table.ids), pdl=False)


def expected_rows(rank: int, capacity: int) -> torch.Tensor:
    _, ids, _ = rows_of(rank)
    position = rank * capacity + torch.arange(TOKENS[rank], device=DEVICE)[:, None]
    value = 16.0 * position + torch.arange(NUM_TOPK, device=DEVICE)[None] + 256.0 * ids
    return value[:, :, None].expand(-1, -1, HIDDEN).bfloat16()


def picked(exchange: GpuExchange, shape: StepShape) -> torch.Tensor:
    """A rank's rows as ``combine_residual_norm`` reads them."""
    rows, sources = exchange.collect(shape)
    count = TOKENS[exchange.rank]
    if sources is None:
        return rows[:count]
    by_source = rows.view(exchange.size, count, NUM_TOPK, HIDDEN)
    source = torch.bucketize(sources.ids, sources.first_expert[1:], right=True)
    token, slot = torch.meshgrid(torch.arange(count), torch.arange(NUM_TOPK), indexing="ij")
    return by_source[source.long(), token, slot]


def check_table(table, rank: int, capacity: int) -> None:
    for source in range(3):
        x, ids, weights = rows_of(source)
        places = slice(source * capacity, source * capacity + TOKENS[source])
        assert torch.equal(table.ids[places], ids)
        assert torch.equal(table.weights[places], weights)
        here = ((ids >= FIRST[rank]) & (ids < FIRST[rank + 1])).any(1)
        assert torch.equal(table.x[places][here], x[here])
        inert = table.ids[source * capacity + TOKENS[source] : (source + 1) * capacity]
        assert bool((inert == -1).all())
