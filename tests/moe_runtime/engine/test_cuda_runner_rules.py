"""Requests with rules on the GPU engine: the definition's tokens, in any company, overlapped or not.

Without a GPU every kernel runs in Triton's interpreter, without graphs; outputs are therefore few and short.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_runtime.engine import cuda_runner
from moe_runtime.engine import llm as llm_module
from moe_runtime.engine.grammar import GrammarMask
from moe_runtime.engine.grammar_threads import GrammarThreads
from moe_runtime.engine.request import SamplingParams, make_request
from moe_runtime.engine.sequence import Sequence
from moe_runtime.engine.structured_outputs import StructuredOutputs
from moe_runtime.kernels import logit_rules
from moe_runtime.kernels.schedules import Control, control
from tests.gpu_engine import gpu_llm, gpu_logits, write_gpu_checkpoint

NUM_TOKENS = 4
PLAIN = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, seed=0, logprobs=2)
RULED = replace(
    PLAIN,
    repetition_penalty=1.6,
    frequency_penalty=0.9,
    presence_penalty=0.5,
    logit_bias={7: 1.0, 9: -3.0},
    allowed_token_ids=tuple(range(0, 96, 3)),
)
FEW = replace(PLAIN, frequency_penalty=2.0, allowed_token_ids=(11, 45))
SEEDED = replace(RULED, temperature=0.8, seed=12, top_p=0.9)
PROMPTS = [[5, 17, 80, 5], [33, 2], [60, 61, 62], [9]]
PARAMS = [RULED, PLAIN, SEEDED, FEW]
LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "kv_cache_blocks": 8}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return gpu_llm(write_gpu_checkpoint(tmp_path_factory.mktemp("gpu"), num_hidden_layers=1), **LIMITS)


@pytest.fixture(scope="module")
def reference(llm):
    """What each request gives in one batch."""
    return run(llm, range(4))


def run(llm, which):
    results = llm.generate([PROMPTS[i] for i in which], [PARAMS[i] for i in which])
    return {i: result.outputs[0] for i, result in zip(which, results, strict=True)}


def best_tokens(llm, request, output) -> list[int]:
    """What follows each beginning of a greedy output, from the logits of one prompt and the CPU's rules."""
    ids = [*request.prompt_ids, *output]
    logits = gpu_logits(llm, ids).cpu()
    found = []
    for end in range(len(request.prompt_ids), len(ids)):
        sequence = Sequence(request, 0, 0)
        sequence.token_ids = ids[:end]
        row, rules = logits[end - 1 : end], sequence.rules_after()
        if rules is not None:
            row = logit_rules.apply_rules(row, [rules], [ids[end - 1]])
        found.append(int(row.argmax()))
    return found


@pytest.mark.parametrize("which", [0, 3])
def test_tokens_are_those_of_the_definition(llm, reference, which):
    request = make_request("r", PROMPTS[which], PARAMS[which], llm.limits)
    output = list(reference[which].token_ids)
    assert best_tokens(llm, request, output) == output
    assert best_tokens(llm, replace(request, params=PLAIN), output) != output


def test_company_place_and_chunks_change_nothing(llm, reference):
    assert run(llm, [3, 2, 1, 0]) == reference
    assert run(llm, [1]) == {1: reference[1]}
    llm.reconfigure(max_num_seqs=2, max_num_batched_tokens=3)
    try:
        assert run(llm, [0]) == {0: reference[0]}
    finally:
        llm.reconfigure(**LIMITS)


def test_steps_that_do_not_overlap_and_rows_in_slices_give_the_same(llm, reference, monkeypatch):
    assert llm.engine.runner.overlaps
    monkeypatch.setattr(llm.engine.runner, "overlaps", False)
    monkeypatch.setattr(cuda_runner, "RULED_ROWS", 2)
    assert run(llm, range(4)) == reference


def test_bad_words_follow_a_last_token_that_the_host_does_not_know(llm, reference, monkeypatch):
    free = reference[1].token_ids
    words = ((free[0], free[1]), (free[1], free[0], free[2]))

    def with_words(*arguments, **options):
        return replace(make_request(*arguments, **options), bad_token_ids=words)

    monkeypatch.setattr(llm_module, "make_request", with_words)  # the checkpoint has no tokenizer
    kept = run(llm, [1])[1].token_ids
    assert best_tokens(llm, with_words("r", PROMPTS[1], PLAIN, llm.limits), kept) == list(kept)
    assert (kept[0], kept[1] == free[1]) == (free[0], False)

    # Control: a device that does not read the last token does not see the word.
    plain = cuda_runner.apply_rules
    monkeypatch.setattr(
        cuda_runner, "apply_rules", lambda logits, rows, last: plain(logits, rows, torch.full_like(last, -9))
    )
    assert run(llm, [1]) == {1: reference[1]}


class StubMatcher:
    """Allows twelve tokens, which depend on the tokens so far."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def consume(self, token_id: int) -> None:
        assert token_id in self.allowed()
        self.ids.append(token_id)

    def allowed(self) -> list[int]:
        return [(sum(self.ids) + 7 * i + 3) % 96 for i in range(12)]

    def mask(self) -> GrammarMask:
        words = np.zeros(3, dtype=np.int32)
        for i in self.allowed():
            words.view(np.uint32)[i // 32] |= np.uint32(1 << i % 32)
        return GrammarMask(words, may_end=False)


class StubCompiler:
    def normalise(self, wanted) -> str:
        return "stub"

    def matcher(self, text) -> StubMatcher:
        return StubMatcher()


def test_grammar_masks_are_those_of_the_definition_beside_rows_that_overlap(llm, reference, monkeypatch):
    threads = GrammarThreads(StubCompiler, 96)
    monkeypatch.setattr(llm, "_grammars", threads)
    monkeypatch.setattr(llm.engine, "grammars", threads)
    form = StructuredOutputs(regex="a")
    masked = [
        replace(PLAIN, structured_outputs=form, max_tokens=2),
        replace(
            SEEDED, structured_outputs=form, max_tokens=2, allowed_token_ids=None
        ),  # both would leave nothing
    ]

    def outputs(prompts, params):
        return [result.outputs[0] for result in llm.generate(prompts, params)]

    (alone,) = outputs(PROMPTS[:1], masked[:1])
    # The greedy one takes the best of what is allowed.
    request = make_request("r", PROMPTS[0], PLAIN, llm.limits)
    logits = gpu_logits(llm, [*request.prompt_ids, *alone.token_ids]).cpu()
    matcher = StubMatcher()
    for place, token_id in enumerate(alone.token_ids, len(request.prompt_ids) - 1):
        allowed = sorted(matcher.allowed())
        assert token_id == allowed[int(logits[place, allowed].argmax())]
        matcher.consume(token_id)
    assert llm.engine.runner.overlaps
    first, second, plain = outputs([*PROMPTS[:2], PROMPTS[1]], [*masked, PARAMS[1]])
    assert (first, plain) == (alone, reference[1])
    matcher = StubMatcher()
    for token_id in second.token_ids:
        matcher.consume(token_id)
    with control(Control.SHIFTED_MASKS):
        assert outputs(PROMPTS[:2], masked)[0] != alone
    threads.close()
