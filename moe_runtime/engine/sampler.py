"""From rows of hidden states to chosen tokens and returned logprobs.

Logprobs are those of the raw fp32 log-softmax, from one function for prompt and output tokens, before penalties, bias,
masks and temperature. Rows go through the head in slices so that logits never need much memory; slicing changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from moe_runtime.engine.batch import LogitsRow
from moe_runtime.engine.messages import TokenLogprobs
from moe_runtime.engine.sequence_rules import batch_rules
from moe_runtime.kernels.logit_rules import RowRules, apply_rules
from moe_runtime.kernels.sampling import RowSampling, sample
from moe_runtime.kernels.schedules import Control, active_control
from moe_runtime.kernels.softmax import log_softmax, top_logprobs
from moe_runtime.layers.decoder import Decoder

__all__ = [
    "RowChoice",
    "ScoredRow",
    "given_token",
    "num_logprobs",
    "plan_choices",
    "row_sampling",
    "score_rows",
    "share_logits",
]

ROWS_PER_SLICE = 128


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """A row's token, the prompt's own or the chosen one, and its logprobs where asked for."""

    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class RowChoice:
    """What a row's logits are for, as the host knows it when the step is planned; sequences go on before it runs.

    Attributes:
        token_idx: Row of the step's hidden states.
        given: The token where it is not chosen here: the prompt's own, or a forced one.
        sampling: How it is chosen; None where it is given.
        rules: For the logits that choose it; None for none. Follow from tokens before the row's own, which the step
            knows.
        num_logprobs: As ``num_logprobs``.
    """

    token_idx: int
    given: int | None
    sampling: RowSampling | None
    rules: RowRules | None
    num_logprobs: int | None


def plan_choices(rows: SequenceOf[LogitsRow]) -> list[RowChoice]:
    """One per row, from its sequence as it is before the step."""
    choices = []
    for i, row in enumerate(rows):
        given = given_token(row)
        is_free = given is None
        choices.append(
            RowChoice(
                token_idx=row.token_idx,
                given=given,
                sampling=row_sampling(row, i) if is_free else None,
                rules=row.rules if is_free else None,
                num_logprobs=num_logprobs(row),
            )
        )
    return choices


def score_rows(
    decoder: Decoder, hidden: torch.Tensor, choices: SequenceOf[RowChoice], token_ids: torch.Tensor
) -> list[ScoredRow]:
    """Choose or score a token for each row.

    Args:
        decoder: Its head gives the logits.
        hidden: ``[T, hidden]`` of the step.
        choices: Of the rows wanted.
        token_ids: ``[T]`` int64, the step's tokens, all of them known.
    """
    scored: list[ScoredRow] = []
    slices = _logits_slices(decoder, hidden, [choice.token_idx for choice in choices])
    for i, logits in enumerate(slices):
        part = choices[i * ROWS_PER_SLICE : (i + 1) * ROWS_PER_SLICE]
        chosen = _choose(logits, part, token_ids)
        scored.extend(_with_logprobs(logits, part, chosen))
    return scored


def share_logits(decoder: Decoder, hidden: torch.Tensor, row_token_idx: SequenceOf[int]) -> None:
    """Give the group's first rank, which calls ``score_rows`` for the same rows, this rank's share of their logits."""
    for _ in _logits_slices(decoder, hidden, row_token_idx):
        pass


def _logits_slices(
    decoder: Decoder, hidden: torch.Tensor, row_token_idx: SequenceOf[int]
) -> Iterator[torch.Tensor]:
    for first in range(0, len(row_token_idx), ROWS_PER_SLICE):
        yield decoder.logits(hidden[torch.tensor(row_token_idx[first : first + ROWS_PER_SLICE])])


def _choose(logits: torch.Tensor, choices: SequenceOf[RowChoice], token_ids: torch.Tensor) -> list[int]:
    chosen = [choice.given for choice in choices]
    free = [(i, choice.sampling) for i, choice in enumerate(choices) if choice.sampling is not None]
    if free:
        which = [i for i, _ in free]
        tokens = sample(_with_rules(logits, choices, which, token_ids), [sampling for _, sampling in free])
        for i, token_id in zip(which, tokens, strict=True):
            chosen[i] = token_id
    return [token_id for token_id in chosen if token_id is not None]


def _with_rules(
    logits: torch.Tensor, choices: SequenceOf[RowChoice], which: list[int], token_ids: torch.Tensor
) -> torch.Tensor:
    """Logits of some rows, those with rules for their next token by these rules."""
    result = logits[torch.tensor(which)]
    rules = batch_rules({at: choices[i].rules for at, i in enumerate(which)})
    if rules:
        index = torch.tensor(list(rules))
        last_ids = token_ids[torch.tensor([choices[which[at]].token_idx for at in rules])].tolist()
        result[index] = apply_rules(result[index], list(rules.values()), last_ids)
    return result


def given_token(row: LogitsRow) -> int | None:
    """The token that a row scores or is forced to choose; None where it is free."""
    sequence = row.sequence
    if row.prompt_position is not None:
        return sequence.token_ids[row.prompt_position]
    forced = sequence.params.forced_token_ids
    return None if forced is None else forced[sequence.num_output_tokens]


def row_sampling(row: LogitsRow, row_idx: int) -> RowSampling:
    """How a row's token is sampled; ``row_idx`` matters under a control alone."""
    sequence = row.sequence
    position = row.position
    if active_control() is Control.BATCH_NOISE:
        position += row_idx
    params = sequence.params
    return RowSampling(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=sequence.seed,
        position=position,
    )


def _with_logprobs(
    logits: torch.Tensor, choices: SequenceOf[RowChoice], token_ids: SequenceOf[int]
) -> list[ScoredRow]:
    num_top = [choice.num_logprobs for choice in choices]
    wanted = [i for i, num in enumerate(num_top) if num is not None]
    entries: dict[int, TokenLogprobs] = {}
    if wanted:
        wanted_logits = logits[torch.tensor(wanted)]
        logprobs = log_softmax(wanted_logits)
        own = logprobs.gather(1, torch.tensor([[token_ids[i]] for i in wanted])).squeeze(1).tolist()
        most = max(num_top[i] or 0 for i in wanted)
        top_ids: list[list[int]] = [[]] * len(wanted)
        top_values: list[list[float]] = [[]] * len(wanted)
        if most:
            ids, values = top_logprobs(wanted_logits, logprobs, most)
            top_ids, top_values = ids.tolist(), values.tolist()
        for i, logprob, ids_i, values_i in zip(wanted, own, top_ids, top_values, strict=True):
            num = num_top[i] or 0
            entries[i] = TokenLogprobs(logprob, tuple(ids_i[:num]), tuple(values_i[:num]))
    return [ScoredRow(token_id, entries.get(i)) for i, token_id in enumerate(token_ids)]


def num_logprobs(row: LogitsRow) -> int | None:
    """Alternatives to return with a row's token; None for no logprobs."""
    params = row.sequence.params
    return params.logprobs if row.prompt_position is None else params.prompt_logprobs
