"""Texts to ids and back over HTTP."""

from __future__ import annotations

import pytest

from moe_runtime.server.prompts import MAX_INLINE_CHARS
from tests.moe_runtime.server.fake_rank import EOS_ID, NAN_ID, byte_ids

MESSAGES = [{"role": "user", "content": "Hi"}]
RENDERED = "<|im_start|>user\nHi<|im_end|>\n"
HEADER = "<|im_start|>assistant\n"


def post(server, path, **fields):
    response = server.http.post(path, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("text", ["", "Hello", "caf\u00e9 \u2603", "a" * (3 * MAX_INLINE_CHARS)])
def test_a_prompt_becomes_its_ids_and_they_become_the_prompt(server, text):
    answer = post(server, "/tokenize", model="m", prompt=text)
    ids = byte_ids(text)
    assert answer == {"count": len(ids), "max_model_len": 4096, "tokens": ids, "token_strs": None}
    assert post(server, "/detokenize", model="m", tokens=ids) == {"prompt": text}


def test_the_model_may_be_left_out(server):
    assert post(server, "/tokenize", prompt="ab")["tokens"] == byte_ids("ab")
    assert post(server, "/detokenize", tokens=byte_ids("ab")) == {"prompt": "ab"}


def test_messages_are_rendered_and_the_assistant_s_header_is_a_choice(server):
    for value, text in ((None, RENDERED + HEADER), (True, RENDERED + HEADER), (False, RENDERED)):
        answer = post(server, "/tokenize", messages=MESSAGES, add_generation_prompt=value)
        assert post(server, "/detokenize", tokens=answer["tokens"]) == {"prompt": text}
        assert answer["count"] == len(answer["tokens"])


def test_the_ids_are_those_that_a_request_has(server):
    completion = server.complete(prompt="Hello", max_tokens=1, return_token_ids=True)["choices"][0]
    assert post(server, "/tokenize", prompt="Hello")["tokens"] == completion["prompt_token_ids"]
    chat = server.chat(messages=MESSAGES, max_tokens=1, return_token_ids=True)["choices"][0]
    assert post(server, "/tokenize", messages=MESSAGES)["tokens"] == chat["prompt_token_ids"]


def test_special_tokens_are_added_to_a_prompt_but_not_to_messages_unless_asked(start_server, bos_checkpoint):
    server = start_server(model_dir=str(bos_checkpoint))
    bos, ids = EOS_ID - 2, byte_ids("ab")
    assert post(server, "/tokenize", prompt="ab")["tokens"] == [bos, *ids]
    assert post(server, "/tokenize", prompt="ab", add_special_tokens=True)["tokens"] == [bos, *ids]
    assert post(server, "/tokenize", prompt="ab", add_special_tokens=False)["tokens"] == ids
    without = post(server, "/tokenize", messages=MESSAGES)["tokens"]
    assert without[0] != bos
    assert post(server, "/tokenize", messages=MESSAGES, add_special_tokens=True)["tokens"] == [bos, *without]


def test_tokens_are_shown_as_the_vocabulary_spells_them(server):
    answer = post(server, "/tokenize", prompt="a b<|im_end|>", return_token_strs=True)
    assert answer["token_strs"] == ["a", "\u0120", "b", "<|im_end|>"]
    assert answer["tokens"][-1] == EOS_ID


def test_no_tokens_are_no_text_and_broken_characters_are_marked(server):
    assert post(server, "/detokenize", tokens=[]) == {"prompt": ""}
    assert post(server, "/detokenize", tokens=byte_ids("\u2603")[:2]) == {"prompt": "\ufffd"}


def test_no_rank_is_asked(start_server):
    server = start_server(with_ranks=False)
    assert post(server, "/tokenize", prompt="ab")["count"] == 2


ERRORS = [
    # path, fields, status, param, code, part of the message
    ("/tokenize", {}, 400, "prompt", None, "prompt or messages is required"),
    ("/tokenize", {"prompt": None, "messages": None}, 400, "prompt", None, "is required"),
    ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "messages", None, "without prompt"),
    ("/tokenize", {"prompt": "a", "model": "gpt-4"}, 404, "model", "model_not_found", "not served here"),
    ("/tokenize", {"prompt": ["a"]}, 400, "prompt", None, "must be a string"),
    ("/tokenize", {"prompt": 5}, 400, "prompt", None, "must be a string"),
    ("/tokenize", {"prompt": "a", "unheard_of": 1}, 400, "unheard_of", None, "is not a known field"),
    ("/tokenize", {"prompt": "a", "tokens": [1]}, 400, "tokens", None, "is not a known field"),
    ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, 400, "add_special_tokens", None, "true or false"),
    ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, 400, "add_generation_prompt", None, "with"),
    ("/tokenize", {"prompt": "a", "chat_template": "x"}, 400, "chat_template", "unsupported_parameter", ""),
    ("/tokenize", {"messages": []}, 400, "messages", None, "at least one message"),
    ("/tokenize", {"messages": "Hi"}, 400, "messages", None, "must be a list"),
    ("/tokenize", {"messages": [{"role": "user"}]}, 400, "messages[0].content", None, "is required"),
    ("/detokenize", {}, 400, "tokens", None, "is required"),
    ("/detokenize", {"tokens": None}, 400, "tokens", None, "must be a list"),
    ("/detokenize", {"tokens": "5"}, 400, "tokens", None, "must be a list"),
    ("/detokenize", {"tokens": [5, "6"]}, 400, "tokens[1]", None, "must be an integer"),
    ("/detokenize", {"tokens": [5, True]}, 400, "tokens[1]", None, "must be an integer"),
    ("/detokenize", {"tokens": [5, 259]}, 400, "tokens[1]", None, "must be a token id in [0, 259)"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]", None, "must be a token id in [0, 259)"),
    ("/detokenize", {"tokens": [2**64]}, 400, "tokens[0]", None, "must be a 64-bit integer"),
    ("/detokenize", {"tokens": [NAN_ID], "model": "x"}, 404, "model", "model_not_found", "not served here"),
    ("/detokenize", {"tokens": [5], "prompt": "a"}, 400, "prompt", None, "is not a known field"),
]


@pytest.mark.parametrize(("path", "fields", "status", "param", "code", "text"), ERRORS)
def test_errors_are_openai_shaped_and_name_the_field(server, path, fields, status, param, code, text):
    response = server.http.post(path, json=fields)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert text in error["message"]
    assert len(error["message"]) < 300


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_a_body_is_an_object_of_json_and_not_too_large(server, path):
    for data, status in ((b"{", 400), (b"[]", 400), (b" " * (9 * 2**20), 413)):
        assert server.http.post(path, content=data).status_code == status
    assert server.http.get(path).status_code == 405
