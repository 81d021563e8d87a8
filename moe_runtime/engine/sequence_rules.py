"""A request's rules for logits, at any point of one of its sequences.

What holds for the next token is computed from the tokens so far each time; no counter is kept, so a sequence that was
preempted and resumed, or planned before its last token is known, has the same rules as any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np

from moe_runtime.engine.request import Request
from moe_runtime.kernels.logit_rules import NO_IDS, RowRules
from moe_runtime.kernels.schedules import Control, active_control

__all__ = ["SequenceRules", "batch_rules"]


class SequenceRules:
    """Rules of a request that has some.

    Args:
        request: The validated request.
    """

    def __init__(self, request: Request) -> None:
        params = request.params
        self._num_prompt_tokens = len(request.prompt_ids)
        self._repetition_penalty = params.repetition_penalty
        self._frequency_penalty = params.frequency_penalty
        self._presence_penalty = params.presence_penalty
        has_repetition = params.repetition_penalty != 1
        self._has_penalty = has_repetition or params.frequency_penalty != 0 or params.presence_penalty != 0
        self._prompt_ids = _distinct(request.prompt_ids) if has_repetition else NO_IDS
        bias = sorted((params.logit_bias or {}).items())
        self._bias_ids = np.array([token_id for token_id, _ in bias], dtype=np.int32)
        self._bias = np.array([value for _, value in bias], dtype=np.float32)
        self._allowed_ids = None if params.allowed_token_ids is None else _distinct(params.allowed_token_ids)
        self._min_tokens = params.min_tokens
        self._ending_ids = request.ending_ids
        self._bad_token_ids = request.bad_token_ids

    @classmethod
    def of(cls, request: Request) -> SequenceRules | None:
        """Rules of a request; None where it has none, or where its output is given."""
        params = request.params
        has_rules = (
            params.repetition_penalty != 1
            or params.frequency_penalty != 0
            or params.presence_penalty != 0
            or params.logit_bias
            or params.allowed_token_ids is not None
            or request.bad_token_ids
            or request.ending_ids
        )
        return cls(request) if has_rules and params.forced_token_ids is None else None

    @property
    def has_masks(self) -> bool:
        """Whether some token may be forbidden somewhere in the output; penalties and bias forbid none."""
        return self._allowed_ids is not None or bool(self._ending_ids or self._bad_token_ids)

    def after(self, token_ids: list[int]) -> RowRules | None:
        """Rules for the token that follows ``token_ids``; None where none applies.

        Args:
            token_ids: Prompt and output so far; the last one may be ``UNKNOWN_TOKEN``, which the device fills in.
        """
        output = token_ids[self._num_prompt_tokens :]
        output_ids = np.array(output, dtype=np.int32) if self._has_penalty else NO_IDS
        banned = [(token_id, -1) for token_id in self._ending_ids] if len(output) < self._min_tokens else []
        banned += [ban for ids in self._bad_token_ids if (ban := _ban(ids, output)) is not None]
        if not (
            len(output_ids)
            or len(self._prompt_ids)
            or len(self._bias_ids)
            or self._allowed_ids is not None
            or banned
        ):
            return None
        return RowRules(
            repetition_penalty=self._repetition_penalty,
            frequency_penalty=self._frequency_penalty,
            presence_penalty=self._presence_penalty,
            prompt_ids=self._prompt_ids,
            output_ids=output_ids,
            bias_ids=self._bias_ids,
            bias=self._bias,
            allowed_ids=self._allowed_ids,
            banned_ids=np.array([token_id for token_id, _ in banned], dtype=np.int32),
            banned_after=np.array([after for _, after in banned], dtype=np.int32),
        )


def batch_rules(rules: Mapping[int, RowRules | None]) -> dict[int, RowRules]:
    """Rules of the rows of a batch that have some; each row's are its own, but under a control.

    Args:
        rules: By row.
    """
    own = {row: rule for row, rule in rules.items() if rule is not None}
    if active_control() is Control.SHIFTED_MASKS:
        rows = [row for row, rule in own.items() if rule.allowed_mask is not None]
        masks = [own[row].allowed_mask for row in rows]
        for row, mask in zip(rows, masks[1:] + masks[:1], strict=True):
            own[row] = replace(own[row], allowed_mask=mask)
    return own


def _ban(ids: tuple[int, ...], output: list[int]) -> tuple[int, int] | None:
    """The token that would complete ``ids``, and the last token after which it would, -1 for the one that is there."""
    *before, last = ids
    if not before:
        return last, -1
    if len(before) > len(output) or output[len(output) - len(before) : -1] != before[:-1]:
        return None
    if output[-1] < 0:
        return last, before[-1]
    return (last, -1) if output[-1] == before[-1] else None


def _distinct(ids: SequenceOf[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.unique(np.array(ids, dtype=np.int32))
