"""The whole surface over HTTP: errors, and the openai client as it comes."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from tests.moe_runtime.server.fake_rank import EOS_ID, NAN_ID, VOCAB_SIZE

COMPLETION = {"model": "m", "prompt": "Hello", "max_tokens": 4}


def body(**fields):
    return json.dumps({**COMPLETION, **fields}).encode()


ERRORS = [
    # method, path, body, status, param, code
    ("GET", "/nowhere", None, 404, None, "not_found"),
    ("GET", "/status.html", None, 404, None, "not_found"),
    ("POST", "/v1/completions/", b"{}", 404, None, "not_found"),
    ("GET", "/v1/completions", None, 405, None, "method_not_allowed"),
    ("DELETE", "/health", None, 405, None, "method_not_allowed"),
    ("PUT", "/v1/chat/completions", b"{}", 405, None, "method_not_allowed"),
    ("POST", "/v1/completions", b"", 400, None, "invalid_json"),
    ("POST", "/v1/completions", b"{", 400, None, "invalid_json"),
    ("POST", "/v1/completions", b"[" * 100_000, 400, None, "invalid_json"),
    ("POST", "/v1/completions", b'{"model": "m", "prompt": NaN}', 400, "prompt", "invalid_json"),
    ("POST", "/v1/completions", b'{"model": "m", "prompt": "\\ud800"}', 400, None, "invalid_json"),
    ("POST", "/v1/completions", b'{"model": "m", "prompt": "\xff"}', 400, None, "invalid_json"),
    ("POST", "/v1/completions", b"[]", 400, None, None),
    ("POST", "/v1/completions", b" " * (9 * 2**20), 413, None, "body_too_large"),
    ("POST", "/v1/completions", body(model="gpt-4"), 404, "model", "model_not_found"),
    ("POST", "/v1/completions", body(prompt=""), 400, "prompt", None),
    ("POST", "/v1/completions", body(prompt=[""]), 400, "prompt", None),
    ("POST", "/v1/completions", body(prompt=[]), 400, "prompt", None),
    ("POST", "/v1/completions", body(prompt=[[]]), 400, "prompt", None),
    ("POST", "/v1/completions", body(prompt=None), 400, "prompt", None),
    ("POST", "/v1/completions", body(prompt=[259]), 400, "prompt[0]", None),
    ("POST", "/v1/completions", body(prompt=[-1]), 400, "prompt[0]", None),
    ("POST", "/v1/completions", body(prompt=["x"] * 100_000), 400, "prompt", None),
    ("POST", "/v1/completions", body(prompt="x" * 5000), 400, "prompt", "context_length_exceeded"),
    ("POST", "/v1/completions", body(prompt="x" * 4096), 400, "max_tokens", "context_length_exceeded"),
    ("POST", "/v1/completions", body(max_tokens=0), 400, "max_tokens", None),
    ("POST", "/v1/completions", body(max_tokens=-1), 400, "max_tokens", None),
    ("POST", "/v1/completions", body(max_tokens=2**31), 400, "max_tokens", "context_length_exceeded"),
    ("POST", "/v1/completions", body(max_tokens=2**63), 400, "max_tokens", None),
    ("POST", "/v1/completions", body(n=0), 400, "n", None),
    ("POST", "/v1/completions", body(n=129), 400, "n", None),
    ("POST", "/v1/completions", body(n=1_000_000), 400, "n", None),
    ("POST", "/v1/completions", body(n=128, prompt=["x"] * 1000), 400, "n", None),
    ("POST", "/v1/completions", body(temperature=-0.1), 400, "temperature", None),
    ("POST", "/v1/completions", body(temperature=1e300), 400, "temperature", None),
    ("POST", "/v1/completions", body(top_p=0), 400, "top_p", None),
    ("POST", "/v1/completions", body(top_k=-2), 400, "top_k", None),
    ("POST", "/v1/completions", body(min_p=1.5), 400, "min_p", None),
    ("POST", "/v1/completions", body(seed=2**63), 400, "seed", None),
    ("POST", "/v1/completions", body(seed="7"), 400, "seed", None),
    ("POST", "/v1/completions", body(stop=["a"] * 100_000), 400, "stop", None),
    ("POST", "/v1/completions", body(stop=""), 400, "stop", None),
    ("POST", "/v1/completions", body(stop_token_ids=[10**12]), 400, "stop_token_ids[0]", None),
    ("POST", "/v1/completions", body(logprobs=21), 400, "logprobs", None),
    ("POST", "/v1/completions", body(logprobs=21, echo=True), 400, "logprobs", None),
    ("POST", "/v1/completions", body(prompt_logprobs=-1), 400, "prompt_logprobs", None),
    ("POST", "/v1/completions", body(forced_token_ids=[]), 400, "forced_token_ids", None),
    ("POST", "/v1/completions", body(stream_options={}), 400, "stream_options", None),
    ("POST", "/v1/completions", body(stream=1), 400, "stream", None),
    ("POST", "/v1/completions", body(best_of=2), 400, "best_of", "unsupported_parameter"),
    *[
        ("POST", "/v1/completions", body(logit_bias={key: 1}), 400, "logit_bias", None)
        for key in ("-1", str(VOCAB_SIZE), "1000000000000", "9" * 400, "abc", "01", "")
    ],
    ("POST", "/v1/completions", body(logit_bias={"5": 101}), 400, "logit_bias[5]", None),
    ("POST", "/v1/completions", body(logit_bias={"5": "x"}), 400, "logit_bias", None),
    ("POST", "/v1/completions", body(logit_bias=[5]), 400, "logit_bias", None),
    ("POST", "/v1/completions", body(presence_penalty=2.5), 400, "presence_penalty", None),
    ("POST", "/v1/completions", body(frequency_penalty="1"), 400, "frequency_penalty", None),
    ("POST", "/v1/completions", body(repetition_penalty=0), 400, "repetition_penalty", None),
    ("POST", "/v1/completions", body(min_tokens=5, max_tokens=4), 400, "min_tokens", None),
    ("POST", "/v1/completions", body(min_tokens=-1), 400, "min_tokens", None),
    ("POST", "/v1/completions", body(bad_words="x"), 400, "bad_words", None),
    ("POST", "/v1/completions", body(bad_words=[""]), 400, "bad_words", None),
    ("POST", "/v1/completions", body(bad_words=["x"] * 1000), 400, "bad_words", None),
    ("POST", "/v1/completions", body(allowed_token_ids=[]), 400, "allowed_token_ids", None),
    ("POST", "/v1/completions", body(allowed_token_ids=[VOCAB_SIZE]), 400, "allowed_token_ids[0]", None),
    (
        "POST",
        "/v1/completions",
        body(allowed_token_ids=[EOS_ID], min_tokens=1),
        400,
        "allowed_token_ids",
        None,
    ),
    ("POST", "/v1/completions", body(unheard_of=1), 400, "unheard_of", None),
    ("POST", "/v1/completions", b'{"model": "m", "prompt": "x", "a\\u0000b": 1}', 400, "a\x00b", None),
    ("POST", "/v1/chat/completions", body(), 400, "messages", None),
]


@pytest.mark.parametrize(("method", "path", "data", "status", "param", "code"), ERRORS)
def test_every_error_is_openai_shaped(server, method, path, data, status, param, code):
    response = server.http.request(method, path, content=data)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert 0 < len(error["message"]) < 500
    assert status != 405 or response.headers["allow"]


def test_the_server_is_unharmed_by_all_of_them(server):
    assert server.complete(seed=1, max_tokens=4)["choices"][0]["text"] == "1:5 "
    assert server.process.poll() is None
    assert "Traceback" not in server.log()


@pytest.mark.parametrize("stream", [True, False])
def test_our_own_fault_is_a_500_without_details(start_server, stream):
    server = start_server()
    fields = {"prompt": [5, NAN_ID], "logprobs": 0, "echo": True, "stream": stream}
    response = server.http.post("/v1/completions", json={**COMPLETION, **fields})
    assert response.status_code == 500
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "logprob" not in response.text
    assert "ArithmeticError" in server.log()
    assert server.complete(max_tokens=1)["choices"]
    assert server.http.get("/server_info").json()["num_open_requests"] == 0


def test_neutral_and_inert_fields_change_nothing(server):
    plain = server.complete(seed=1)["choices"]
    fields = {
        "best_of": 1,
        "suffix": None,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "user": "me",
        "echo": None,
        "stream": None,
        "stop": None,
    }
    assert server.complete(seed=1, **fields)["choices"] == plain


def test_openai_client_sync(server):
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0)
    with client:
        assert [model.id for model in client.models.list()] == ["m"]
        assert client.models.retrieve("m").id == "m"
        messages = [{"role": "user", "content": "Hello"}]
        chat = client.chat.completions.create(
            model="m", messages=messages, max_completion_tokens=30, seed=5, logprobs=True, top_logprobs=2, n=2
        )
        assert chat.choices[0].message.content.startswith("5:24 ")
        assert len(chat.choices[1].logprobs.content) == chat.usage.completion_tokens // 2
        assert chat.system_fingerprint == "fp-1"
        stream = client.chat.completions.create(
            model="m",
            messages=messages,
            max_tokens=30,
            seed=5,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == chat.choices[0].message.content
        assert chunks[-1].usage.completion_tokens == 30
        completion = client.completions.create(
            model="m", prompt=[1, 2, EOS_ID], max_tokens=5, logprobs=1, echo=True, extra_body={"top_k": 5}
        )
        assert len(completion.choices[0].logprobs.tokens) == 8
        with pytest.raises(openai.BadRequestError) as raised:
            client.completions.create(model="m", prompt="x", temperature=-1)
        assert raised.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="other", messages=messages)


def test_openai_client_async(server):
    async def run():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:

            async def one(seed):
                stream = await client.completions.create(
                    model="m", prompt="Hello", max_tokens=40, seed=seed, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            texts = await asyncio.gather(*[one(seed) for seed in range(32)])
            plain = await client.completions.create(model="m", prompt="Hello", max_tokens=40, seed=9)
            assert texts[9] == plain.choices[0].text
            assert [text.split(":")[0] for text in texts] == [f"{seed:x}" for seed in range(32)]

    asyncio.run(run())


def test_every_round_has_reached_every_rank_with_the_same_epoch(server):
    server.complete(max_tokens=1)
    first, second = (list(rank.epochs) for rank in server.ranks.ranks)
    shared = min(len(first), len(second))
    assert first[:shared] == second[:shared] == list(range(1, shared + 1))
