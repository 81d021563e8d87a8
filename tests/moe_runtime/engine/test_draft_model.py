"""Drafts of a small model: its view of a sequence follows the sequence, and bits stay those of the large one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from moe_runtime.comm.groups import RankGroup
from moe_runtime.engine.config import EngineConfig
from moe_runtime.engine.draft_model import plan_draft
from moe_runtime.engine.llm import LLM
from moe_runtime.engine.model_loader import plan_model
from moe_runtime.engine.request import make_request
from tests.checkpoints import tiny_config, write_checkpoint
from tests.mixed_requests import bits, mixed_params, random_prompts
from tests.ranks import RankContext

LENGTHS = (5, 64, 63, 130, 1)
PROMPTS = random_prompts(1, LENGTHS)
PARAMS = mixed_params(len(LENGTHS), 16)
LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "kv_cache_blocks": 24}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    write_checkpoint(root / "large", tiny_config("qwen3_moe"))
    write_checkpoint(root / "other", tiny_config("mixtral", num_hidden_layers=1, max_position_embeddings=80))
    write_checkpoint(root / "words", tiny_config("mixtral", vocab_size=96))
    return root


@pytest.fixture(scope="module")
def plain(root):
    return generate(LLM(str(root / "large"), **LIMITS))


def generate(llm: LLM):
    return [bits(output) for output in llm.generate(PROMPTS, PARAMS)]


def with_draft(root, name: str, **options: Any) -> LLM:
    options = LIMITS | {"num_speculative_tokens": 4} | options
    return LLM(str(root / "large"), speculative="draft", draft_model=str(root / name), **options)


@pytest.fixture(scope="module")
def same(root):
    """The large model drafts for itself."""
    return with_draft(root, "large")


def test_a_model_that_drafts_for_itself_is_always_right_also_where_it_samples(same, plain):
    assert generate(same) == plain
    stats = same.engine.stats().speculation
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 40
    assert same.engine.num_steps < 8


def test_a_model_of_another_architecture_and_shorter_context_changes_no_bit(root, plain):
    llm = with_draft(root, "other")
    proposer = llm.engine.speculation.proposer
    assert proposer.max_model_len == 80
    assert generate(llm) == plain
    stats = llm.engine.stats().speculation
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert llm.engine.scheduler.blocks.num_free_blocks == 24
    # The blocks of ended sequences are free when there is something to draft again.
    llm.generate([PROMPTS[0]], replace(PARAMS[0], max_tokens=3))
    assert proposer.blocks.num_free_blocks >= 23


def test_a_long_prompt_is_caught_up_step_by_step(same, plain):
    same.reconfigure(max_num_batched_tokens=24)
    assert generate(same) == plain
    assert same.engine.stats().speculation.num_accepted_tokens > 0


def test_preempted_sequences_are_drafted_for_again(same, plain):
    same.reconfigure(**LIMITS | {"kv_cache_blocks": 3})
    assert generate(same) == plain
    stats = same.engine.stats()
    assert stats.num_preemptions > 0
    assert stats.speculation.num_accepted_tokens == stats.speculation.num_draft_tokens > 0


def test_what_it_has_computed_follows_the_sequence_s_tokens(same):
    same.reconfigure(**LIMITS)
    engine, proposer = same.engine, same.engine.speculation.proposer
    engine.add_request(make_request("a", PROMPTS[0], replace(PARAMS[1], max_tokens=40), same.limits))
    engine.step()
    (sequence,) = engine.scheduler.running
    first = proposer.propose([(sequence, 5)])
    assert proposer.propose([(sequence, 3)]) == [first[0][:3]], "asked again, the same"
    mirror, _ = proposer._mirrors[sequence]
    before = list(sequence.token_ids)
    sequence.token_ids += [first[0][0], (first[0][1] + 1) % 128]
    other = proposer.propose([(sequence, 4)])[0]
    # The same from nothing: what was computed for tokens that did not come is not used.
    proposer.blocks.free(proposer._mirrors.pop(sequence)[0])
    assert proposer.propose([(sequence, 4)])[0] == other
    assert mirror.token_ids[: len(before) + 2] == sequence.token_ids
    sequence.token_ids[:] = before
    engine.abort_all()
    assert sequence.is_finished
    engine.add_request(make_request("b", PROMPTS[1], PARAMS[1], same.limits))
    engine.step()
    proposer.propose([(engine.scheduler.running[0], 1)])
    assert list(proposer._mirrors) == engine.scheduler.running
    engine.abort_all()


def test_room_is_taken_from_sequences_that_want_no_drafts(same):
    same.reconfigure(**LIMITS | {"kv_cache_blocks": 5})
    engine, proposer = same.engine, same.engine.speculation.proposer
    for name, prompt in (("a", PROMPTS[3]), ("b", PROMPTS[1])):
        engine.add_request(make_request(name, prompt, PARAMS[1], same.limits))
    engine.step()
    long, short = engine.scheduler.running
    assert [len(d) for d in proposer.propose([(long, 2), (short, 2)])] == [2, 2]
    assert proposer.blocks.num_free_blocks == 0
    # A sequence past what the cache holds gets none.
    short.token_ids += [1] * 64
    assert [len(d) for d in proposer.propose([(short, 2)])] == [2], "the long one's blocks are taken"
    short.token_ids += [1] * 300
    assert proposer.propose([(short, 2)]) == [()]
    del short.token_ids[65:]
    engine.abort_all()


def test_another_vocabulary_is_refused(root):
    with pytest.raises(ValueError, match=r"vocabulary of 96 ids; must have the model's 128"):
        with_draft(root, "words")


def test_no_draft_model_has_no_plan(root):
    config = EngineConfig(model=str(root / "large"), speculative="ngram")
    assert plan_draft(plan_model(config), config) is None


def on_a_rank(context: RankContext, folder: str, draft: str) -> Any:
    group = RankGroup(rank=context.rank, size=context.world_size, process_group=context.process_group)
    llm = LLM(folder, group=group, tp=2, speculative="draft", draft_model=draft, **LIMITS)
    return generate(llm), llm.engine.stats().speculation


def test_the_first_rank_of_a_group_drafts_alone(ranks: Callable[..., list[Any]], root, plain):
    (first, drafts), (second, none) = ranks(2, on_a_rank, str(root / "large"), str(root / "large"))
    assert first == second == plain
    assert drafts.num_accepted_tokens == drafts.num_draft_tokens > 0
    assert none is None
