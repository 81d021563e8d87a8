"""From scheduled chunks to the tensors of a step, and which rows of its logits are wanted for what."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from moe_runtime.engine.scheduler import ScheduledChunk
from moe_runtime.engine.sequence import Sequence
from moe_runtime.engine.step_plan import StepPlan
from moe_runtime.kernels.attention import BLOCK_SIZE, make_attention_plan
from moe_runtime.kernels.logit_rules import RowRules
from moe_runtime.layers.decoder import ForwardInput

__all__ = [
    "LogitsRow",
    "StepBatch",
    "forward_input",
    "make_batch",
    "plan_step",
    "routed_token_idx",
    "wanted_rows",
]


@dataclass(frozen=True, slots=True)
class LogitsRow:
    """A token of the step whose logits are wanted.

    Attributes:
        token_idx: Row of the step's hidden states.
        sequence: Whose token it is.
        prompt_position: Prompt token that the row scores, or None where the row chooses the next token.
        draft_ids: Drafts between the sequence's last token and the one that the row chooses; its choice counts only if
            they are what the rows before it chose (engine/speculative.py).
        is_verify: Whether other rows of the step choose tokens of the same sequence.
    """

    token_idx: int
    sequence: Sequence
    prompt_position: int | None
    draft_ids: tuple[int, ...] = ()
    is_verify: bool = False

    @property
    def position(self) -> int:
        """Absolute position of the token that the row chooses."""
        return self.sequence.num_tokens + len(self.draft_ids)

    @property
    def rules(self) -> RowRules | None:
        """What to do to the row's logits, as if its drafts were part of the sequence; None for nothing."""
        return self.sequence.rules_after(self.draft_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """This rank's share of a step."""

    forward: ForwardInput
    rows: list[LogitsRow]


def make_batch(
    chunks: SequenceOf[ScheduledChunk], tokens_per_rank: SequenceOf[int], num_groups: int
) -> StepBatch:
    """Build a rank's tensors.

    Args:
        chunks: From the scheduler; may be empty.
        tokens_per_rank: Tokens whose home is each rank, in the step.
        num_groups: Query heads per key-value head.
    """
    rows = wanted_rows(chunks)
    return StepBatch(forward=forward_input(plan_step(chunks, rows), tokens_per_rank, num_groups), rows=rows)


def plan_step(chunks: SequenceOf[ScheduledChunk], rows: SequenceOf[LogitsRow]) -> StepPlan:
    """The step in integers.

    Args:
        chunks: From the scheduler; may be empty.
        rows: Their wanted rows.
    """
    token_ids: list[int] = []
    for chunk in chunks:
        start = chunk.sequence.num_computed_tokens
        token_ids.extend(chunk.sequence.token_ids[start : start + chunk.num_known_tokens])
        token_ids.extend(chunk.draft_ids)
    return StepPlan(
        token_ids=token_ids,
        query_lens=[chunk.num_tokens for chunk in chunks],
        start_positions=[chunk.sequence.num_computed_tokens for chunk in chunks],
        block_tables=[chunk.sequence.block_ids for chunk in chunks],
        row_token_idx=[row.token_idx for row in rows],
        wants_routing=any(chunk.sequence.params.return_routed_experts for chunk in chunks),
        has_drafts=any(chunk.draft_ids for chunk in chunks),
    )


def forward_input(plan: StepPlan, tokens_per_rank: SequenceOf[int], num_groups: int) -> ForwardInput:
    """A rank's tensors; arguments as for ``make_batch``."""
    positions: list[int] = []
    slots: list[int] = []
    for query_len, start, table in zip(plan.query_lens, plan.start_positions, plan.block_tables, strict=True):
        places = range(start, start + query_len)
        positions.extend(places)
        slots.extend(table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in places)
    attention = None
    if plan.query_lens:
        attention = make_attention_plan(plan.query_lens, plan.start_positions, plan.block_tables, num_groups)
    return ForwardInput(
        token_ids=torch.tensor(plan.token_ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        attention=attention,
        tokens_per_rank=tokens_per_rank,
    )


def wanted_rows(chunks: SequenceOf[ScheduledChunk]) -> list[LogitsRow]:
    """Tokens of a step whose logits are wanted, in the order of its tokens."""
    rows: list[LogitsRow] = []
    first_token_idx = 0
    for chunk in chunks:
        sequence = chunk.sequence
        if sequence.wants_prompt_logprobs:
            rows += _scoring_rows(chunk, first_token_idx)
        if chunk.reaches_end and sequence.max_tokens > 0:
            last_token_idx, drafts = first_token_idx + chunk.num_known_tokens - 1, chunk.draft_ids
            rows += [
                LogitsRow(last_token_idx + i, sequence, None, drafts[:i], bool(drafts))
                for i in range(len(drafts) + 1)
            ]
        first_token_idx += chunk.num_tokens
    return rows


def routed_token_idx(chunks: SequenceOf[ScheduledChunk]) -> list[int]:
    """Tokens of a step whose experts are wanted, in order."""
    wanted: list[int] = []
    first_token_idx = 0
    for chunk in chunks:
        if chunk.sequence.params.return_routed_experts:
            wanted.extend(range(first_token_idx, first_token_idx + chunk.num_tokens))
        first_token_idx += chunk.num_tokens
    return wanted


def _scoring_rows(chunk: ScheduledChunk, first_token_idx: int) -> list[LogitsRow]:
    """The token at position p - 1 scores the prompt token p; those scored before a preemption are kept."""
    sequence, start = chunk.sequence, chunk.sequence.num_computed_tokens
    first = max(len(sequence.prompt_logprobs), start + 1, 1)
    last = min(start + chunk.num_known_tokens, sequence.num_prompt_tokens - 1)
    return [LogitsRow(first_token_idx + p - 1 - start, sequence, p) for p in range(first, last + 1)]
