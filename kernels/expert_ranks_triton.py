"""Ranks of experts as sortable keys, and scores by sigmoid with bias and groups: parts of ``topk`` (topk_triton.py).

Numerics: ranks are exact, through one int64 key. p(e) = 1 / (1 + exp(-logit(e))) and p + bias are fp32, elementwise; a
group's score is one fp32 sum of two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

__all__ = ["SigmoidScores", "keep_groups", "key_value", "rank_key", "sigmoid_topk_reference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SigmoidScores:
    """The router of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2): p(e) = 1 / (1 + exp(-logit(e))) in fp32.

    Experts rank by p + bias; with neither bias nor groups by the logit, which does not saturate. Of ``num_groups``
    groups of consecutive experts only the ``num_kept_groups`` with the largest sum of their two best p + bias can be
    chosen from, the lower group on ties.

    Attributes:
        bias: ``[E]`` float32, or None for none; takes part in the choice alone.
        num_groups: A power of two that divides E; more than one needs E to be a power of two.
        num_kept_groups: They must hold at least K experts.
        scale: Factor of the weights, last.
    """

    bias: torch.Tensor | None = None
    num_groups: int = 1
    num_kept_groups: int = 1
    scale: float = 1.0

    def check(self, num_experts: int, num_topk: int) -> None:
        """Raise ``ValueError`` for groups that do not fit E and K."""
        groups = self.num_groups
        if groups < 1 or groups & (groups - 1) or (groups > 1 and num_experts & (num_experts - 1)):
            raise ValueError(f"num_groups ({groups}) and num_experts ({num_experts}) must be powers of two")
        if groups > 1 and num_experts < 16:
            raise ValueError(f"num_experts ({num_experts}) must be at least 16 for more than one group")
        if groups > num_experts // 2 and groups > 1:
            raise ValueError(f"num_groups ({groups}) must leave two experts a group of {num_experts}")
        if not 1 <= self.num_kept_groups <= groups or (
            self.num_kept_groups * (num_experts // groups) < num_topk
        ):
            raise ValueError(
                f"num_kept_groups ({self.num_kept_groups}) of {groups} must hold num_topk ({num_topk}) experts"
            )


def sigmoid_topk_reference(
    logits: torch.Tensor, num_topk: int, norm_topk_prob: bool, scores: SigmoidScores
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids ``[M, K]`` int32 and weights ``[M, K]`` float32 by torch, same ranks, weights within fp32 rounding."""
    p = torch.sigmoid(logits)
    ranked = logits + 0.0
    if scores.bias is not None:
        ranked = p + scores.bias
    elif scores.num_groups > 1:
        ranked = p
    if scores.num_groups > 1:
        grouped = ranked.view(len(p), scores.num_groups, -1)
        best = grouped.topk(2, dim=2).values.sum(2)
        kept = torch.sort(best, dim=1, descending=True, stable=True).indices[:, : scores.num_kept_groups]
        allowed = torch.zeros_like(best, dtype=torch.bool).scatter(1, kept, value=True)
        ranked = grouped.masked_fill(~allowed[:, :, None], -torch.inf).view_as(p)
    ids = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, :num_topk]
    chosen = p.gather(1, ids)
    if norm_topk_prob:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    return ids.int(), chosen * scores.scale


@triton.jit
def rank_key(x, index):  # type: ignore[no-untyped-def]
    """int64 that grows with x (NaN above all, the two zeros equal), then with a lower index of 16 bits."""
    x = tl.where(x == 0.0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    return (bits.to(tl.int64) << 16) | (0xFFFF - index).to(tl.int64)


@triton.jit
def key_value(key):  # type: ignore[no-untyped-def]
    """The x of a key."""
    bits = (key >> 16).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def keep_groups(  # type: ignore[no-untyped-def]
    key, LOWEST: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr
):
    """Keys [ROWS, E] of the experts outside the KEPT best groups become LOWEST."""
    rows: tl.constexpr = key.shape[0]
    grouped = tl.reshape(key, (rows, GROUPS, key.shape[1] // GROUPS))
    best = tl.max(grouped, 2)
    second = tl.max(tl.where(grouped == best[:, :, None], LOWEST, grouped), 2)
    g = tl.arange(0, GROUPS)[None, :]
    group_key = rank_key(key_value(best) + key_value(second), g)
    kept = tl.zeros((rows, GROUPS), tl.int32)
    for _ in tl.static_range(KEPT):
        hit = group_key == tl.max(group_key, 1)[:, None]
        kept = tl.where(hit, 1, kept)
        group_key = tl.where(hit, LOWEST, group_key)
    return tl.reshape(tl.where(kept[:, :, None] > 0, grouped, LOWEST), (rows, key.shape[1]))
