"""Requests: every field has its rule, bad values are named and nothing else breaks, seeds of choices."""

from __future__ import annotations

import dataclasses
import math

import pytest

from moe_runtime.engine.request import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_CACHE_SALT_CHARS,
    MAX_CHOICES,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SEED_MAX,
    SEED_MIN,
    RequestLimits,
    SamplingParams,
    choice_seed,
    make_request,
    reported_seed,
    validate_prompt,
    validate_sampling,
    validate_token_ids,
)
from moe_runtime.engine.structured_outputs import StructuredOutputs
from moe_runtime.errors import InvalidRequestError

LIMITS = RequestLimits(vocab_size=100, max_model_len=64, max_kv_tokens=128, eos_token_ids=(98, 99))

GOOD = [
    {"temperature": 0},
    {"temperature": 5e-324},
    {"temperature": 100},
    {"top_p": 1e-300},
    {"top_p": 1},
    {"top_k": 0},
    {"top_k": -1},
    {"top_k": 2**63 - 1},
    {"min_p": 1.0},
    {"seed": SEED_MIN},
    {"seed": SEED_MAX},
    {"seed": None},
    {"n": MAX_CHOICES},
    {"max_tokens": 2**63 - 1},
    {"max_tokens": 0, "prompt_logprobs": 0},
    {"logprobs": 0},
    {"logprobs": MAX_LOGPROBS},
    {"stop": ("a", "b" * MAX_STOP_STRING_CHARS)},
    {"stop": ["a"]},
    {"stop_token_ids": (0, 99)},
    {"forced_token_ids": (0, 99)},
    {"min_tokens": 0},
    {"min_tokens": 5},
    *[{name: value} for name in ("presence_penalty", "frequency_penalty") for value in (-2, 0, 0.5, 2.0)],
    *[{"repetition_penalty": value} for value in (0.01, 1, 1.3, 100)],
    *[{"logit_bias": value} for value in ({}, {0: -100, 99: 100.0}, dict.fromkeys(range(100), 1))],
    {"bad_words": ("a", "b" * MAX_BAD_WORD_CHARS)},
    {"allowed_token_ids": (0, 99, 0)},
    {"allowed_token_ids": tuple(range(100))},
    {"cache_salt": "\U0001f9c2" * MAX_CACHE_SALT_CHARS, "cache_prompt": False},
    {"structured_outputs": StructuredOutputs(regex="a+")},
]
BAD = [
    *[
        ("temperature", value)
        for value in (-1e-9, 100.1, math.nan, math.inf, -math.inf, 10**400, True, "1", None)
    ],
    *[("top_p", value) for value in (0, 0.0, -0.1, 1.0001, math.nan, True, "1")],
    *[("min_p", value) for value in (-0.1, 1.1, math.nan, None)],
    *[("top_k", value) for value in (-2, 2**63, 1.0, True, "3", None)],
    *[("seed", value) for value in (2**63, 2**64, SEED_MIN - 1, 10**30, 1.5, "7", True)],
    *[("n", value) for value in (0, -1, MAX_CHOICES + 1, 100_000, 1.0, True, None)],
    *[("max_tokens", value) for value in (0, -1, 2**63, 1.5, True, "3")],
    *[("logprobs", value) for value in (-1, MAX_LOGPROBS + 1, True, 1.0)],
    *[("prompt_logprobs", value) for value in (-1, MAX_LOGPROBS + 1, True)],
    *[("stop", value) for value in ("abc", ("",), (3,), ("x" * (MAX_STOP_STRING_CHARS + 1),), 3, None)],
    ("stop", ("x",) * (MAX_STOP_STRINGS + 1)),
    *[("stop_token_ids", value) for value in (5, "5", (100,), (-1,), (1.0,), (True,), (10**12,))],
    ("stop_token_ids", (1,) * (MAX_STOP_TOKEN_IDS + 1)),
    *[("forced_token_ids", value) for value in ((), (100,), "ab", 3)],
    *[("ignore_eos", value) for value in (1, None)],
    *[("include_stop_str_in_output", value) for value in ("yes",)],
    *[("skip_special_tokens", value) for value in (0,)],
    *[("return_routed_experts", value) for value in (1, "true", None)],
    *[("min_tokens", value) for value in (-1, 2**63, 1.0, True, None, "3")],
    *[("presence_penalty", value) for value in (-2.01, 2.01, math.nan, math.inf, True, None, "1")],
    *[("frequency_penalty", value) for value in (-2.01, 2.01, math.nan, -math.inf, True, None)],
    *[("repetition_penalty", value) for value in (0, -1, 0.001, 100.1, math.nan, math.inf, True, None)],
    *[("logit_bias", {key: 1.0}) for key in (-1, 100, 10**12, "5", True, 1.0, None)],
    *[("logit_bias", {5: bias}) for bias in (-100.1, 101, math.nan, math.inf, True, "1", None)],
    *[("logit_bias", value) for value in ([], "5", 3, dict.fromkeys(range(MAX_LOGIT_BIASES + 1), 1.0))],
    *[("bad_words", value) for value in ("abc", ("",), (3,), ("x" * (MAX_BAD_WORD_CHARS + 1),), None)],
    ("bad_words", ("x",) * (MAX_BAD_WORDS + 1)),
    *[("allowed_token_ids", value) for value in ((), (100,), (-1,), "ab", 3, (True,))],
    ("allowed_token_ids", (1,) * (MAX_ALLOWED_TOKEN_IDS + 1)),
    *[("cache_prompt", value) for value in (1, "true", None)],
    *[("cache_salt", value) for value in ("", "x" * (MAX_CACHE_SALT_CHARS + 1), 5, b"x", "\ud800")],
    *[("structured_outputs", value) for value in ("a", {}, StructuredOutputs(), StructuredOutputs(regex=""))],
]


@pytest.mark.parametrize("fields", GOOD)
def test_a_value_within_its_rule_is_accepted(fields):
    validate_sampling(SamplingParams(**fields), LIMITS)


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_value_outside_its_rule_is_named(name, value):
    with pytest.raises(InvalidRequestError, match=f"{name}.* must (be|have|hold|map) ") as caught:
        validate_sampling(SamplingParams(**{name: value}), LIMITS)
    assert caught.value.param is not None
    assert caught.value.param.startswith(name)
    assert caught.value.status == 400
    assert len(caught.value.message) < 400


@pytest.mark.parametrize("name", ["temperature", "top_k", "seed", "n", "max_tokens", "logprobs"])
def test_an_integer_too_long_to_print_is_named(name):
    with pytest.raises(InvalidRequestError, match=rf"{name} \(a value of type int\) must be"):
        validate_sampling(SamplingParams(**{name: 10**5000}), LIMITS)


def test_every_field_has_a_bad_value_above():
    assert {name for name, _ in BAD} == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize("prompt", [[], (), [100], [1, -1], [True], [1.0], ["a"], "ab", None, 3, [10**12]])
def test_a_bad_prompt_is_named(prompt):
    with pytest.raises(InvalidRequestError, match=r"my_prompt") as caught:
        validate_prompt(prompt, LIMITS, param="my_prompt")
    assert caught.value.param is not None


def test_a_prompt_beyond_the_context_has_its_own_code():
    validate_prompt([1] * 64, LIMITS)
    with pytest.raises(InvalidRequestError, match="prompt has 65 tokens; the longest request") as caught:
        validate_prompt([1] * 65, LIMITS)
    assert caught.value.code == "context_length_exceeded"


def test_the_kv_cache_may_be_the_tighter_limit():
    limits = RequestLimits(vocab_size=100, max_model_len=64, max_kv_tokens=32)
    assert make_request("r", [1] * 30, SamplingParams(), limits).params.max_tokens == 2


def test_max_tokens_defaults_to_the_room_left_and_never_exceeds_it():
    assert make_request("r", [1] * 10, SamplingParams(), LIMITS).params.max_tokens == 54
    assert make_request("r", [1] * 10, SamplingParams(max_tokens=54), LIMITS).params.max_tokens == 54
    for max_tokens in (55, 2**31, 2**63 - 1):
        with pytest.raises(InvalidRequestError) as caught:
            make_request("r", [1] * 10, SamplingParams(max_tokens=max_tokens), LIMITS)
        assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")


def test_a_full_prompt_leaves_room_only_for_its_own_logprobs():
    with pytest.raises(InvalidRequestError, match="max_tokens is 0") as caught:
        make_request("r", [1] * 64, SamplingParams(), LIMITS, prompt_param="messages")
    assert caught.value.param == "messages"
    assert make_request("r", [1] * 64, SamplingParams(prompt_logprobs=1), LIMITS).params.max_tokens == 0


def test_forced_tokens_decide_the_length():
    params = SamplingParams(forced_token_ids=(1, 2, 3))
    assert make_request("r", [1], params, LIMITS).params.max_tokens == 3
    with pytest.raises(InvalidRequestError):
        make_request("r", [1] * 62, params, LIMITS)


def word_ids(word):
    """Forms of a word as its letters' places in the alphabet, after 50 with a space."""
    ids = [ord(c) - ord("a") for c in word.strip()]
    return [tuple(ids), (50, *ids)]


def test_min_tokens_fit_into_max_tokens():
    assert make_request("r", [1], SamplingParams(min_tokens=5, max_tokens=5), LIMITS).params.min_tokens == 5
    for params in (
        SamplingParams(min_tokens=6, max_tokens=5),
        SamplingParams(min_tokens=64),
        SamplingParams(min_tokens=3, forced_token_ids=(1, 2)),
    ):
        with pytest.raises(InvalidRequestError, match=r"^min_tokens \(\d+\) must be at most max_tokens") as e:
            make_request("r", [1], params, LIMITS)
        assert e.value.param == "min_tokens"


def test_ids_that_would_end_the_output_are_those_in_force():
    def ending(**fields):
        return make_request("r", [1], SamplingParams(**fields), LIMITS).ending_ids

    assert ending(min_tokens=2) == (98, 99)
    assert ending(min_tokens=2, stop_token_ids=(5, 98)) == (5, 98, 99)
    assert ending(min_tokens=2, stop_token_ids=(5,), ignore_eos=True) == (5,)
    assert ending(stop_token_ids=(5,)) == ()
    assert ending(min_tokens=2, forced_token_ids=(1, 2)) == ()


def test_bad_words_are_taken_in_all_their_forms():
    params = SamplingParams(bad_words=("ab", "ab", "c"))
    request = make_request("r", [1], params, LIMITS, bad_word_ids=word_ids)
    assert request.bad_token_ids == ((0, 1), (50, 0, 1), (2,), (50, 2))
    with pytest.raises(InvalidRequestError, match="bad_words need a tokenizer"):
        make_request("r", [1], params, LIMITS)
    with pytest.raises(InvalidRequestError, match=r"^bad_words \(zz\) must have at least one token"):
        make_request("r", [1], SamplingParams(bad_words=("zz",)), LIMITS, bad_word_ids=lambda _: [()])
    beyond = make_request("r", [1], params, LIMITS, bad_word_ids=lambda _: [(3, 100)])
    assert beyond.bad_token_ids == (), "the model has no such token"


def test_masks_that_may_leave_nothing_are_refused():
    def make(**fields):
        return make_request("r", [1], SamplingParams(**fields), LIMITS, bad_word_ids=word_ids)

    for fields in (
        {"allowed_token_ids": (98, 99), "min_tokens": 1},
        {"allowed_token_ids": (2, 98), "min_tokens": 1, "stop_token_ids": (2,)},
        {"allowed_token_ids": (1, 2), "bad_words": ("ab", "c")},  # after 0, 1 is banned
    ):
        with pytest.raises(InvalidRequestError, match="leave no token that is always there to choose") as e:
            make(**fields)
        assert e.value.param == "allowed_token_ids"
        make(**{**fields, "allowed_token_ids": (*fields["allowed_token_ids"], 60)})
    small = RequestLimits(vocab_size=2, max_model_len=8, max_kv_tokens=8, eos_token_ids=(1,))
    with pytest.raises(InvalidRequestError, match="leave no token") as e:
        make_request("r", [1], SamplingParams(bad_words=("a",), min_tokens=1), small, bad_word_ids=word_ids)
    assert e.value.param == "bad_words"


def test_a_missing_seed_is_drawn_and_a_given_one_kept():
    seeds = {make_request("r", [1], SamplingParams(), LIMITS).params.seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(seed is not None and 0 <= seed <= SEED_MAX for seed in seeds)
    assert make_request("r", [1], SamplingParams(seed=-5), LIMITS).params.seed == -5


def test_choice_0_uses_the_seed_itself_and_no_choices_share_a_seed():
    assert choice_seed(42, 0) == 42
    assert choice_seed(-1, 0) == 2**64 - 1
    derived = [choice_seed(seed, i) for seed in (-2, 0, 1, 2, 42, 2**63 - 1) for i in range(MAX_CHOICES)]
    assert len(set(derived)) == len(derived)
    assert all(0 <= seed < 2**64 for seed in derived)


def test_a_reported_seed_repeats_its_choice():
    for seed in (0, -1, 5, 2**63 - 1, -(2**63)):
        request = make_request("r", [1], SamplingParams(seed=seed, max_tokens=1, n=128), LIMITS)
        for choice_idx in range(128):
            reported = reported_seed(request, choice_idx)
            assert -(2**63) <= reported < 2**63
            assert choice_seed(reported, 0) == choice_seed(seed, choice_idx)
        assert reported_seed(request, 0) == seed


def test_choice_seeds_are_the_published_splitmix64_sequence():
    """First outputs for state 0, as in the reference implementation by Vigna."""
    assert [choice_seed(0, i) for i in (1, 2, 3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


def test_token_ids_are_known_ids_in_any_number():
    validate_token_ids([], LIMITS, param="tokens")
    validate_token_ids([LIMITS.vocab_size - 1] * 1000, LIMITS, param="tokens")
    for bad in (-1, LIMITS.vocab_size, True, "1", 1.0):
        with pytest.raises(
            InvalidRequestError, match=r"^tokens\[1\] .* must be a token id in \[0, "
        ) as raised:
            validate_token_ids([0, bad], LIMITS, param="tokens")
        assert raised.value.param == "tokens[1]"


@pytest.mark.parametrize("fields", [{"forced_token_ids": (1,)}, {"max_tokens": 0, "prompt_logprobs": 1}])
def test_a_form_of_an_output_of_which_nothing_is_chosen_is_refused(fields):
    with pytest.raises(InvalidRequestError, match=f"must not come with {next(iter(fields))}") as caught:
        validate_sampling(SamplingParams(structured_outputs=StructuredOutputs(regex="a"), **fields), LIMITS)
    assert caught.value.param == "structured_outputs"
