"""The MLP of a layer: dense, or a mixture of experts spread over the expert-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from moe_runtime.comm.base import SummingDispatcher
from moe_runtime.comm.tensor_parallel import TensorParallel
from moe_runtime.kernels.activation import swiglu
from moe_runtime.kernels.gemm import PARTS, linear, pack_weight
from moe_runtime.kernels.grouped_gemm import PackedExpert, expert_rows
from moe_runtime.kernels.replicas import Replicas
from moe_runtime.kernels.router import route, router_logits
from moe_runtime.layers.row_parallel import Level, RowParallel, shard_width

__all__ = ["DenseMLP", "MoE", "pack_expert"]


def pack_expert(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> PackedExpert:
    """Pack one expert from ``[out, in]`` checkpoint tensors."""
    return PackedExpert(
        gate_up=pack_weight(torch.cat([gate, up]), PARTS["expert"]), down=pack_weight(down, PARTS["expert"])
    )


class DenseMLP:
    """``down(silu(gate(x)) * up(x))`` over the tokens of a tensor-parallel group, by default of one rank.

    Each rank holds its share of the intermediate features; those that pad the last share are zero, and stay zero.

    Args:
        read: Gives the layer's tensor of a role.
        dtype: Model dtype.
        tensor_parallel: The group; all its ranks call the layer with the same tokens.
        level: Invariance level.
    """

    def __init__(
        self,
        read: Callable[[str], torch.Tensor],
        dtype: torch.dtype,
        tensor_parallel: TensorParallel | None = None,
        level: Level = "topology",
    ) -> None:
        tp = tensor_parallel or TensorParallel()
        shares = [_share(read(role), tp) for role in ("gate_proj", "up_proj")]
        self.gate_up = pack_weight(torch.cat(shares), PARTS["column"])
        self.down = RowParallel(read("down_proj"), dtype, tp, level)
        self.dtype = dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, hidden]`` to ``[T, hidden]`` in the model dtype."""
        return self.down(swiglu(linear(x, self.gate_up, self.dtype)))


class MoE:
    """Router on the home rank, experts wherever they are placed, the sum as the dispatcher makes it.

    Args:
        router: ``[num_experts, hidden]`` router weight.
        experts: This rank's physical experts; a move of experts exchanges some between steps.
        replicas: Where every logical expert's copies are.
        dispatcher: Moves rows; every rank takes part for every layer.
        num_topk: Experts per token.
        norm_topk_prob: Renormalise the chosen weights.
    """

    def __init__(
        self,
        router: torch.Tensor,
        experts: list[PackedExpert],
        replicas: Replicas,
        dispatcher: SummingDispatcher,
        num_topk: int,
        norm_topk_prob: bool,
    ) -> None:
        self.router = pack_weight(router, PARTS["router"])
        self.experts = experts
        self.replicas = replicas
        self.dispatcher = dispatcher
        self.num_topk = num_topk
        self.norm_topk_prob = norm_topk_prob

    def __call__(self, x: torch.Tensor, tokens_per_rank: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer; a collective of all ranks, with zero tokens too.

        Args:
            x: ``[T, hidden]`` in the model dtype, tokens whose home is this rank.
            tokens_per_rank: T of every rank.

        Returns:
            ``[T, hidden]`` in the model dtype, and the logical experts ``[T, K]`` int64 chosen.
        """
        logits = router_logits(x, self.router)
        topk_idx, topk_weights = route(logits, self.num_topk, self.norm_topk_prob)
        physical_idx = self.replicas.physical(topk_idx, logits)
        received = self.dispatcher.dispatch(x, physical_idx, topk_weights, tokens_per_rank)
        rows = expert_rows(
            received.x_ep_local,
            received.pairs.row,
            received.pairs.local_expert,
            received.weights,
            self.experts,
        )
        return self.dispatcher.combine_sum(rows, received), topk_idx


def _share(weight: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """The rank's rows of ``[N, K]``, padded with zeros to the width of a share."""
    width = shard_width(weight.shape[0], tp.size)
    share = weight[tp.rank * width : (tp.rank + 1) * width]
    return torch.nn.functional.pad(share, (0, 0, 0, width - share.shape[0]))
