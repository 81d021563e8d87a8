"""``POST /v1/chat/completions``."""

from __future__ import annotations

import pytest

from moe_runtime.engine.messages import AddRequest
from tests.moe_runtime.server.fake_rank import LIMITS

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]


def test_a_plain_answer(server):
    answer = server.chat(seed=7, max_tokens=12)
    assert answer["object"] == "chat.completion"
    assert answer["seed"] == 7
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "7:24 caf\u00e9 \ufffd", "refusal": None}
    assert (choice["finish_reason"], choice["seed"], choice["logprobs"]) == ("length", 7, None)
    assert answer["usage"]["prompt_tokens"] == 24
    assert answer["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 60},
        {"max_completion_tokens": 60, "n": 3, "logprobs": True, "top_logprobs": 3},
        {"max_tokens": 60, "max_completion_tokens": 60, "stop": "brown f", "return_token_ids": True},
        {"max_tokens": 5, "prompt_logprobs": 0},
        {
            "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "!"}],
            "max_tokens": 9,
        },
    ],
)
def test_a_stream_adds_up_to_the_plain_answer(server, fields):
    fields = {"messages": MESSAGES, "seed": 3, **fields}
    plain = server.chat(**fields)
    chunks = server.stream(PATH, **fields)
    contents, ends, logprobs, roles = {}, {}, {}, {}
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        assert "usage" not in chunk
        (choice,) = chunk["choices"]
        index = choice["index"]
        roles.setdefault(index, []).append(choice["delta"].get("role"))
        contents[index] = contents.get(index, "") + choice["delta"].get("content", "")
        ends[index] = (choice["finish_reason"], choice["stop_reason"], choice["seed"])
        if choice["logprobs"] is not None:
            logprobs.setdefault(index, []).extend(choice["logprobs"]["content"])
    for choice in plain["choices"]:
        index = choice["index"]
        assert contents[index] == choice["message"]["content"]
        assert ends[index] == (choice["finish_reason"], choice["stop_reason"], choice["seed"])
        assert roles[index][0] == "assistant"
        assert not any(roles[index][1:])
        if choice["logprobs"] is not None:
            assert logprobs[index] == choice["logprobs"]["content"]


def test_choices_differ_and_each_can_be_repeated_alone(server):
    answer = server.chat(n=4, seed=11, max_tokens=20)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(set(texts)) == 4
    assert server.chat(n=4, seed=11, max_tokens=20)["choices"] == answer["choices"]
    for choice in answer["choices"]:
        alone = server.chat(seed=choice["seed"], max_tokens=20)
        assert alone["choices"][0]["message"]["content"] == choice["message"]["content"]


def test_the_default_length_is_the_room_left(server):
    answer = server.chat(stop="zzzz", seed=1)
    assert answer["usage"]["total_tokens"] == LIMITS.max_total_tokens
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("num_top", [None, 0, 1, 20])
def test_top_logprobs(server, num_top):
    answer = server.chat(logprobs=True, top_logprobs=num_top, max_tokens=4)
    content = answer["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in content] == [num_top or 0] * 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "refuse"}]}, "messages"),
        ({"messages": [{"role": "system", "content": 1}]}, "messages[0].content"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 10**6}, "max_completion_tokens"),
        ({"max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
        ({"prompt": "x"}, "prompt"),
        ({"echo": True}, "echo"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "messages"),
        ({"add_generation_prompt": 1}, "add_generation_prompt"),
        ({"logit_bias": {"259": 1}}, "logit_bias"),
        ({"min_tokens": 9, "max_completion_tokens": 8}, "min_tokens"),
    ],
)
def test_bad_values_are_named_as_the_caller_spelled_them(server, fields, param):
    before = len(server.ranks.messages(AddRequest))
    response = server.http.post(PATH, json={"model": "m", "messages": MESSAGES, **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert param in error["message"]
    assert len(server.ranks.messages(AddRequest)) == before


def prompt_of(server, messages, **fields):
    answer = server.chat(messages=messages, max_tokens=1, return_token_ids=True, **fields)
    ids = answer["choices"][0]["prompt_token_ids"]
    return server.http.post("/detokenize", json={"tokens": ids}).json()["prompt"]


def test_roles_and_parts_go_through_the_template(server):
    messages = [
        {"role": "system", "content": "s"},
        {"role": "developer", "content": "d"},
        {
            "role": "user",
            "name": "n",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {"role": "assistant", "content": "c", "refusal": None, "annotations": [], "tool_calls": None},
        {"role": "user", "content": "e"},
    ]
    turns = [("system", "s"), ("system", "d"), ("user", "ab"), ("assistant", "c"), ("user", "e")]
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    assert prompt_of(server, messages) == text + "<|im_start|>assistant\n"
    assert prompt_of(server, messages, add_generation_prompt=False) == text


@pytest.mark.parametrize("content", ["It is ", " It", [{"type": "text", "text": "It is"}], "CONTINUE"])
def test_an_answer_continues_the_assistant_s_last_message(server, content):
    messages = [*MESSAGES, {"role": "assistant", "content": content}]
    flags = {"add_generation_prompt": False, "continue_final_message": True}
    text = content if isinstance(content, str) else content[0]["text"]
    expected = f"<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n{text}"
    assert prompt_of(server, messages, **flags) == expected
    ids = server.http.post("/tokenize", json={"messages": messages, **flags}).json()["tokens"]
    assert server.http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == expected


def test_usage_names_cached_tokens_and_a_stream_ends_with_it(server):
    usage = server.chat(max_tokens=3, seed=1)["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    *chunks, last = server.stream(
        PATH, messages=MESSAGES, max_tokens=3, seed=1, stream_options={"include_usage": True}
    )
    assert (last["choices"], last["usage"]) == ([], usage)
    assert all(chunk["usage"] is None for chunk in chunks)
