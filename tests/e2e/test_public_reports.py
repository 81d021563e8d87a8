"""Faults that users of other engines reported, tried on two ranks. docs/public_reports.md says which test is which."""

from __future__ import annotations

import concurrent.futures
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import moe_runtime.builtin
from moe_runtime.engine.llm import LLM
from moe_runtime.engine.request import SamplingParams
from moe_runtime.engine.tokenizer import Tokenizer
from tests.checkpoints import tiny_config, write_checkpoint
from tests.mixed_requests import bits, mixed_params, random_prompts
from tests.servers import RunningServer, running_server

pytestmark = pytest.mark.xdist_group("servers")

PROMPT = "HAMLET\nWhat a piece of work is"
SAMPLED = {"prompt": PROMPT, "max_tokens": 16, "temperature": 1.0, "top_p": 1.0, "return_token_ids": True}
CONTEXT = 1024
VOCAB_SIZE = 2048
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
MESSAGES = [{"role": "user", "content": "Speak of love"}]


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(server: RunningServer) -> Tokenizer:
    return Tokenizer.from_dir(Path(moe_runtime.builtin.__file__).parent)


def complete(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    """Choices of a completion that must succeed, its JSON without NaN and Infinity."""
    response = http.post("/v1/completions", json={"model": "builtin", **fields})
    assert response.status_code == 200, response.text
    return _strict(response.text)["choices"]


def chat(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    response = http.post("/v1/chat/completions", json={"model": "builtin", "messages": MESSAGES, **fields})
    assert response.status_code == 200, response.text
    return _strict(response.text)["choices"]


def stream(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    """Choices of the chunks of a streamed completion."""
    response = http.post("/v1/completions", json={"model": "builtin", "stream": True, **fields})
    events = [line[6:] for line in response.text.splitlines() if line]
    assert events.pop() == "[DONE]"
    return [choice for event in events for choice in _strict(event)["choices"]]


def status(http: httpx.Client, path: str = "/v1/completions", **fields: Any) -> int:
    """Status of a call; an error must have OpenAI's shape."""
    response = http.post(path, json={"model": "builtin", **fields})
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    return response.status_code


def _strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def ids(choices: list[dict[str, Any]]) -> list[list[int]]:
    return [choice["token_ids"] for choice in choices]


def test_one_answer_whatever_the_load(http) -> None:
    """BI-02, BI-12: logprobs as floats, beside 0, 5 and 40 streams, and 32 times at once"""
    target = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "logprobs": 5, "return_token_ids": True}
    answers: list[str] = []

    def ask() -> None:
        (choice,) = complete(http, **target)
        answers.append(json.dumps([choice["token_ids"], choice["logprobs"]]))

    with concurrent.futures.ThreadPoolExecutor(48) as pool:
        for num_streams in (0, 5, 40):
            load = {**SAMPLED, "max_tokens": 8, "ignore_eos": True}
            others = [
                pool.submit(stream, http, **{**load, "prompt": "O " * (i % 7 + 1)})
                for i in range(num_streams)
            ]
            for _ in range(4):
                ask()
            assert {other.result()[-1]["finish_reason"] for other in others} <= {"length"}
        for future in [pool.submit(ask) for _ in range(32)]:
            future.result()
    assert len(answers) == 3 * 4 + 32
    assert len(set(answers)) == 1


def test_the_length_of_a_list_and_the_limits_enter_no_answer(tmp_path) -> None:
    """BI-03"""
    llm = LLM(str(write_checkpoint(tmp_path, tiny_config("qwen3_moe"))))
    prompts, params = random_prompts(6, [3, 40, 65, 64, 1, 90, 17, 130]), mixed_params(8, 6)
    expected = [bits(llm.generate([prompt], own)[0]) for prompt, own in zip(prompts, params, strict=True)]
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    for max_num_seqs in (1, 3, 64):
        llm.reconfigure(max_num_seqs=max_num_seqs)
        for places in (range(8), order, order[:5]):
            results = llm.generate([prompts[i] for i in places], [params[i] for i in places])
            assert [bits(result) for result in results] == [expected[i] for i in places]


def test_a_seed_gives_the_same_tokens_whatever_else_runs(http) -> None:
    """SA-01, SA-02"""
    alone = ids(complete(http, **SAMPLED, seed=42))
    assert ids(complete(http, **SAMPLED, seed=43)) != alone
    assert ids(complete(http, **SAMPLED)) != ids(complete(http, **SAMPLED))
    talk = {"max_tokens": 12, "temperature": 1.0, "return_token_ids": True, "seed": 42}
    chat_alone = ids(chat(http, **talk))
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        others = [pool.submit(complete, http, **{**SAMPLED, "prompt": "O " * i}) for i in range(1, 13)]
        again = [pool.submit(complete, http, **SAMPLED, seed=42) for _ in range(4)]
        chats = [pool.submit(chat, http, **talk) for _ in range(4)]
        assert all(ids(future.result()) == alone for future in again)
        assert all(ids(future.result()) == chat_alone for future in chats)
        assert all(future.result() for future in others)


def test_choices_differ_and_repeat(http) -> None:
    """SA-03"""
    fields = {**SAMPLED, "n": 8, "temperature": 1.2, "seed": 7}
    choices = complete(http, **fields)
    assert len({tuple(tokens) for tokens in ids(choices)}) == 8
    assert ids(complete(http, **fields)) == ids(choices)
    assert ids(complete(http, **{**fields, "n": 1})) == ids(choices[:1])


def test_seeds_of_any_size_and_type_are_taken_or_refused(http) -> None:
    """SA-05"""
    good = [-1, 0, 2**31, 2**63 - 1, -(2**63), None]
    bad = [2**63, 2**64, -(2**63) - 1, 1.5, "7", True, [], {}]
    fields = {"prompt": "x", "max_tokens": 1}
    assert [status(http, **fields, seed=seed) for seed in good] == [200] * len(good)
    assert [status(http, **fields, seed=seed) for seed in bad] == [400] * len(bad)


def test_tiny_temperatures_are_greedy(http) -> None:
    """SA-06"""
    fields = {**SAMPLED, "seed": 1, "logprobs": 1}
    greedy = complete(http, **{**fields, "temperature": 0})
    for temperature in (1e-300, 1e-12, 1e-7, 1e-6, 1e-5):
        assert ids(complete(http, **{**fields, "temperature": temperature})) == ids(greedy), temperature
    assert ids(complete(http, **{**fields, "temperature": 2.0})) != ids(greedy)


def test_top_k_off_is_one_rule(http) -> None:
    """SA-09; the checkpoint's own configuration is in test_generation_config.py"""
    fields = {**SAMPLED, "seed": 5, "temperature": 1.5}
    off = ids(complete(http, **fields, top_k=0))
    assert ids(complete(http, **fields, top_k=-1)) == off
    assert ids(complete(http, **fields, top_k=VOCAB_SIZE)) == off
    assert ids(complete(http, **fields, top_k=1)) != off
    params = SamplingParams(max_tokens=16, temperature=1.5, seed=5, top_k=-1)
    assert list(LLM().generate([PROMPT], params)[0].outputs[0].token_ids) == off[0]


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 0.1}, {"min_p": 1.0}, {"temperature": 0}])
def test_logprobs_of_excluded_tokens_are_valid_json(http, fields) -> None:
    """SA-10"""
    [choice] = complete(http, **{**SAMPLED, **fields}, logprobs=20)
    assert all(len(top) in (20, 21) for top in choice["logprobs"]["top_logprobs"])


def test_as_many_top_logprobs_as_asked_for(http) -> None:
    """SA-13"""
    for num_top in (0, 1, 2, 5, 19, 20):
        [choice] = chat(http, max_tokens=4, seed=3, temperature=1.5, logprobs=True, top_logprobs=num_top)
        for entry in choice["logprobs"]["content"]:
            values = [top["logprob"] for top in entry["top_logprobs"]]
            assert len(values) == num_top
            assert values == sorted(values, reverse=True)
            assert entry["logprob"] <= max(values, default=0.0)


def test_logprobs_without_top_logprobs_and_the_reverse(http) -> None:
    """SA-14"""
    [choice] = chat(http, max_tokens=3, logprobs=True)
    assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [[]] * 3
    path, fields = "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3}
    assert status(http, path, **fields, top_logprobs=3) == 400
    assert status(http, path, **fields, logprobs=True, top_logprobs=21) == 400
    assert status(http, path, **fields, logprobs=True, top_logprobs=-1) == 400


def test_a_bias_for_an_id_that_is_none_is_refused(http) -> None:
    """SA-15"""
    for key in ("-1", str(VOCAB_SIZE), str(VOCAB_SIZE + 64), str(10**12), "abc", ""):
        assert status(http, prompt="x", max_tokens=1, logit_bias={key: -100}) == 400, key
    assert status(http, prompt="x", max_tokens=1) == 200


def test_ignore_eos_runs_to_the_end(http) -> None:
    """SA-20"""
    fields = {**SAMPLED, "max_tokens": 40, "temperature": 2.0}
    choices = complete(http, **fields, n=64, seed=1)
    ended = [choice["seed"] for choice in choices if choice["finish_reason"] == "stop"]
    assert ended, "no choice ends early: the test shows nothing"
    [choice] = complete(http, **fields, seed=ended[0], ignore_eos=True)
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (40, "length")


def test_a_stop_string_over_several_tokens_is_cut_exactly(http, tokenizer) -> None:
    """SA-21"""
    [plain] = complete(http, **SAMPLED, seed=11)
    pieces = [tokenizer.token_text(token_id) for token_id in plain["token_ids"]]
    start = next(i for i in range(4, 12) if len(pieces[i]) > 1 and len(pieces[i + 2]) > 1)
    stop = pieces[start][-1] + pieces[start + 1] + pieces[start + 2][0]
    expected = plain["text"][: plain["text"].index(stop)]
    [whole] = complete(http, **SAMPLED, seed=11, stop=stop)
    assert (whole["text"], whole["finish_reason"], whole["stop_reason"]) == (expected, "stop", stop)
    assert "".join([choice["text"] for choice in stream(http, **SAMPLED, seed=11, stop=stop)]) == expected


@pytest.mark.parametrize("text", [FAMILY, "\u6625\u306e\u6d77", "caf\u00e9 \U0001f680\U0001f680"])
def test_characters_over_several_tokens_stay_whole(http, tokenizer, text) -> None:
    """SA-25"""
    forced = tokenizer.encode(text, add_special_tokens=False)
    assert len(forced) > len(text) / 2
    fields = {"prompt": "x", "forced_token_ids": forced}
    assert complete(http, **fields)[0]["text"] == text
    assert "".join([choice["text"] for choice in stream(http, **fields)]) == text


def test_ids_at_the_edge_of_the_vocabulary(http) -> None:
    """SV-02; more in test_hostile.py, as of SV-01 and SV-20"""
    assert status(http, prompt=[VOCAB_SIZE - 1], max_tokens=1) == 200
    assert status(http, prompt=[VOCAB_SIZE], max_tokens=1) == 400
    assert status(http, prompt=[[1, 2], [3, VOCAB_SIZE]], max_tokens=1) == 400


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", "Completion"), ("/v1/chat/completions", "Chat")]
)
def test_null_is_the_default_of_every_field(http, path, body) -> None:
    """SV-05: all fields of the document, those of other servers included"""
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    fields = {"messages": MESSAGES} if body == "Chat" else {"prompt": PROMPT}
    names = set(schemas[f"{body}Body"]["properties"]) - {"model", *fields}
    assert {"max_tokens", "logprobs", "stop", "user"} <= names
    short = {"max_tokens": 1}
    for name in sorted(names):
        assert status(http, path, **{**fields, **short, name: None}) == 200, name


def test_tokens_over_the_context_are_refused_and_up_to_it_are_not(http) -> None:
    """SV-06, DI-04: the rule is 400, never fewer tokens than asked for"""
    for num_tokens in (CONTEXT, CONTEXT * 10, 2**31, 2**62, 2**63):
        assert status(http, prompt=[5], max_tokens=num_tokens) == 400
    for short_by in range(5):
        prompt = [5] * (CONTEXT - 8 - short_by)
        [choice] = complete(http, prompt=prompt, max_tokens=8, ignore_eos=True, return_token_ids=True)
        assert (len(choice["token_ids"]), choice["finish_reason"]) == (8, "length")
        assert status(http, prompt=prompt, max_tokens=9 + short_by) == 400
    assert status(http, prompt="x", max_tokens=1) == 200


def test_many_choices_are_as_many_requests(http) -> None:
    """RL-03: choice i of n is the request of its reported seed, so both ways draw from one distribution"""
    fields = {**SAMPLED, "max_tokens": 2}
    together = complete(http, **fields, n=64, seed=17)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        repeated = list(pool.map(lambda choice: complete(http, **fields, seed=choice["seed"])[0], together))
        single = list(pool.map(lambda seed: complete(http, **fields, seed=seed)[0], range(1000, 1064)))
    assert ids(repeated) == ids(together)
    assert len({choice["seed"] for choice in together}) == 64
    assert _chi_square(together, single) < 2.0
    assert _chi_square(together, [together[0]] * 64) > 2.0


def _chi_square(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> float:
    """Of two equally long samples' first tokens, per degree of freedom; rare tokens count as one."""
    counts = [Counter(tokens[0] for tokens in ids(choices)) for choices in (left, right)]
    common = {token for token in counts[0] | counts[1] if counts[0][token] + counts[1][token] >= 8}
    cells = [tuple(count[token] for count in counts) for token in common]
    cells.append(tuple(sum(n for token, n in count.items() if token not in common) for count in counts))
    return sum((a - b) ** 2 / (a + b) for a, b in cells if a + b) / max(1, len(cells) - 1)


def test_the_table_names_tests_that_are_there() -> None:
    root = Path(__file__).resolve().parents[2]
    rows = [
        line
        for line in (root / "docs/public_reports.md").read_text().splitlines()
        if line.startswith(("| S", "| BI"))
    ]
    assert len(rows) > 15
    own = Path(__file__).read_text() + (root / "tests/e2e/test_world_sizes.py").read_text()
    for row in rows:
        named = re.findall(r"`([^`]+)`", row.split("|")[-2])
        assert named, row
        for name in named:
            assert (root / "tests" / name).is_file() if name.endswith(".py") else f"def {name}(" in own, name


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"prompt": "word " * 400}, {"prompt": [5]}, {"prompt": ["a", "b", "c"]}])
def test_the_first_request_of_a_server_may_be_any(fields) -> None:
    """DI-10: long, of one token, on all ranks"""
    with running_server(2, "--max-num-batched-tokens", "64") as fresh:
        assert fresh.complete(**fields, max_tokens=4)["choices"]
