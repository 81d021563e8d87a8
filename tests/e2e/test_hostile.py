"""Hostile requests to a server on two ranks: one clear refusal each, and a request beside them keeps its bits."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.servers import RunningServer, running_server

pytestmark = pytest.mark.xdist_group("servers")

KEY = "sk-only-those-who-know"
PROBE = {
    "model": "builtin",
    "prompt": "HAMLET\nWhat a piece of work is",
    "max_tokens": 24,
    "seed": 7,
    "temperature": 0.9,
    "logprobs": 5,
}
CONTEXT = 1024
VOCAB_SIZE = 2048
PLAIN = {"model": "builtin", "prompt": "x", "max_tokens": 2}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def case(
    status: int,
    param: str | None,
    code: str | None,
    content: bytes | dict[str, Any],
    *,
    path: str = COMPLETIONS,
    method: str = "POST",
    **headers: str,
) -> tuple[Any, ...]:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return method, path, data, headers, status, param, code


def completion(status: int, param: str | None, code: str | None = None, **fields: Any) -> tuple[Any, ...]:
    return case(status, param, code, {**PLAIN, **fields})


def chat(param: str, code: str | None = None, **fields: Any) -> tuple[Any, ...]:
    messages = [{"role": "user", "content": "x"}]
    return case(400, param, code, {"model": "builtin", "messages": messages, **fields}, path=CHAT)


def raw(text: str) -> bytes:
    """A body with one more field, written as it is."""
    return json.dumps(PLAIN).encode()[:-1] + b", " + text.encode() + b"}"


DEEP = 100_000
CASES: dict[str, tuple[Any, ...]] = {
    "no JSON": case(400, None, "invalid_json", b"{"),
    "empty body": case(400, None, "invalid_json", b""),
    "text after the body": case(400, None, "invalid_json", json.dumps(PLAIN).encode() + b"x"),
    "UTF-16": case(400, None, "invalid_json", json.dumps(PLAIN).encode("utf-16")),
    "a byte order mark": case(400, None, "invalid_json", b"\xef\xbb\xbf{}"),
    "invalid UTF-8": case(400, None, "invalid_json", b'{"prompt": "\xc0\xaf"}'),
    "a control character in a string": case(400, None, "invalid_json", b'{"prompt": "\x01"}'),
    "a lone surrogate": case(400, None, "invalid_json", raw('"user": "\\ud800"')),
    "surrogates in reverse": case(400, None, "invalid_json", raw('"user": "\\ude00\\ud83d"')),
    "lists nested 100,000 deep": case(400, None, "invalid_json", b"[" * DEEP + b"]" * DEEP),
    "objects nested 100,000 deep": case(400, None, "invalid_json", b'{"a":' * DEEP + b"1" + b"}" * DEEP),
    "a field nested 100,000 deep": case(
        400, None, "invalid_json", raw('"suffix": ' + "[" * DEEP + "]" * DEEP)
    ),
    "no object": case(400, None, None, b"[1, 2]"),
    "a body of 10 MB": case(413, None, "body_too_large", b" " * 10 * 10**6),
    "a body of 10 MB in chunks": case(413, None, "body_too_large", b"", **{"Chunked": "10000000"}),
    "a form": case(415, "Content-Type", "unsupported_media_type", b"a=b", **{"Content-Type": "text/plain"}),
    "a compressed body": case(
        415,
        "Content-Encoding",
        "unsupported_content_encoding",
        gzip.compress(b" " * 10**6),
        **{"Content-Encoding": "gzip"},
    ),
    "a wrong key": case(401, None, "invalid_api_key", PLAIN, Authorization="Bearer sk-wrong"),
    "no key": case(401, None, "invalid_api_key", PLAIN, Authorization=""),
    "a key with bytes beyond ASCII": case(401, None, "invalid_api_key", PLAIN, Authorization="Bearer \xff"),
    "a key of 50 kB": case(401, None, "invalid_api_key", PLAIN, Authorization="Bearer " + "x" * 50_000),
    "GET on a POST path": case(405, None, "method_not_allowed", b"", method="GET"),
    "POST on a GET path": case(405, None, "method_not_allowed", b"{}", path="/v1/models"),
    "an unknown method": case(405, None, "method_not_allowed", b"", method="BREW"),
    "an unknown path": case(404, None, "not_found", b"", path="/v1/" + "x" * 5000),
    "a path with escapes": case(404, None, "not_found", b"", path="/%00%ff/../etc/passwd"),
    "an unknown model": completion(404, "model", "model_not_found", model="gpt-4"),
    "a model name of 1 MB": completion(404, "model", "model_not_found", model="m" * 10**6),
    "a model that is a list": completion(400, "model", model=["builtin"]),
    "no model": case(400, "model", None, {"prompt": "x"}),
    "a field name of 1 MB": completion(400, "k" * 197 + "...", **{"k" * 10**6: 1}),
    "a field name of control characters": completion(400, "\x1b[31m\r\n", **{"\x1b[31m\r\n": 1}),
    "100,000 unknown fields": completion(400, "k0", **{f"k{i}": 1 for i in range(10**5)}),
    "an empty prompt": completion(400, "prompt", prompt=""),
    "a list of an empty prompt": completion(400, "prompt", prompt=[""]),
    "no prompts": completion(400, "prompt", prompt=[]),
    "no ids": completion(400, "prompt", prompt=[[]]),
    "an empty prompt after another": completion(400, "prompt[1]", prompt=["a", ""]),
    "a null prompt": completion(400, "prompt", prompt=None),
    "ids and text": completion(400, "prompt", prompt=[1, "a"]),
    "ids that are true": completion(400, "prompt", prompt=[True]),
    "ids that are fractions": completion(400, "prompt", prompt=[1.0]),
    "a first id beyond the vocabulary": completion(400, "prompt[0]", prompt=[VOCAB_SIZE]),
    "a negative id": completion(400, "prompt[1]", prompt=[1, -1]),
    "an id of 10^12": completion(400, "prompt[0]", prompt=[10**12]),
    "one bad prompt of three": completion(400, "prompt[1][0]", prompt=[[1], [VOCAB_SIZE], [2]]),
    "a million ids": completion(400, "prompt", "context_length_exceeded", prompt=[1] * 10**6),
    "1 MB of text": completion(400, "prompt", "context_length_exceeded", prompt="word " * 200_000),
    "1 MB of spaces": completion(400, "prompt", "context_length_exceeded", prompt=" " * 10**6),
    "1 MB of emoji": completion(
        400, "prompt", "context_length_exceeded", prompt="\U0001f469\u200d" * 150_000
    ),
    "100,000 prompts": completion(400, "prompt", prompt=["x"] * 10**5),
    "a million choices": completion(400, "n", n=10**6),
    "no choice": completion(400, "n", n=0),
    "choices times prompts": completion(400, "n", n=128, prompt=["x"] * 1000),
    "NaN": case(400, "temperature", "invalid_json", raw('"temperature": NaN')),
    "infinity": case(400, "temperature", "invalid_json", raw('"temperature": Infinity')),
    "a number beyond doubles": case(400, "top_p", "invalid_json", raw('"top_p": 1e999')),
    "a temperature of 1e308": completion(400, "temperature", temperature=1e308),
    "a negative temperature": completion(400, "temperature", temperature=-1e-9),
    "a temperature that is text": completion(400, "temperature", temperature="1"),
    "an integer of 4,000 digits": case(400, "seed", None, raw('"seed": ' + "9" * 4000)),
    "an integer of 1,000,000 digits": case(400, None, "invalid_json", raw('"seed": ' + "9" * 10**6)),
    "a seed beyond 64 bits": completion(400, "seed", seed=2**64),
    "a bias for an unknown id": completion(400, "logit_bias", ..., logit_bias={str(VOCAB_SIZE): 1}),
    "a bias for no id": completion(400, "logit_bias", ..., logit_bias={"abc": 1}),
    "100,000 biases": completion(400, "logit_bias", ..., logit_bias={str(i): 1 for i in range(10**5)}),
    "100,000 stop strings": completion(400, "stop", stop=["a"] * 10**5),
    "a stop string of 1 MB": completion(400, "stop", stop="a" * 10**6),
    "stop strings of other types": completion(400, "stop", stop=[1, None, {}]),
    "100,000 stop ids": completion(400, "stop_token_ids", stop_token_ids=[1] * 10**5),
    "tokens over the context": completion(400, "max_tokens", "context_length_exceeded", max_tokens=CONTEXT),
    "2^63 tokens": completion(400, "max_tokens", max_tokens=2**63),
    "tokens in a fraction": completion(400, "max_tokens", max_tokens=1.5),
    "stream as text": completion(400, "stream", stream="yes"),
    "logprobs of 21": completion(400, "logprobs", logprobs=21),
    "no messages": chat("messages", messages=[]),
    "an unknown role": chat("messages[0].role", messages=[{"role": "r" * 10**5, "content": "x"}]),
    "an unknown field of a message": chat(
        "messages[0].x", messages=[{"role": "user", "content": "", "x": 1}]
    ),
    "an image": chat(
        "messages[0].content",
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
    ),
    "100,000 messages": chat(
        "messages", "context_length_exceeded", messages=[{"role": "user", "content": "x"}] * 10**5
    ),
    "ids to detokenize": case(400, "tokens[0]", None, {"tokens": [10**9]}, path="/detokenize"),
    "nothing to tokenize": case(400, "prompt", None, {}, path="/tokenize"),
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(2, "--max-num-batched-tokens", "128", "--api-key", KEY) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60, headers={"Authorization": f"Bearer {KEY}"}) as opened:
        yield opened


class Prober(threading.Thread):
    """Sends the probe again and again, streamed and whole, and keeps what came."""

    def __init__(self, url: str) -> None:
        super().__init__(name="probe", daemon=True)
        self.answers: list[str] = []
        self.fault: Exception | None = None
        self._url = url
        self._end = threading.Event()

    def run(self) -> None:
        headers = {"Authorization": f"Bearer {KEY}"}
        try:
            with httpx.Client(base_url=self._url, timeout=60, headers=headers) as client:
                while not self._end.is_set():
                    self.answers += [probe(client), probe(client, stream=True)]
        except Exception as error:
            self.fault = error

    def stop(self) -> None:
        self._end.set()
        self.join(60)


def probe(client: httpx.Client, *, stream: bool = False, **fields: Any) -> str:
    """Text, logprobs and end of the probe, alike for a streamed and a whole answer."""
    response = client.post(COMPLETIONS, json={**PROBE, **fields, "stream": stream})
    assert response.status_code == 200, response.text
    if not stream:
        chunks = [response.json()]
    else:
        events = [line[6:] for line in response.text.splitlines() if line]
        assert events.pop() == "[DONE]"
        chunks = [json.loads(event) for event in events]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    lists = {
        name: [x for choice in choices for x in choice["logprobs"][name]] for name in choices[0]["logprobs"]
    }
    return json.dumps(["".join([choice["text"] for choice in choices]), lists, choices[-1]["finish_reason"]])


def send(server: RunningServer, client: httpx.Client, name: str) -> httpx.Response:
    method, path, data, headers, *_ = CASES[name]
    headers = {key: value.encode("latin-1") for key, value in headers.items()}
    num_bytes = int(headers.pop("Chunked", 0))
    content = (b" " * 2**16 for _ in range(-(-num_bytes // 2**16))) if num_bytes else data
    return client.request(method, path, content=content, headers=headers)


def test_each_is_refused_alike_and_a_probe_beside_them_keeps_its_bits(server, client) -> None:
    alone = probe(client)
    assert probe(client, seed=8) != alone, "the probe would not see a difference"
    pids = [rank["pid"] for rank in client.get("/server_info").json()["ranks"]]
    prober = Prober(server.url)
    prober.start()
    faults: list[str] = []
    while not faults and len(prober.answers) < 10 and prober.is_alive():
        for name, (*_, status, param, code) in CASES.items():
            response = send(server, client, name)
            fault = _fault_of(response, status, param, code)
            if fault is not None:
                faults.append(f"{name}: {fault}: {response.status_code} {response.text[:300]}")
    prober.stop()
    assert not faults, "\n".join(["", *faults])
    assert prober.fault is None
    assert set(prober.answers) == {alone}
    assert probe(client) == alone
    info = client.get("/server_info").json()
    assert [rank["pid"] for rank in info["ranks"]] == pids
    assert info["num_open_requests"] == 0


def _fault_of(response: httpx.Response, status: int, param: str | None, code: object) -> str | None:
    """What is wrong with an error answer; a code of ``...`` may be any."""
    if response.status_code != status:
        return f"the status is not {status}"
    if response.headers["content-type"] != "application/json":
        return "it is no JSON"
    error = response.json()["error"]
    if set(error) != {"message", "type", "param", "code"} or error["type"] != "invalid_request_error":
        return "it has not OpenAI's shape"
    if error["param"] != param or code not in (..., error["code"]):
        return f"param and code are not {param!r}, {code!r}"
    named = param is None or param.endswith("...") or param in error["message"]
    if not named or not 0 < len(error["message"]) <= 600 or len(response.content) > 2000:
        return "the message does not name the field, or is long"
    return None


def test_connections_that_end_in_the_middle_leave_nothing(server, client) -> None:
    body = json.dumps({**PLAIN, "max_tokens": 900, "stream": True}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n".encode()
    request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    host, port = server.url.removeprefix("http://").split(":")
    for end in [1, len(head), len(request) - 1, len(request)] * 8:
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(request[:end])
    # They may not have been read yet, so that none is open for a moment.
    quiet, end_s = 0, time.monotonic() + 60
    while quiet < 20:
        assert time.monotonic() < end_s, "requests whose clients have gone stay open"
        quiet = 0 if client.get("/server_info").json()["num_open_requests"] else quiet + 1
        threading.Event().wait(0.1)


def test_neither_key_nor_traceback_is_in_the_log_or_the_answers(server, client) -> None:
    """Runs after the tests above."""
    log = server.text
    assert "serving on" in log
    assert KEY not in log
    assert "sk-wrong" not in log
    assert "Traceback" not in log
    for path in ("/server_info", "/metrics", "/openapi.json", "/version"):
        assert KEY not in client.get(path).text
