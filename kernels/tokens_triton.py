"""Token ids that stay on the device between steps.

A step may be launched before the host knows the tokens of the step before. Each running sequence has a slot in
``last_token``; a step takes ids that the host does not know (-1) from there, and leaves the ids it chose there.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.triton_launch import cdiv, launch_options, wait_for_previous

__all__ = [
    "record_tokens",
    "record_tokens_reference",
    "resolve_tokens",
    "resolve_tokens_reference",
]

BLOCK = 256


def resolve_tokens(
    host_ids: torch.Tensor,
    slots: torch.Tensor,
    last_token: torch.Tensor,
    out: torch.Tensor,
    *,
    pdl: bool = False,
) -> None:
    """``out[i] = host_ids[i]``, or ``last_token[slots[i]]`` where that is -1.

    Args:
        host_ids: ``[M]`` int32.
        slots: ``[M]`` int32; -1 in inert rows, whose id is -1.
        last_token: ``[num_slots]`` int32.
        out: ``[M]`` int32, written.
        pdl: Dependent launch.
    """
    num_rows = host_ids.shape[0]
    if num_rows:
        _resolve[(cdiv(num_rows, BLOCK),)](
            host_ids, slots, last_token, out, num_rows, B=BLOCK, PDL=pdl,
            **launch_options(num_warps=4, num_stages=1, pdl=pdl),
        )  # fmt: skip


def record_tokens(
    tokens: torch.Tensor, slots: torch.Tensor, last_token: torch.Tensor, *, pdl: bool = False
) -> None:
    """``last_token[slots[i]] = tokens[i]`` where ``slots[i]`` is not -1; slots are distinct.

    Args:
        tokens: ``[M]`` int32.
        slots: ``[M]`` int32.
        last_token: ``[num_slots]`` int32, updated.
        pdl: Dependent launch.
    """
    num_rows = tokens.shape[0]
    if num_rows:
        _record[(cdiv(num_rows, BLOCK),)](
            tokens, slots, last_token, num_rows, B=BLOCK, PDL=pdl,
            **launch_options(num_warps=4, num_stages=1, pdl=pdl),
        )  # fmt: skip


def resolve_tokens_reference(
    host_ids: torch.Tensor, slots: torch.Tensor, last_token: torch.Tensor
) -> torch.Tensor:
    """The same by torch."""
    kept = torch.where(slots >= 0, last_token[slots.clamp(min=0).long()], -1)
    return torch.where(host_ids >= 0, host_ids, kept)


def record_tokens_reference(
    tokens: torch.Tensor, slots: torch.Tensor, last_token: torch.Tensor
) -> torch.Tensor:
    """``last_token`` afterwards, by torch."""
    result = last_token.clone()
    live = slots >= 0
    result[slots[live].long()] = tokens[live]
    return result


def _token_cost(grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Launch metadata: an int32 of each tensor per row, though only the device knows which slots are used."""
    num_rows, num_tensors = args["num_rows"], sum(isinstance(value, torch.Tensor) for value in args.values())
    return {"name": kernel.name, "flops32": num_rows, "bytes": 4 * num_tensors * num_rows}


@triton.jit(do_not_specialize=["num_rows"], launch_metadata=_token_cost)
def _resolve(host_ids, slots, last_token, out, num_rows, B: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0) * B + tl.arange(0, B)
    live = row < num_rows
    wait_for_previous(PDL)
    known = tl.load(host_ids + row, mask=live, other=-1)
    slot = tl.load(slots + row, mask=live, other=-1)
    kept = tl.load(last_token + slot, mask=live & (slot >= 0), other=-1)
    tl.store(out + row, tl.where(known >= 0, known, kept), mask=live)


@triton.jit(do_not_specialize=["num_rows"], launch_metadata=_token_cost)
def _record(tokens, slots, last_token, num_rows, B: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0) * B + tl.arange(0, B)
    live = row < num_rows
    wait_for_previous(PDL)
    slot = tl.load(slots + row, mask=live, other=-1)
    tl.store(last_token + slot, tl.load(tokens + row, mask=live, other=0), mask=live & (slot >= 0))
