"""``POST /v1/completions``."""

from __future__ import annotations

import json

import pytest

from moe_runtime.engine.messages import AddRequest
from moe_runtime.server.completions import DEFAULT_MAX_TOKENS
from moe_runtime.server.logprobs import MINUS_INFINITY
from tests.moe_runtime.server.fake_rank import EOS_ID, LIMITS, byte_ids, token_logprobs

PATH = "/v1/completions"


def test_a_plain_completion(server):
    answer = server.complete(prompt="Hello", seed=7)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "m"
    assert answer["system_fingerprint"] == "fp-1"
    assert answer["seed"] == 7
    (choice,) = answer["choices"]
    assert choice["text"] == "7:5 caf\u00e9 \u2603 \ufffd"  # the sixteenth token is a part of a character
    assert (choice["finish_reason"], choice["seed"], choice["index"]) == ("length", 7, 0)
    assert choice["logprobs"] is None
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": DEFAULT_MAX_TOKENS,
        "total_tokens": 5 + DEFAULT_MAX_TOKENS,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize("prompt", [byte_ids("Hello"), [byte_ids("Hello")], ["Hello"]])
def test_all_prompt_forms_give_the_same_answer(server, prompt):
    expected = server.complete(prompt="Hello", seed=7)["choices"]
    assert server.complete(prompt=prompt, seed=7)["choices"] == expected


def test_prompts_of_a_list_are_requests_of_their_own(server):
    answer = server.complete(prompt=["Hello", "Hi"], n=2, seed=7, max_tokens=30)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    for index, prompt in enumerate(["Hello", "Hi"]):
        alone = server.complete(prompt=prompt, n=2, seed=7, max_tokens=30)
        texts = [choice["text"] for choice in answer["choices"][2 * index : 2 * index + 2]]
        assert texts == [choice["text"] for choice in alone["choices"]]
    assert answer["usage"]["prompt_tokens"] == 7
    assert answer["usage"]["completion_tokens"] == 120


def test_unseeded_prompts_differ_and_each_can_be_repeated(server):
    answer = server.complete(prompt=["Hello"] * 3, max_tokens=20)
    assert answer["seed"] is None
    assert len({choice["text"] for choice in answer["choices"]}) == 3
    for choice in answer["choices"]:
        again = server.complete(prompt="Hello", max_tokens=20, seed=choice["seed"])
        assert again["choices"][0]["text"] == choice["text"]


def test_echo_aligns_logprobs_with_the_prompt(server):
    """What lm-eval asks for."""
    ids = byte_ids("one two")
    answer = server.complete(prompt=ids, max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1)
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith("one two")
    assert [len(values) for values in logprobs.values()] == [len(ids) + 1] * 4
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    expected = [token_logprobs(ids[i], i, 1).logprob for i in range(1, len(ids))]
    assert logprobs["token_logprobs"][1:-1] == expected
    assert logprobs["text_offset"] == list(range(len(ids) + 1))
    assert "".join(logprobs["tokens"]) == choice["text"]


def test_echo_without_output(server):
    for fields in ({"logprobs": 2}, {}):
        answer = server.complete(prompt="Hello", max_tokens=0, echo=True, **fields)
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("Hello", "length")
        assert answer["usage"]["completion_tokens"] == 0
    assert choice["logprobs"] is None


def test_minus_infinity_is_finite_in_json(server):
    text = server.http.post(
        PATH, json={"model": "m", "prompt": [5, 257], "echo": True, "max_tokens": 1, "logprobs": 3}
    ).text
    answer = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    assert MINUS_INFINITY in answer["choices"][0]["logprobs"]["top_logprobs"][1].values()


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": 3, "max_tokens": 60},
        {"seed": 3, "max_tokens": 60, "n": 3, "logprobs": 2, "return_token_ids": True},
        {"seed": 3, "max_tokens": 60, "echo": True, "logprobs": 1, "n": 2},
        {"seed": 3, "max_tokens": 60, "stop": ["brown f", "jumps"]},
        {"seed": 3, "max_tokens": 60, "stop": ["brown f"], "include_stop_str_in_output": True},
        {"seed": 3, "max_tokens": 0, "echo": True, "logprobs": 0},
        {"seed": 3, "max_tokens": 60, "prompt": ["Hello!", "b", "c!"], "logprobs": 0},
        {"seed": 3, "max_tokens": 60, "prompt": "Hello!", "ignore_eos": True, "skip_special_tokens": False},
        {"seed": 3, "max_tokens": 20, "prompt_logprobs": 2},
    ],
)
def test_a_stream_adds_up_to_the_plain_answer(server, fields):
    fields = {"prompt": "Hello", **fields}
    plain = server.complete(**fields)
    chunks = server.stream(PATH, **fields, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == plain["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    joined = {}
    for chunk in chunks[:-1]:
        assert chunk["object"] == "text_completion"
        (choice,) = chunk["choices"]
        known = joined.setdefault(choice["index"], choice)
        if known is choice:
            continue
        known["text"] += choice["text"]
        known["finish_reason"], known["stop_reason"] = choice["finish_reason"], choice["stop_reason"]
        if choice["logprobs"] is not None:
            for name, values in choice["logprobs"].items():
                known["logprobs"][name] += values
        if "token_ids" in choice:
            known["token_ids"] += choice["token_ids"]
    assert [joined[index] for index in sorted(joined)] == plain["choices"]


def test_a_stop_string_over_token_borders_cuts_everything(server):
    answer = server.complete(
        prompt="Hello", seed=3, max_tokens=80, stop=["brown f", "zzz"], logprobs=0, return_token_ids=True
    )
    (choice,) = answer["choices"]
    assert choice["text"].endswith("the quick ")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "brown f")
    kept = byte_ids(choice["text"] + "brown f")
    assert choice["token_ids"] == kept
    assert len(choice["logprobs"]["tokens"]) == len(kept) == answer["usage"]["completion_tokens"]


def test_end_of_sequence_and_stop_tokens(server):
    (choice,) = server.complete(prompt="Hi!", seed=3, max_tokens=50, return_token_ids=True)["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert choice["token_ids"][-1] == EOS_ID
    assert len(choice["token_ids"]) == 21
    (choice,) = server.complete(prompt="Hi!", seed=3, max_tokens=50, ignore_eos=True)["choices"]
    assert choice["finish_reason"] == "length"
    q = byte_ids("q")[0]
    (choice,) = server.complete(prompt="Hi", seed=3, max_tokens=50, stop_token_ids=[q])["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", q)
    assert choice["text"].endswith("the ")


def test_forced_tokens_come_back_with_their_logprobs(server):
    ids = byte_ids("\u6625!")
    answer = server.complete(prompt="x", forced_token_ids=ids, logprobs=1, return_token_ids=True)
    (choice,) = answer["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (ids, byte_ids("x"))
    assert choice["text"] == "\u6625!"
    expected = [token_logprobs(token_id, i, 1).logprob for i, token_id in enumerate(ids)]
    assert choice["logprobs"]["token_logprobs"] == expected


def test_prompt_logprobs_without_echo(server):
    ids = byte_ids("abc")
    (choice,) = server.complete(prompt=ids, prompt_logprobs=1, max_tokens=2)["choices"]
    assert choice["prompt_logprobs"][0] is None
    assert [list(entry) for entry in choice["prompt_logprobs"][1:]] == [[str(i)] for i in ids[1:]]


def test_the_default_length_fits_the_room(server):
    prompt = [5] * (LIMITS.max_total_tokens - 3)
    assert server.complete(prompt=prompt)["usage"]["completion_tokens"] == 3


def test_continuous_usage(server):
    chunks = server.stream(
        PATH,
        prompt="Hello",
        max_tokens=9,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 9


def test_one_bad_prompt_starts_none(server):
    before = len(server.ranks.messages(AddRequest))
    for prompt in ([[5], [259]], [[5], []], ["a", ""]):
        response = server.http.post(PATH, json={"model": "m", "prompt": prompt})
        assert response.status_code == 400
        assert response.json()["error"]["param"].startswith("prompt[1]")
    assert len(server.ranks.messages(AddRequest)) == before


RULES = {
    "min_tokens": 3,
    "presence_penalty": 0.5,
    "frequency_penalty": -1,
    "repetition_penalty": 1.25,
    "logit_bias": {"7": -100, "9": 1.5},
    "bad_words": ["no"],
    "allowed_token_ids": [9, 10, 11],
}


@pytest.mark.parametrize("send", ["complete", "chat"])
def test_rules_reach_the_rank_as_they_were_sent(server, send):
    getattr(server, send)(max_tokens=4, stop_token_ids=[10], **RULES)
    request = server.ranks.messages(AddRequest)[-1].request
    if not request.params.bad_words:
        request = next(
            m.request for m in reversed(server.ranks.messages(AddRequest)) if m.request.params.bad_words
        )
    params = request.params
    assert params.logit_bias == {7: -100.0, 9: 1.5}
    assert (params.bad_words, params.allowed_token_ids) == (("no",), (9, 10, 11))
    for name in ("min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert getattr(params, name) == RULES[name]
    assert request.bad_token_ids == (tuple(byte_ids("no")), tuple(byte_ids(" no")))
    assert request.ending_ids == (10, EOS_ID)


def test_a_stop_string_within_min_tokens_is_passed_over(server):
    fields = {"prompt": "Hello", "seed": 3, "max_tokens": 120, "stop": ["quick"]}
    (soon,) = server.complete(**fields)["choices"]
    assert (soon["text"].count("the quick"), soon["text"].endswith("the ")) == (0, True)
    answer = server.complete(**fields, min_tokens=60)
    (late,) = answer["choices"]
    assert (late["finish_reason"], late["stop_reason"], late["text"].count("quick")) == ("stop", "quick", 1)
    assert answer["usage"]["completion_tokens"] > 60
    text = "".join(chunk["choices"][0]["text"] for chunk in server.stream(PATH, **fields, min_tokens=60))
    assert text == late["text"]
