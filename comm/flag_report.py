"""Whose flag a rank on a GPU still waits for: read by the host while the kernel spins.

A rank raises a flag and then waits for those of all others (kernels/peer_flags_triton.py). So it waits where its own
flag of a step is raised and another's is not, and the ranks that are missing there hold it up.

Example: three ranks, step 7, seen by rank 0. Words ``[[7, 7, 7], [7, 6, 7], [6, 6, 6]]``: it waits for rank 1 in
channel 1. With ``[[7, 7, 7], [6, 6, 6]]`` it waits for nobody.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from moe_runtime.kernels.peer_flags_triton import PeerFlags

__all__ = ["FlagReader", "MissingFlags", "missing_flags"]

READ_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingFlags:
    """What a rank waits for.

    Attributes:
        channel: Of the flag.
        ranks: Of the group, that have not raised it.
        step: The step's number.
    """

    channel: int
    ranks: tuple[int, ...]
    step: int


def missing_flags(words: torch.Tensor, step: int, rank: int) -> MissingFlags | None:
    """The first flag that a rank waits for; None where it waits for none, and in a step without peers.

    Args:
        words: ``[num_channels, size]`` int32 on the host, the rank's own.
        step: Its number.
        rank: Which rank.
    """
    if step == 0:
        return None
    raised = (words.long() - step + (1 << 31)) % (
        1 << 32
    ) >= 1 << 31  # by their difference: the number may have wrapped
    for channel in (raised[:, rank] & ~raised.all(1)).nonzero()[:1, 0].tolist():
        ranks = tuple((~raised[channel]).nonzero()[:, 0].tolist())
        return MissingFlags(channel=channel, ranks=ranks, step=step)
    return None


class FlagReader:
    """Reads a rank's flags beside the kernels that wait for them.

    Args:
        flags: Own flags.
        name: Of a channel's flag, for messages.
        first_rank: Rank in the world of the group's rank 0.
    """

    def __init__(self, flags: PeerFlags, name: Callable[[int], str], first_rank: int = 0) -> None:
        self._flags, self._name, self._first_rank = flags, name, first_rank
        self._stream: torch.cuda.Stream | None = None
        self._on_host = flags.words, flags.step
        if flags.words.device.type == "cuda":
            # Made now: neither can be had while the device spins.
            self._stream = torch.cuda.Stream(flags.words.device)  # type: ignore[no-untyped-call]
            self._on_host = (
                torch.empty(flags.words.shape, dtype=torch.int32, pin_memory=True),
                torch.empty(flags.step.shape, dtype=torch.int32, pin_memory=True),
            )

    def read(self) -> MissingFlags | None:
        """What the step under way waits for, as far as it can be read."""
        words, step = self._on_host
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                step.copy_(self._flags.step, non_blocking=True)
                words.copy_(self._flags.words, non_blocking=True)
                done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                done.record()
            end_s = time.monotonic() + READ_TIMEOUT_S
            while not done.query():  # type: ignore[no-untyped-call]
                if time.monotonic() > end_s:
                    return None
        return missing_flags(words, int(step), self._flags.rank)

    def reason(self) -> tuple[str, int | None]:
        """Why the step has not ended, and the rank in the world that is to blame; nothing where no flag tells."""
        missing = self.read()
        if missing is None:
            return "", None
        names = ", ".join(f"rank {self._first_rank + rank}" for rank in missing.ranks)
        flag = f"the flag of step {missing.step} that says {self._name(missing.channel)}"
        return f"{names} has not raised {flag}", self._first_rank + missing.ranks[0]
