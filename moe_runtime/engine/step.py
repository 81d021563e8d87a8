"""The step vector: one small exchange per step from which every rank derives all sizes and all common decisions.

Ranks run in lockstep. Each offers a vector; all see all vectors. Nobody waits inside a collective for long: when no
rank has tokens and all have seen the same message epoch, the ranks stop stepping together and sleep on their sockets.
Epochs make that safe. The front end sends every rank something for each epoch, so if one rank saw a later message than
another, their epochs differ and the ranks exchange again instead of sleeping; once they agree, a later message has a
later epoch and wakes everyone.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from moe_runtime.comm.groups import RankGroup

__all__ = ["StepVector", "StepView", "exchange_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepVector:
    """What a rank says about the step to come; the ranks of a tensor-parallel group speak through their first one.

    Attributes:
        num_tokens: Tokens it will run, with the other ranks of its group.
        num_mixed_tokens: Those of them for which it takes the mixed form (engine/step_form.py).
        num_plan_items: Length of the plan that it will send to the other ranks of its tensor-parallel group.
        num_unfinished: Sequences waiting or running, before the step.
        epoch: Latest message epoch it has seen.
        drain: 1 when it has been told to leave once nothing is left.
        move_request: Moves of experts asked for so far, on rank 0.
        flush_request: Flushes of the prefix cache asked for so far, on rank 0 (engine/cache_flush.py).
        move_stage: How far its thread is with the move of experts under way (engine/expert_mover.py); 0 for none.
    """

    num_tokens: int = 0
    num_mixed_tokens: int = 0
    num_plan_items: int = 0
    num_unfinished: int = 0
    epoch: int = 0
    drain: int = 0
    move_request: int = 0
    flush_request: int = 0
    move_stage: int = 0


@dataclass(frozen=True, slots=True)
class StepView:
    """All ranks' vectors, in rank order; the same on every rank.

    Attributes:
        vectors: Of every rank.
        tp: Ranks of a tensor-parallel group.
    """

    vectors: tuple[StepVector, ...]
    tp: int = 1

    @property
    def tokens_per_rank(self) -> tuple[int, ...]:
        """Tokens whose home is each rank: token i of a group's step is at home on the group's rank i mod tp."""
        totals = [self.vectors[first].num_tokens for first in range(0, len(self.vectors), self.tp)]
        return tuple(len(range(rank, total, self.tp)) for total in totals for rank in range(self.tp))

    @property
    def is_decode(self) -> bool:
        """No rank has tokens for the mixed form: all run the decode form."""
        return not any(v.num_mixed_tokens for v in self.vectors)

    @property
    def is_empty(self) -> bool:
        """No rank has a token to run."""
        return not any(v.num_tokens for v in self.vectors)

    @property
    def may_sleep(self) -> bool:
        """Nothing to do anywhere, no experts on their way, and no message that some rank has not seen."""
        is_busy = any(v.num_unfinished or v.move_stage for v in self.vectors)
        return not is_busy and len({v.epoch for v in self.vectors}) == 1

    @property
    def may_leave(self) -> bool:
        """All ranks drain and nothing is left."""
        return all(v.drain for v in self.vectors) and self.may_sleep


def exchange_step(vector: StepVector, group: RankGroup, tp: int = 1) -> StepView:
    """Share the step vector; a collective of all ranks.

    Args:
        vector: This rank's.
        group: All ranks.
        tp: Ranks of a tensor-parallel group.
    """
    names = [field.name for field in fields(StepVector)]
    rows = group.all_gather(torch.tensor([getattr(vector, name) for name in names])).tolist()
    return StepView(tuple(StepVector(**dict(zip(names, row, strict=True))) for row in rows), tp)
