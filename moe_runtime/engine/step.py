"""The step vector: one small exchange per step from which every rank derives all sizes and all common decisions.

Ranks run in lockstep. Each offers a vector; all see all vectors. Nobody waits inside a collective for long: when no
rank has tokens and all have seen the same message epoch, the ranks stop stepping together and sleep on their sockets.
Epochs make that safe. The front end sends every rank something for each epoch, so if one rank saw a later message than
another, their epochs differ and the ranks exchange again instead of sleeping; once they agree, a later message has a
later epoch and wakes everyone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_runtime.comm.groups import RankGroup

__all__ = ["StepVector", "StepView", "exchange_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepVector:
    """What a rank says about the step to come.

    Attributes:
        num_tokens: Tokens it will run.
        num_mixed_tokens: Those of them that a decode step cannot run (``ScheduledChunk.is_decode``).
        num_unfinished: Sequences waiting or running, before the step.
        epoch: Latest message epoch it has seen.
        drain: 1 when it has been told to leave once nothing is left.
    """

    num_tokens: int = 0
    num_mixed_tokens: int = 0
    num_unfinished: int = 0
    epoch: int = 0
    drain: int = 0


@dataclass(frozen=True, slots=True)
class StepView:
    """All ranks' vectors, in rank order; the same on every rank."""

    vectors: tuple[StepVector, ...]

    @property
    def tokens_per_rank(self) -> tuple[int, ...]:
        """Tokens of every rank."""
        return tuple(v.num_tokens for v in self.vectors)

    @property
    def is_decode(self) -> bool:
        """Every token of every rank is the newest of a sequence that goes on: all ranks run the decode form."""
        return not any(v.num_mixed_tokens for v in self.vectors)

    @property
    def is_empty(self) -> bool:
        """No rank has a token to run."""
        return not any(self.tokens_per_rank)

    @property
    def may_sleep(self) -> bool:
        """Nothing to do anywhere and no message that some rank has not seen."""
        return not any(v.num_unfinished for v in self.vectors) and len({v.epoch for v in self.vectors}) == 1

    @property
    def may_leave(self) -> bool:
        """All ranks drain and nothing is left."""
        return all(v.drain for v in self.vectors) and self.may_sleep


def exchange_step(vector: StepVector, group: RankGroup) -> StepView:
    """Share the step vector; a collective of all ranks."""
    mine = torch.tensor(
        [vector.num_tokens, vector.num_mixed_tokens, vector.num_unfinished, vector.epoch, vector.drain]
    )
    rows = group.all_gather(mine).tolist()
    return StepView(
        tuple(
            StepVector(num_tokens=a, num_mixed_tokens=b, num_unfinished=c, epoch=d, drain=e)
            for a, b, c, d, e in rows
        )
    )
