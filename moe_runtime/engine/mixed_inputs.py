"""Inputs of a step in the mixed form: one buffer of int32 that the host fills and one copy takes to the device.

Its sizes are a step's own, or a graph's, of which a step fills a part. The rest is inert: tokens, positions and slots
of -1, tiles of no tokens. Sequences' blocks come last, so that no more of them travel than there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moe_runtime.comm.gpu_exchange import StepShape
from moe_runtime.engine.step_plan import StepPlan
from moe_runtime.kernels.attention import BLOCK_SIZE
from moe_runtime.kernels.attention_tiles import make_row_tiles
from moe_runtime.kernels.gpu_schedules import GpuSchedules
from moe_runtime.kernels.prefill_attention_triton import RowSchedule
from moe_runtime.layers.cuda_decoder import MixedInput, RowTiles

__all__ = ["MixedLayout", "StepTiles"]

MANY_ROWS_FROM = 4
"""Tokens of a sequence in a step from which its tiles are the tall ones."""

_Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiles:
    """Tiles of attention for a step: low ones of its short sequences, tall ones of the others.

    Attributes:
        schedules: Of the tall ones and of the low ones.
        groups: Query heads of a key-value head.
    """

    schedules: tuple[RowSchedule, RowSchedule]
    groups: int

    @classmethod
    def of(cls, table: GpuSchedules, groups: int) -> StepTiles:
        """By the device's table."""
        return cls(schedules=(table.attention_rows(few=False), table.attention_rows(few=True)), groups=groups)

    def make(self, lens: Sequence[int], starts: Sequence[int]) -> tuple[_Int32s, _Int32s]:
        """``[num_tiles, 4]`` int32 of each schedule, of a step's sequences."""
        many = [i for i, length in enumerate(lens) if length >= MANY_ROWS_FROM]
        few = [i for i, length in enumerate(lens) if length < MANY_ROWS_FROM]
        tall, low = (
            make_row_tiles(
                lens, starts, num_groups=self.groups, block_rows=schedule.block_rows, sequences=which
            )
            for schedule, which in zip(self.schedules, (many, few), strict=True)
        )
        return tall, low

    def most(self, num_tokens: int, num_seqs: int) -> tuple[int, int]:
        """The most tiles of each schedule that a step of so many tokens and sequences can have."""
        tall, low = (schedule.block_rows // self.groups for schedule in self.schedules)
        most_many = min(num_seqs, num_tokens // MANY_ROWS_FROM)
        most_few = min(num_seqs, num_tokens)
        per_sequence = -(-(MANY_ROWS_FROM - 1) // low)
        return num_tokens // tall + most_many, min(num_tokens, most_few * per_sequence)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedLayout:
    """Where everything stands in the buffer.

    Attributes:
        num_tokens: T.
        num_seqs: Sequences there is room for.
        max_blocks: Of a sequence.
        num_tiles: Of each schedule of ``StepTiles``.
    """

    num_tokens: int
    num_seqs: int
    max_blocks: int
    num_tiles: tuple[int, int]

    @property
    def sizes(self) -> list[int]:
        """Slots (int64, first where they are aligned), token ids, slots of unknown tokens, positions, the number of
        tokens, tiles of both kinds, blocks."""
        t = self.num_tokens
        tall, low = self.num_tiles
        return [2 * t, t, t, t, 1, 4 * tall, 4 * low, self.num_seqs * self.max_blocks]

    def size(self, num_seqs: int) -> int:
        """Elements with the blocks of so many sequences."""
        return sum(self.sizes[:-1]) + num_seqs * self.max_blocks

    def fill(
        self, host: _Int32s, plan: StepPlan, slots: Sequence[int], tiles: tuple[_Int32s, _Int32s]
    ) -> None:
        """Write a step's inputs.

        Args:
            host: Of ``size(sequences of the plan)``; written whole.
            plan: Of the group's step.
            slots: Where each sequence's newest token is kept where the plan does not know it, else -1.
            tiles: From ``StepTiles.make``.
        """
        num_tokens, num_seqs = len(plan.token_ids), len(plan.query_lens)
        mapping, token_ids, row_slots, positions, count, tall, low, table = np.split(
            host, np.cumsum(self.sizes[:-1])
        )
        for part in (mapping, token_ids, row_slots, positions, table):
            part.fill(-1)
        slot_mapping, table = mapping.view(np.int64), table.reshape(num_seqs, self.max_blocks)
        count[0] = num_tokens
        token_ids[:num_tokens] = plan.token_ids
        at = 0
        for i, (length, start) in enumerate(zip(plan.query_lens, plan.start_positions, strict=True)):
            span = slice(at, at + length)
            row_slots[at + length - 1] = slots[i]
            positions[span] = np.arange(start, start + length)
            blocks = np.asarray(plan.block_tables[i], dtype=np.int64)
            where = positions[span].astype(np.int64)
            slot_mapping[span] = blocks[where // BLOCK_SIZE] * BLOCK_SIZE + where % BLOCK_SIZE
            table[i, : len(blocks)] = blocks
            at += length
        for part, own in zip((tall, low), tiles, strict=True):
            part[: own.size] = own.reshape(-1)
            part[own.size :] = 0

    def make_inert(self, device: torch.Tensor) -> None:
        """Make a buffer on the device a step of no tokens."""
        device[: self.size(self.num_seqs)].fill_(-1)
        for part in torch.split(device[: self.size(self.num_seqs)], self.sizes)[4:7]:
            part.zero_()

    def unknown_tokens(self, device: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T]`` int32 each: token ids as the host knows them, and the slots of those that it does not know."""
        parts = torch.split(device[: self.size(self.num_seqs)], self.sizes)
        return parts[1], parts[2]

    def inputs(
        self, device: torch.Tensor, token_ids: torch.Tensor, shape: StepShape, tiles: StepTiles
    ) -> MixedInput:
        """The step on the device.

        Args:
            device: The buffer's copy there.
            token_ids: ``[T]`` int32, all known.
            shape: Of the step.
            tiles: Whose schedules run.
        """
        parts: Any = torch.split(device[: self.size(self.num_seqs)], self.sizes)
        return MixedInput(
            shape=shape,
            token_ids=token_ids,
            positions=parts[3],
            slot_mapping=parts[0].view(torch.int64),
            num_tokens=parts[4],
            block_table=parts[7].view(self.num_seqs, self.max_blocks),
            tiles=[
                RowTiles(schedule=schedule, tiles=part.view(-1, 4))
                for schedule, part in zip(tiles.schedules, parts[5:7], strict=True)
            ],
        )
