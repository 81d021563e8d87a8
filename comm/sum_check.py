"""Start-up proof that a transport which adds rows itself adds them by the tree of kernels/combine.py.

``sum_fault`` runs a transport over data in which another order, partial sums, another rounding or a row in the wrong
place shows, and refuses the transport otherwise. The transport is a function, so the check is tested without any.

Numerics: compared bit for bit, but for the sign of a zero. A sum is -0 only where all its rows are zeros, at least one
of them -0, and whether it is then depends on whether a transport begins with a zero or with its first row. Such a sign
ends at the next GEMM, whose chain begins with +0 (and the residual add and RMSNorm before it keep zeros zeros), so no
token id and no logprob can depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from moe_runtime.errors import InvarianceError
from moe_runtime.kernels.combine import combine_slots

__all__ = [
    "DispatchCombine",
    "SumCase",
    "compare_sums",
    "partial_sums",
    "refuse_faults",
    "sum_case",
    "sum_fault",
]

EXPONENTS = (30, 12, 0, -12)
"""Powers of two that rows are made of. 2^12 and 1 do not fit one bf16, 2^30 and 1 do not fit one fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SumCase:
    """Routing and expert rows of all ranks' tokens, the same on every rank.

    Attributes:
        rows: ``[T, K, hidden]`` bfloat16, what each slot's expert puts out before the routing weight.
        topk_idx: ``[T, K]`` int64 physical expert ids, -1 = masked.
        topk_weights: ``[T, K]`` float32, powers of two: ``weight * row`` is exact.
        tokens_per_rank: Tokens of every rank; rank 0's come first.
    """

    rows: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    tokens_per_rank: Sequence[int]

    @property
    def weighted_rows(self) -> torch.Tensor:
        """``[T, K, hidden]`` bfloat16, zero where masked: what is to be added."""
        weighted = (self.topk_weights[..., None] * self.rows.float()).to(self.rows.dtype)
        return weighted.masked_fill((self.topk_idx < 0)[..., None], 0)

    def tokens_of(self, rank: int) -> slice:
        """Where a rank's tokens stand."""
        start = sum(self.tokens_per_rank[:rank])
        return slice(start, start + self.tokens_per_rank[rank])


DispatchCombine = Callable[[SumCase], torch.Tensor]
"""A transport over a case: ``[T_r, hidden]``, the sums of this rank's tokens."""


def sum_case(
    tokens_per_rank: Sequence[int], num_topk: int, num_experts: int, hidden: int, seed: int
) -> SumCase:
    """A case in which the order of a token's slots shows.

    In each element two random slots hold +L and -L, two more +M and -M, the rest values near the other powers of two.
    Experts of a token are distinct and in random order. Of eight tokens one has all slots masked, one all but one, one
    all but two, one every second; the first of every eight holds zeros of both signs.
    """
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(tokens_per_rank)
    shape = (num_tokens, num_topk, hidden)

    def choice(values: Sequence[float], of: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), list(of), generator=generator)]

    exponent = choice(EXPONENTS, shape)
    mantissa = 1 + torch.randint(8, shape, generator=generator) / 8
    value = choice((-1.0, 1.0), shape) * mantissa * torch.exp2(exponent)
    place = torch.rand(shape, generator=generator).argsort(
        1
    )  # of each slot among the roles +L, -L, +M, -M, ...
    by_place = value.gather(1, place.argsort(1))
    for first in range(0, min(num_topk, 4) - 1, 2):
        by_place[:, first + 1] = -by_place[:, first]
    target = by_place.gather(1, place)
    target[::8] = choice((-0.0, 0.0), target[::8].shape)
    noise = torch.rand(num_tokens, num_experts, generator=generator)
    topk_idx = noise.argsort(1)[:, :num_topk]
    rank_in_token = torch.rand(num_tokens, num_topk, generator=generator).argsort(1)
    for token, left in ((3, 0), (4, 1), (5, 2)):
        topk_idx[token::8] = topk_idx[token::8].masked_fill(rank_in_token[token::8] >= left, -1)
    topk_idx[6::8, ::2] = -1
    weights = torch.exp2(-torch.randint(4, (num_tokens, num_topk), generator=generator).float())
    rows = (target / weights[..., None]).to(torch.bfloat16)
    return SumCase(rows=rows, topk_idx=topk_idx, topk_weights=weights, tokens_per_rank=tuple(tokens_per_rank))


def partial_sums(rows: torch.Tensor, topk_idx: torch.Tensor, first_expert: Sequence[int]) -> torch.Tensor:
    """The tree of multiple reduction, at level ``batch`` only.

    A rank adds its slots of a token, ascending, in fp32 and rounds; the home rank adds the partial rows, ranks
    ascending, in fp32 and rounds.

    Args:
        rows: ``[T, K, hidden]`` weighted rows in the model dtype, zero where masked.
        topk_idx: ``[T, K]`` int64 physical expert ids, -1 = masked.
        first_expert: ``ep_size + 1`` exclusive prefix sums of physical experts per rank.

    Returns:
        ``[T, hidden]`` in the model dtype.
    """
    partials = []
    for low, high in pairwise(first_expert):
        here = (topk_idx >= low) & (topk_idx < high)
        partials.append(combine_slots(torch.where(here[..., None], rows, 0)))
    return combine_slots(torch.stack(partials, dim=1))


def compare_sums(case: SumCase, rank: int, actual: torch.Tensor, tree: torch.Tensor) -> str | None:
    """Compare a rank's sums with the tree's; None where they are equal.

    Args:
        case: What was run.
        rank: Whose tokens ``actual`` has.
        actual: ``[T_r, hidden]`` bfloat16.
        tree: ``[T, hidden]`` bfloat16, of all ranks' tokens.
    """
    expected = tree[case.tokens_of(rank)]
    actual = actual.cpu()
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return (
            f"sums are {actual.dtype} {list(actual.shape)}, must be {expected.dtype} {list(expected.shape)}"
        )
    differs = (actual + 0.0).view(torch.int16) != (expected + 0.0).view(torch.int16)
    if not bool(differs.any()):
        return None
    token, column = torch.nonzero(differs)[0].tolist()
    slots = case.weighted_rows[case.tokens_of(rank)][token, :, column].tolist()
    return (
        f"{int(differs.sum())} of {differs.numel()} sums differ; slots {slots} give {actual[token, column].item()}, "
        f"the tree {expected[token, column].item()}"
    )


def sum_fault(
    dispatch_combine: DispatchCombine,
    *,
    rank: int,
    first_expert: Sequence[int],
    num_topk: int,
    hidden: int,
    num_max_tokens_per_rank: int,
    presums: bool = False,
) -> str | None:
    """Run a transport over hostile data; a collective of all ranks where the transport is one.

    Args:
        dispatch_combine: The transport.
        rank: This rank.
        first_expert: ``ep_size + 1`` exclusive prefix sums of physical experts per rank.
        num_topk: K.
        hidden: Columns of a row.
        num_max_tokens_per_rank: Most tokens that a rank may have.
        presums: The tree is ``partial_sums``, not ``combine_slots``.

    Returns:
        None where all sums have the tree's bits, else what differs first. Every case is run, whatever came before, so
        that no rank waits for another.
    """
    ep_size, num_experts = len(first_expert) - 1, first_expert[-1]
    most = min(num_max_tokens_per_rank, 64)
    counts = [
        [most] * ep_size,
        [1] * ep_size,
        [(rank_ * 7 + 3) % (most + 1) for rank_ in range(ep_size)],
        [0] * (ep_size - 1) + [most],
    ]
    faults = []
    for seed, tokens_per_rank in enumerate(counts):
        case = sum_case(tokens_per_rank, num_topk, num_experts, hidden, seed)
        rows = case.weighted_rows
        tree = partial_sums(rows, case.topk_idx, first_expert) if presums else combine_slots(rows)
        fault = compare_sums(case, rank, dispatch_combine(case), tree)
        if fault is not None:
            faults.append(fault)
    return faults[0] if faults else None


def refuse_faults(name: str, faults: Sequence[str | None]) -> None:
    """Raise where any rank found a fault.

    Args:
        name: The dispatcher, as the flag spells it.
        faults: Of every rank, from ``sum_fault``.

    Raises:
        InvarianceError: names dispatcher, rank, values and rule.
    """
    for rank, fault in enumerate(faults):
        if fault:
            raise InvarianceError(
                f"dispatcher ({name}) must add each token's rows as kernels/combine.py does, and does not: rank "
                f"{rank}: {fault}; choose another dispatcher"
            )
