"""From the routing buffer of a step to what a request is given: rows by token, also those of a group's other ranks.

Symbols: L layers with experts, T tokens of the group's step, T' of them at home on this rank, K slots.
"""

from __future__ import annotations

import torch

from moe_runtime.comm.tensor_parallel import TensorParallel
from moe_runtime.engine.routed_experts import RoutedExperts, routing_dtype

__all__ = ["compact_routing", "gather_routing"]


def gather_routing(routing: torch.Tensor, num_tokens: int, tp: TensorParallel) -> torch.Tensor:
    """``[T, L, K]`` int16 of all tokens, on every rank; a collective of the group, on the routing's device.

    Args:
        routing: ``[L, T', K]`` int16, of the tokens at home here.
        num_tokens: T.
        tp: The group.
    """
    rows = routing.transpose(0, 1).contiguous()
    if tp.size == 1:
        return rows
    # As bytes: gloo knows no int16.
    gathered = tp.gather_home_rows(rows.view(torch.uint8), num_tokens)
    return gathered.contiguous().view(torch.int16)


def compact_routing(rows: torch.Tensor, num_experts: int) -> RoutedExperts:
    """``[tokens, L, K]`` int16 on the host, every row a real token's, as bytes.

    Example: 300 experts, rows ``[[[7, 299]]]`` give ``uint16``, shape ``(1, 1, 2)`` and data ``07 00 2b 01``.
    """
    dtype = routing_dtype(num_experts)
    num_tokens, num_layers, num_topk = rows.shape
    data = rows.numpy().astype("<u2" if dtype == "uint16" else "u1").tobytes()
    return RoutedExperts(dtype, (num_tokens, num_layers, num_topk), data)
