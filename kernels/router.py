"""Routing: fp32 logits, ranks, weights, CPU.

Numerics: logits are the 8-part GEMM of kernels/gemm.py in fp32. Experts are ranked by logit, lowest id on exact ties,
before any softmax; slots are in that order. The softmax over all experts and the renormalisation over the chosen ones
(added in slot order) are fp32; nothing is rounded below.
"""

from __future__ import annotations

import torch

from moe_runtime.kernels.gemm import PackedWeight, linear_fp32

__all__ = ["route", "route_reference", "router_logits"]


def router_logits(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """``[num_tokens, num_experts]`` float32 from ``x`` ``[num_tokens, hidden]`` in the model dtype."""
    return linear_fp32(x, weight)


def route(logits: torch.Tensor, num_topk: int, norm_topk_prob: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's experts and their weights.

    Args:
        logits: ``[num_tokens, num_experts]`` float32.
        num_topk: Experts per token, K.
        norm_topk_prob: Divide the chosen weights by their sum.

    Returns:
        topk_idx ``[num_tokens, K]`` int64 logical expert ids in slot order, and topk_weights ``[num_tokens, K]``
        float32. A token's result does not depend on the other tokens.
    """
    topk_idx = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :num_topk]
    shifted = torch.exp(logits - logits.max(-1, keepdim=True).values).contiguous()
    probabilities = shifted / shifted.sum(-1, keepdim=True)
    topk_weights = torch.gather(probabilities, 1, topk_idx)
    if norm_topk_prob:
        total = topk_weights[:, 0]
        for slot in range(1, num_topk):
            total = total + topk_weights[:, slot]
        topk_weights = topk_weights / total[:, None]
    return topk_idx.contiguous(), topk_weights.contiguous()


def route_reference(
    logits: torch.Tensor, num_topk: int, norm_topk_prob: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, token by token in Python and fp64 weights."""
    ids = torch.empty(logits.shape[0], num_topk, dtype=torch.int64)
    weights = torch.empty(logits.shape[0], num_topk, dtype=torch.float64)
    for token, row in enumerate(logits.tolist()):
        ranked = sorted(range(len(row)), key=lambda expert: (-row[expert], expert))[:num_topk]
        ids[token] = torch.tensor(ranked)
        chosen = torch.softmax(torch.tensor(row, dtype=torch.float64), 0)[ids[token]]
        weights[token] = chosen / chosen.sum() if norm_topk_prob else chosen
    return ids, weights
