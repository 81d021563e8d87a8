"""The dispatcher interface: tokens to the ranks that hold their experts, rows back to each token's home rank.

Numerics: a dispatcher moves bits; kernels/combine.py adds. With ``combine`` every (token, slot) row comes back
unreduced, so the sum at the home rank has one tree whatever the EP size, the placement or the transport.
``combine_sum`` is that sum, unless the dispatcher was made to pre-sum: then a rank adds the slots that it holds of a
token, and the home rank adds the ranks' partial rows (comm/multiple_reduction.py says where that is allowed). A
transport that hands out sums only is a ``SummingDispatcher``; it evaluates the same tree and proves it when it starts
(comm/sum_check.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moe_runtime.comm.layout import DispatchLayout, ExpertPairs
from moe_runtime.kernels.combine import combine_slots

__all__ = ["Dispatcher", "ReceivedRows", "SummingDispatcher"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedRows:
    """What a rank holds between dispatch and combine.

    Attributes:
        x_ep_local: ``[num_rows, hidden]`` in the model dtype, received rows (padding rows included, never read).
        pairs: The (row, local expert) pairs to compute.
        weights: ``[num_pairs]`` float32 routing weights of the pairs.
        layout: The rank's own tokens' layout, for the way back; None where the transport keeps its own.
        tokens_per_rank: Tokens of every rank in this step.
    """

    x_ep_local: torch.Tensor
    pairs: ExpertPairs
    weights: torch.Tensor
    layout: DispatchLayout | None
    tokens_per_rank: Sequence[int]


class SummingDispatcher(ABC):
    """Moves token rows to experts and the sums of their outputs back.

    For every layer every rank calls ``dispatch`` and then ``combine_sum``, with zero tokens too.
    """

    @abstractmethod
    def dispatch(
        self,
        x_dp_local: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        tokens_per_rank: Sequence[int],
    ) -> ReceivedRows:
        """Send each token once to every rank that holds one of its experts.

        Args:
            x_dp_local: ``[T, hidden]`` in the model dtype, tokens whose home is this rank.
            topk_idx: ``[T, K]`` int64 physical expert ids, -1 = masked.
            topk_weights: ``[T, K]`` float32.
            tokens_per_rank: T of every rank, from the step vector; buffer sizes follow from it.
        """

    @abstractmethod
    def combine_sum(self, rows_ep_local: torch.Tensor, received: ReceivedRows) -> torch.Tensor:
        """Bring weighted expert rows home and add them, rounded once: ``[T, hidden]`` in the model dtype.

        Args:
            rows_ep_local: ``[num_pairs, hidden]`` in the model dtype, in the order of ``received.pairs``.
            received: From ``dispatch``.
        """


class Dispatcher(SummingDispatcher):
    """One that can hand out the rows themselves: ``combine`` may be called in place of ``combine_sum``."""

    @abstractmethod
    def combine(self, rows_ep_local: torch.Tensor, received: ReceivedRows) -> torch.Tensor:
        """Bring weighted expert rows home.

        Args:
            rows_ep_local: ``[num_pairs, hidden]`` in the model dtype, in the order of ``received.pairs``.
            received: From ``dispatch``.

        Returns:
            ``[T, K, hidden]`` in the model dtype: each token's rows by slot, zero for masked slots.
        """

    def combine_sum(self, rows_ep_local: torch.Tensor, received: ReceivedRows) -> torch.Tensor:
        """See ``SummingDispatcher.combine_sum``."""
        return combine_slots(self.combine(rows_ep_local, received))
