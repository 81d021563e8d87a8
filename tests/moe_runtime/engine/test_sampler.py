"""score_rows: each row's token and logprobs by itself, whatever the slices and the other rows want."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.engine import sampler
from moe_runtime.engine.batch import LogitsRow
from moe_runtime.engine.request import Request, SamplingParams
from moe_runtime.engine.sampler import ScoredRow, plan_choices, row_sampling, score_rows
from moe_runtime.engine.sequence import UNKNOWN_TOKEN, Sequence
from moe_runtime.kernels.logit_rules import apply_rules_reference
from moe_runtime.kernels.sampling import RowSampling, sample_row
from moe_runtime.kernels.schedules import Control, control
from moe_runtime.kernels.softmax import log_softmax
from moe_runtime.layers.embedding import LMHead
from tests.bits import hostile

VOCAB, HIDDEN = 130, 32


class Head:
    """A decoder as far as the sampler knows it."""

    def __init__(self) -> None:
        self.head = LMHead(hostile("normal", (VOCAB, HIDDEN), seed=1))
        self.num_calls = 0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return self.head(hidden)


def row(token_idx: int, prompt_position: int | None = None, **params) -> LogitsRow:
    params = {"seed": token_idx, "max_tokens": 50} | params
    prompt = tuple((token_idx + i) % VOCAB for i in range(20))
    request = Request(request_id=str(token_idx), prompt_ids=prompt, params=SamplingParams(**params))
    return LogitsRow(token_idx, Sequence(request, 0, token_idx), prompt_position)


def score(head, hidden: torch.Tensor, rows: list[LogitsRow]) -> list[ScoredRow]:
    token_ids = torch.zeros(hidden.shape[0], dtype=torch.int64)
    for r in rows:
        token_ids[r.token_idx] = r.sequence.token_ids[-1]
    return score_rows(head, hidden, plan_choices(rows), token_ids)


def mixed_rows(num_rows: int) -> list[LogitsRow]:
    kinds = [
        {"temperature": 0, "logprobs": 3},
        {"logprobs": 0},
        {},
        {"prompt_position": 5, "prompt_logprobs": 2, "logprobs": 7},
        {"temperature": 0.7, "top_p": 0.5, "top_k": 9, "min_p": 0.01, "logprobs": 20},
        {"forced_token_ids": (77, 78), "logprobs": 1},
    ]
    return [row(i, **kinds[i % len(kinds)]) for i in range(num_rows)]


@pytest.mark.parametrize("num_rows", [1, 6, 127, 128, 129, 300])
def test_a_row_is_scored_as_it_is_alone(num_rows):
    hidden, head = hostile("normal", (num_rows, HIDDEN), seed=2) / 8, Head()  # flat enough to sample from
    rows = mixed_rows(num_rows)
    together = score(head, hidden, rows)
    assert together == [score(head, hidden, [r])[0] for r in rows]
    backwards = score(head, hidden, rows[::-1])
    assert backwards[::-1] == together


def test_logits_are_made_in_slices():
    hidden, head = hostile("normal", (300, HIDDEN), seed=3), Head()
    score(head, hidden, mixed_rows(300))
    assert head.num_calls == -(-300 // sampler.ROWS_PER_SLICE)
    assert score(head, hidden, []) == []


def test_tokens_and_logprobs_are_those_of_the_definition():
    hidden, head = hostile("normal", (36, HIDDEN), seed=4) / 8, Head()
    rows = mixed_rows(36)
    logits = head.logits(hidden)
    logprobs = log_softmax(logits)
    for i, (r, scored) in enumerate(zip(rows, score(head, hidden, rows), strict=True)):
        params = r.sequence.params
        if r.prompt_position is not None:
            expected, num_top = r.sequence.token_ids[r.prompt_position], params.prompt_logprobs
        elif params.forced_token_ids is not None:
            expected, num_top = params.forced_token_ids[0], params.logprobs
        else:
            settings = RowSampling(
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                min_p=params.min_p,
                seed=i,
                position=20,
            )
            expected, num_top = sample_row(logits[i], settings), params.logprobs
        assert scored.token_id == expected
        if num_top is None:
            assert scored.logprobs is None
            continue
        assert scored.logprobs.logprob == logprobs[i, expected].item()
        ranked = sorted(range(VOCAB), key=lambda t, i=i: (-logits[i, t].item(), t))[:num_top]
        assert list(scored.logprobs.top_ids) == ranked
        assert list(scored.logprobs.top_logprobs) == logprobs[i, ranked].tolist()


def test_the_greedy_token_is_the_first_alternative_of_a_flat_row():
    class Flat:
        """Equal logits but one, an ulp above."""

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            logits = torch.full((hidden.shape[0], VOCAB), 0.125)
            logits[:, 77] = torch.nextafter(torch.tensor(0.125), torch.tensor(1.0))
            return logits

    logprobs = log_softmax(Flat().logits(torch.zeros(1, HIDDEN)))
    assert logprobs[0, 77] == logprobs[0, 0]
    [scored] = score(Flat(), torch.zeros(1, HIDDEN), [row(0, temperature=0, logprobs=3)])
    assert scored.token_id == 77
    assert scored.logprobs.top_ids == (77, 0, 1)
    assert scored.logprobs.top_logprobs == (scored.logprobs.logprob,) * 3


def test_rows_with_rules_are_chosen_by_the_definition_and_leave_the_others_alone():
    hidden, head = hostile("normal", (12, HIDDEN), seed=6) / 8, Head()
    rules = {"repetition_penalty": 3.0, "frequency_penalty": 0.5, "logit_bias": {9: 2.0}}
    kinds = [{"temperature": 0, **rules}, {}, {"temperature": 0.8, "allowed_token_ids": (3, 70, 99)}, rules]
    rows = [row(i, **kinds[i % len(kinds)], logprobs=2) for i in range(12)]
    for r in rows:
        r.sequence.token_ids += [5, 9, 5]
    scored = score(head, hidden, rows)
    logits = head.logits(hidden)
    for i, r in enumerate(rows):
        rule, values = r.sequence.rules_after(), logits[i : i + 1]
        assert (rule is None) == (i % 4 == 1)
        if rule is not None:
            values = apply_rules_reference(values, [rule], [5])
        assert scored[i].token_id == sample_row(values[0], row_sampling(r, i))
        assert scored[i].logprobs.logprob == log_softmax(logits)[i, scored[i].token_id].item()
    assert scored == [score(head, hidden, [r])[0] for r in rows]
    bare = [row(i, **{k: v for k, v in kinds[i % 4].items() if k == "temperature"}) for i in range(12)]
    for r in bare:
        r.sequence.token_ids += [5, 9, 5]
    free = [s.token_id for s in score(head, hidden, bare)]
    assert [s.token_id for s in scored][1::4] == free[1::4]
    assert [s.token_id for s in scored] != free


def test_forced_tokens_follow_each_other():
    hidden, head = hostile("normal", (1, HIDDEN), seed=5), Head()
    r = row(0, forced_token_ids=(77, 78))
    assert score(head, hidden, [r])[0].token_id == 77
    r.sequence.token_ids.append(77)
    assert score(head, hidden, [r])[0].token_id == 78


def test_noise_follows_the_position_in_the_sequence():
    hidden, head = torch.zeros(1, HIDDEN), Head()
    r, chosen = row(0, temperature=1.0), []
    for _ in range(12):
        chosen.append(score(head, hidden, [r])[0].token_id)
        r.sequence.token_ids.append(0)
    assert len(set(chosen)) > 6


def test_control_noise_by_place_in_the_batch_changes_tokens():
    hidden, head = torch.zeros(20, HIDDEN), Head()
    rows = [row(i, seed=3) for i in range(20)]
    assert len({s.token_id for s in score(head, hidden, rows)}) == 1
    with control(Control.BATCH_NOISE):
        assert len({s.token_id for s in score(head, hidden, rows)}) > 1


def test_choices_are_of_the_moment_at_which_they_were_planned():
    """The engine moves sequences on while a step runs; what is not known yet is the step's own last token."""
    hidden, head = hostile("normal", (6, HIDDEN), seed=7) / 8, Head()
    kinds = [
        {"temperature": 0.9},
        {"frequency_penalty": 5.0, "temperature": 0},
        {"forced_token_ids": (7, 8, 9)},
    ]
    rows = [row(i, **kinds[i % 3], logprobs=1) for i in range(6)]
    for r in rows:
        r.sequence.token_ids.append(5)
    expected = score(head, hidden, rows)
    for r in rows:
        r.sequence.token_ids[-1] = UNKNOWN_TOKEN
    choices = plan_choices(rows)
    for r in rows:
        r.sequence.token_ids += [1, 2]
    assert score_rows(head, hidden, choices, torch.full((6,), 5)) == expected
    late = score_rows(head, hidden, plan_choices(rows[:2]), torch.full((6,), 5))
    assert late != expected[:2], "control: planned later they are other choices"
