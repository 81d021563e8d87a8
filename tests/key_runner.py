"""A device without numbers for an engine: it holds which tokens, of whom, each place of a block was computed from.

A block's place holds a *key*, the hash of all tokens up to it. A row makes its key from the one before it as the block
has it, and the runner compares it with that of the sequence's own tokens; what a row chooses follows from its key, its
rules and the noise of its position. A second device runs what a follower would be sent. Beside its key each place has a
*tag*, the salt under which and the flush after which it may be found; a row checks keys and tags of all places that it
reads.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from moe_runtime.engine.batch import plan_step, wanted_rows
from moe_runtime.engine.messages import TokenLogprobs
from moe_runtime.engine.request import SamplingParams
from moe_runtime.engine.routed_experts import RoutedExperts
from moe_runtime.engine.runner import LaunchedStep, Runner
from moe_runtime.engine.sampler import ScoredRow
from moe_runtime.engine.sequence import UNKNOWN_TOKEN, Sequence
from moe_runtime.engine.step_plan import StepPlan
from moe_runtime.kernels.attention import BLOCK_SIZE
from moe_runtime.kernels.logit_rules import RowRules, apply_rules

__all__ = ["VOCAB", "KeyRunner", "chosen_after", "keys_of", "logprobs_of", "next_key", "routing_of"]

VOCAB = 24


def next_key(key: int, token_id: int) -> int:
    return hash((key, token_id))


def keys_of(token_ids) -> list[int]:
    keys, key = [], 1
    for token_id in token_ids:
        key = next_key(key, token_id)
        keys.append(key)
    return keys


def chosen_after(
    key: int, position: int, params: SamplingParams, seed: int, rules: RowRules | None, last: int
):
    """The token at ``position``: logits from the key, with ties; noise by seed and position; rules as they are."""
    noise = 0 if params.temperature == 0 else hash((seed, position))
    values = [hash((key, noise, v)) % 50 for v in range(VOCAB)]
    if rules is None:
        return values.index(max(values))
    logits = apply_rules(torch.tensor([values], dtype=torch.float32), [rules], [last])
    best = logits.max()
    assert best > -torch.inf, "a row without a token to choose"
    return int((logits[0] == best).nonzero()[0])


def logprobs_of(key: int, token_id: int) -> TokenLogprobs:
    return TokenLogprobs(float(hash((key, token_id)) % 10007))


def routing_of(keys) -> RoutedExperts:
    return RoutedExperts("uint8", (len(keys), 1, 1), bytes(key % 251 for key in keys))


class Device:
    """Blocks of keys."""

    def __init__(self, num_blocks: int) -> None:
        self.content: list[list[int | None]] = [[None] * BLOCK_SIZE for _ in range(num_blocks)]

    def run(self, plan: StepPlan) -> list[int]:
        """Write the keys of a step's tokens, each made from the one before it as the block has it; returns them."""
        keys, at = [], 0
        for start, length, table in zip(
            plan.start_positions, plan.query_lens, plan.block_tables, strict=True
        ):
            for position in range(start, start + length):
                before = self.content[table[(position - 1) // BLOCK_SIZE]][(position - 1) % BLOCK_SIZE]
                key = next_key(before if position else 1, plan.token_ids[at])
                self.content[table[position // BLOCK_SIZE]][position % BLOCK_SIZE] = key
                keys.append(key)
                at += 1
        return keys


class KeyRunner(Runner):
    """Runs steps on the devices and checks what they read."""

    def __init__(self, num_blocks: int, *, overlaps: bool) -> None:
        self.overlaps = overlaps
        self.devices = Device(num_blocks), Device(num_blocks)
        self.tags: list[list[object]] = [[None] * BLOCK_SIZE for _ in range(num_blocks)]
        self.last_token: dict[Sequence, int] = {}
        self.keys: dict[Sequence, list[int]] = {}
        self.expert_load: Any = SimpleNamespace(before_step=lambda view: None)
        self.counted: Counter[tuple[Sequence, int, int]] = Counter()
        self.last_rows: list[tuple[Sequence, int, int]] = []
        self.last_has_drafts = False
        self.num_unknown = self.num_masked_drafts = self.num_ended = 0

    def launch(self, chunks, tokens_per_rank, *, is_decode):
        rows = wanted_rows(chunks)
        plan = plan_step(chunks, rows)
        assert StepPlan.unpack(plan.pack()) == plan
        plan = replace(plan, token_ids=self._resolve(chunks, plan.token_ids))
        true_keys = [key for chunk in chunks for key in self._true_keys(chunk)]
        if is_decode:  # each row reads what came before the step, in no order
            for chunk in chunks:
                self._read(chunk.sequence, chunk.sequence.num_computed_tokens)
        first, second = self.devices
        found = first.run(plan)
        assert second.run(StepPlan.unpack(plan.pack())) == found
        for chunk in chunks:
            self._tag(chunk)
        for chunk in chunks:
            self._read(chunk.sequence, chunk.sequence.num_computed_tokens + chunk.num_known_tokens)
        assert found == true_keys, "a row has read what another sequence, or a wrong draft, has left"
        places = [
            (chunk.sequence, chunk.sequence.num_computed_tokens + i)
            for chunk in chunks
            for i in range(chunk.num_tokens)
        ]
        self.last_rows = [(s, p, key) for (s, p), key in zip(places, found, strict=True)]
        self.counted.update(self.last_rows)
        self.last_has_drafts = plan.has_drafts
        self.num_masked_drafts += sum(len(c.draft_ids) for c in chunks if c.sequence.grammar is not None)
        results = [self._result(row, found[row.token_idx], plan.token_ids[row.token_idx]) for row in rows]
        routed = [key for s, _, key in self.last_rows if s.params.return_routed_experts]
        return LaunchedStep(rows, lambda: results, (lambda: routing_of(routed)) if routed else None)

    def uncount(self, token_idx):
        if not self.last_has_drafts:
            self.num_ended += len(token_idx)
        self.counted.subtract([self.last_rows[i] for i in token_idx])

    def follow(self, plan, tokens_per_rank, *, is_decode):
        raise AssertionError("the second device follows in launch")

    def _resolve(self, chunks, token_ids) -> list[int]:
        resolved, at = list(token_ids), 0
        for chunk in chunks:
            for i in range(at, at + chunk.num_tokens):
                if resolved[i] == UNKNOWN_TOKEN:
                    assert chunk.sequence.grammar is None, "its mask follows from the token"
                    resolved[i] = self.last_token[chunk.sequence]
                    self.num_unknown += 1
            at += chunk.num_tokens
        return resolved

    def _true_keys(self, chunk) -> list[int]:
        """By the sequence's tokens, wherever they are."""
        sequence = chunk.sequence
        keys = self.keys.setdefault(sequence, [])
        for token_id in sequence.token_ids[len(keys) : sequence.num_computed_tokens + chunk.num_known_tokens]:
            known = self.last_token[sequence] if token_id == UNKNOWN_TOKEN else token_id
            keys.append(next_key(keys[-1] if keys else 1, known))
        own = keys[: sequence.num_computed_tokens + chunk.num_known_tokens]
        for token_id in chunk.draft_ids:
            own.append(next_key(own[-1], token_id))
        return own[sequence.num_computed_tokens :]

    def _tag(self, chunk) -> None:
        sequence, tag = chunk.sequence, tag_of(chunk.sequence)
        for position in range(sequence.num_computed_tokens, sequence.num_computed_tokens + chunk.num_tokens):
            self.tags[sequence.block_ids[position // BLOCK_SIZE]][position % BLOCK_SIZE] = tag

    def _read(self, sequence: Sequence, num_tokens: int) -> None:
        tag, keys = tag_of(sequence), self.keys[sequence]
        for block_idx, first in enumerate(range(0, num_tokens, BLOCK_SIZE)):
            own = keys[first : min(first + BLOCK_SIZE, num_tokens)]
            block = sequence.block_ids[block_idx]
            is_own = self.devices[0].content[block][: len(own)] == own
            is_own &= self.tags[block][: len(own)] == [tag] * len(own)
            assert is_own, f"block {block_idx} of {sequence.request_id} is another's"

    def _result(self, row, key: int, last_id: int) -> ScoredRow:
        sequence = row.sequence
        if row.prompt_position is not None:
            token_id = sequence.token_ids[row.prompt_position]
            return ScoredRow(token_id, logprobs_of(key, token_id))
        forced = sequence.params.forced_token_ids
        if forced is not None:
            token_id = forced[sequence.num_output_tokens]
        else:
            token_id = chosen_after(key, row.position, sequence.params, sequence.seed, row.rules, last_id)
        if not row.is_verify:
            self.last_token[sequence] = token_id
        return ScoredRow(token_id, None if sequence.params.logprobs is None else logprobs_of(key, token_id))


def tag_of(sequence: Sequence) -> object:
    """Who may read what this sequence writes."""
    params = sequence.params
    whose: object = params.cache_salt if params.cache_prompt else ("nobody", sequence.arrival_idx)
    return whose, sequence.cache_era
