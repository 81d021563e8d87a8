"""The requests of the check."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from moe_runtime.verify.prompts import Case, PromptSource

SOURCE = PromptSource(seed=7, vocab_size=100, context=1024, max_tokens=50)


def test_lengths_are_normal_around_a_quarter_of_the_context() -> None:
    lengths = [len(case.prompt_ids) for case in SOURCE.random_cases(400)]
    assert statistics.mean(lengths) == pytest.approx(256, abs=15)
    assert statistics.stdev(lengths) == pytest.approx(102.4, abs=12)
    assert min(lengths) >= 1
    assert max(lengths) <= 1024 - 50


def test_lengths_are_clipped_to_the_context() -> None:
    source = replace(SOURCE, context=54)
    cases = source.random_cases(50) + source.mixed_cases() + source.prefix_cases() + source.single_cases()
    assert {1, 4} <= {len(case.prompt_ids) for case in cases}
    assert max(len(case.prompt_ids) for case in cases) == 4


def test_prompts_that_begin_alike_end_around_blocks() -> None:
    cases = SOURCE.cached_cases(64)
    longest = max((c for c in cases if "other" not in c.name), key=lambda c: len(c.prompt_ids)).prompt_ids
    alike = [c for c in cases if c.prompt_ids[:63] == longest[:63]]
    assert len(alike) == len(cases) - 2
    assert {"greedy", "seeded"} == {c.name.split()[-1].removesuffix(",") for c in cases if not c.num_scored}
    for case in cases:
        assert len(case.prompt_ids) + case.num_output_tokens * (not case.num_scored) <= 1024
        if case.num_scored:
            assert case.num_scored == len(case.prompt_ids) - 1
            assert case.shortened(1) == case.forced([5]) == case
    tiny = replace(SOURCE, context=54).cached_cases(64)
    assert max(len(case.prompt_ids) for case in tiny) == 4


def test_a_case_can_be_another_tenant_s_or_computed_whole() -> None:
    (case,) = SOURCE.random_cases(1)
    assert case.salted("a").params == replace(case.params, cache_salt="a")
    assert case.uncached().params == replace(case.params, cache_prompt=False)
    assert case.salted("a").name == case.uncached().name == case.name


def test_prompts_depend_on_the_seed_alone() -> None:
    same = PromptSource(seed=7, vocab_size=100, context=1024, max_tokens=50)
    other = replace(SOURCE, seed=8)
    assert same.random_cases(5) == SOURCE.random_cases(5)
    assert SOURCE.random_cases(9)[:5] == SOURCE.random_cases(5)
    assert other.random_cases(5) != SOURCE.random_cases(5)
    # Pinned: a digest is comparable only as long as prompts stay what they are.
    assert SOURCE.random_cases(2)[1].prompt_ids[:4] == (87, 21, 11, 95)


def test_greedy_and_seeded_take_turns_or_both_run() -> None:
    cases = SOURCE.random_cases(4)
    assert [case.params.temperature == 0 for case in cases] == [True, False, True, False]
    assert len({case.params.seed for case in cases[1::2]}) == 2
    both = SOURCE.random_cases(4, both=True)
    assert len(both) == 8
    assert all(case in both for case in cases)
    assert all(case.params.ignore_eos and case.params.logprobs == 5 for case in both)


def test_prefixes_are_prefixes_and_meet_block_edges() -> None:
    cases = sorted(SOURCE.prefix_cases(), key=lambda case: len(case.prompt_ids))
    longest = cases[-1].prompt_ids
    assert all(longest[: len(case.prompt_ids)] == case.prompt_ids for case in cases)
    assert {1, 63, 64, 65, 255, 256, 257, 512} <= {len(case.prompt_ids) for case in cases}


def test_mixed_prompts_are_short_and_long() -> None:
    lengths = [len(case.prompt_ids) for case in SOURCE.mixed_cases()]
    assert sum(length <= 8 for length in lengths) == 8
    assert sum(length >= 512 for length in lengths) == 4


def test_every_other_pair_of_mixed_prompts_has_rules() -> None:
    ruled = [case.params.repetition_penalty != 1 for case in SOURCE.mixed_cases()]
    assert ruled == [False, False, True, True] * 3
    greedy = [case.params.temperature == 0 for case in SOURCE.mixed_cases()]
    assert greedy == [True, False] * 6


def test_names_are_unique() -> None:
    cases = SOURCE.random_cases(9, both=True) + SOURCE.mixed_cases() + SOURCE.prefix_cases()
    cases += SOURCE.single_cases()
    assert len({case.name for case in cases}) == len(cases)


def test_shuffle_is_a_permutation_given_by_its_name() -> None:
    cases = SOURCE.random_cases(20)
    order = SOURCE.shuffle("a", cases)
    assert order != cases
    assert sorted(case.name for case in order) == sorted(case.name for case in cases)
    assert SOURCE.shuffle("a", cases) == order != SOURCE.shuffle("b", cases)
    assert set(SOURCE.integers("x", 50, 3)) == {0, 1, 2}


def test_forms_of_a_case() -> None:
    case: Case = SOURCE.random_cases(1)[0]
    assert (case.num_output_tokens, case.is_forced) == (50, False)
    assert case.shortened(8).num_output_tokens == 8
    assert case.shortened(80).num_output_tokens == 50
    forced = case.forced([1, 2, 3])
    assert (forced.num_output_tokens, forced.is_forced, forced.prompt_ids) == (3, True, case.prompt_ids)
    scored = case.scored([1, 2])
    assert (scored.num_output_tokens, scored.is_forced) == (2, True)
    assert scored.prompt_ids == (*case.prompt_ids, 1, 2)
    assert {c.name for c in (case, forced, scored)} == {case.name}


def test_repetitive_prompts_repeat_a_phrase_and_one_of_them_has_rules() -> None:
    cases = PromptSource(seed=3, vocab_size=50, context=1024, max_tokens=50).repetitive_cases()
    assert len({case.name for case in cases}) == len(cases) == 3
    for case in cases:
        assert len(case.prompt_ids) == 128
        assert case.prompt_ids[5:] == case.prompt_ids[:-5]
    assert [case.params.temperature for case in cases] == [0.0, 0.8, 0.8]
    assert [case.params.repetition_penalty for case in cases] == [1.0, 1.0, 1.3]
