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
from moe_runtime.kernels.logit_rules import apply_rules
from moe_runtime.kernels.sampling import RowSampling, sample
from moe_runtime.kernels.schedules import Control, active_control
from moe_runtime.kernels.softmax import log_softmax, top_logprobs
from moe_runtime.layers.decoder import Decoder

__all__ = ["ScoredRow", "num_logprobs", "row_sampling", "score_rows", "share_logits"]

ROWS_PER_SLICE = 128


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """A row's token, the prompt's own or the chosen one, and its logprobs where asked for."""

    token_id: int
    logprobs: TokenLogprobs | None


def score_rows(decoder: Decoder, hidden: torch.Tensor, rows: SequenceOf[LogitsRow]) -> list[ScoredRow]:
    """Choose or score a token for each row.

    Args:
        decoder: Its head gives the logits.
        hidden: ``[T, hidden]`` of the step.
        rows: Rows wanted.
    """
    scored: list[ScoredRow] = []
    slices = _logits_slices(decoder, hidden, [row.token_idx for row in rows])
    for i, logits in enumerate(slices):
        part = rows[i * ROWS_PER_SLICE : (i + 1) * ROWS_PER_SLICE]
        token_ids = _choose(logits, part)
        scored.extend(_with_logprobs(logits, part, token_ids))
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


def _choose(logits: torch.Tensor, rows: SequenceOf[LogitsRow]) -> list[int]:
    token_ids = [0] * len(rows)
    free: list[int] = []
    for i, row in enumerate(rows):
        sequence = row.sequence
        if row.prompt_position is not None:
            token_ids[i] = sequence.token_ids[row.prompt_position]
        elif sequence.params.forced_token_ids is not None:
            token_ids[i] = sequence.params.forced_token_ids[sequence.num_output_tokens]
        else:
            free.append(i)
    if free:
        chosen = sample(_with_rules(logits, rows, free), [row_sampling(rows[i], i) for i in free])
        for i, token_id in zip(free, chosen, strict=True):
            token_ids[i] = token_id
    return token_ids


def _with_rules(logits: torch.Tensor, rows: SequenceOf[LogitsRow], which: list[int]) -> torch.Tensor:
    """Logits of some rows, those with rules for their next token by these rules."""
    result = logits[torch.tensor(which)]
    rules = batch_rules({at: rows[i].sequence.rules for at, i in enumerate(which)})
    if rules:
        index = torch.tensor(list(rules))
        last_ids = [rows[which[at]].sequence.token_ids[-1] for at in rules]
        result[index] = apply_rules(result[index], list(rules.values()), last_ids)
    return result


def row_sampling(row: LogitsRow, row_idx: int) -> RowSampling:
    """How a row's token is sampled; ``row_idx`` matters under a control alone."""
    sequence = row.sequence
    position = sequence.num_tokens
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
    logits: torch.Tensor, rows: SequenceOf[LogitsRow], token_ids: SequenceOf[int]
) -> list[ScoredRow]:
    num_top = [num_logprobs(row) for row in rows]
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
