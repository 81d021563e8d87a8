"""A rank's flags in memory that its peers write, and the count of its steps, which says what a flag is worth."""

from __future__ import annotations

import torch

from moe_runtime.comm.symmetric_memory import SymmetricBuffer, SymmetricSpace
from moe_runtime.kernels.peer_flags_triton import PeerFlags, count_step

__all__ = ["StepFlags"]


class StepFlags:
    """For what a rank's kernels do together with its peers', step by step.

    Attributes:
        peers: For kernels.
        count: ``[2]`` int32: the step's number, 0 where no peer takes part, and how many there were.
        live: ``[1]`` int32: 1 where peers take part in steps, 0 where kernels run and neither raise a flag nor wait.

    Args:
        space: Whose rank it is.
        words: ``[num_channels, size]`` int32 of the space.
        live: Peers take part.
    """

    def __init__(self, space: SymmetricSpace, words: SymmetricBuffer, *, live: bool = True) -> None:
        device = space.region.device
        self.count = torch.zeros(2, dtype=torch.int32, device=device)
        self.live = torch.full((1,), int(live), dtype=torch.int32, device=device)
        self.peers = PeerFlags(
            words=words.local, offsets=words.offsets, step=self.count[:1], rank=space.rank, size=space.size
        )

    def begin_step(self, *, pdl: bool = False) -> None:
        """Count a step, on the device."""
        count_step(self.count, self.live, pdl=pdl)
