"""Text over HTTP is one text, streamed or whole, for any tokens, and logprobs speak of the same text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.engine.tokenizer import Tokenizer
from tests.moe_runtime.engine.test_tokenizer import (
    CJK,
    FAMILY,
    any_ids,
    backend_of,
    byte_level_backend,
    save,
    sentencepiece_backend,
)
from tests.moe_runtime.server.conftest import RunningServer
from tests.moe_runtime.server.fake_rank import LIMITS, NAN_ID

BACKENDS = {"byte_level": byte_level_backend, "sentencepiece": sentencepiece_backend}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
FEW = settings(max_examples=40, deadline=None)


@pytest.fixture(scope="module", params=sorted(BACKENDS))
def speaker(request, make_config, tmp_path_factory) -> Iterator[tuple[str, RunningServer, Tokenizer]]:
    """A server that says the tokens it is told to, three at a time."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    save(BACKENDS[request.param](), folder, {"chat_template": TEMPLATE})
    limits = replace(LIMITS, vocab_size=backend_of(request.param).get_vocab_size() + 3)
    running = RunningServer(make_config(model_dir=str(folder), limits=limits))
    yield request.param, running, Tokenizer.from_dir(folder)
    running.close()


def spelled(kind: str) -> st.SearchStrategy[list[int]]:
    """Ids that spell emoji, CJK and accents, byte by byte or piece by piece, among any others."""
    backend = backend_of(kind)
    texts = [FAMILY, CJK, "caf\u00e9", "\U0001f680", " the cat", "a"]
    known = st.sampled_from([backend.encode(text, add_special_tokens=False).ids for text in texts])
    parts = st.lists(st.one_of(known, any_ids(kind).map(lambda ids: ids[:6])), min_size=1, max_size=6)
    joined = parts.map(lambda lists: [i for ids in lists for i in ids] or [3])
    return joined.filter(lambda ids: NAN_ID not in ids)  # which breaks the fake ranks' logprobs


@given(data=st.data(), skip=st.booleans(), keep=st.booleans())
@FEW
def test_chunks_joined_are_the_whole_answer(speaker, data, skip, keep):
    kind, server, tokenizer = speaker
    ids = data.draw(spelled(kind))
    prompt = data.draw(spelled(kind))
    full = tokenizer.decode(ids, skip_special_tokens=skip, prompt_ids=prompt)
    where = data.draw(st.integers(0, max(0, len(full) - 1)))
    stops = data.draw(st.sampled_from([[], [full[where : where + 3] or "zz"], ["zz", full[where:] or "z"]]))
    stops = [stop for stop in stops if len(stop) <= 1024]
    body = {
        "prompt": prompt,
        "forced_token_ids": ids,
        "skip_special_tokens": skip,
        "include_stop_str_in_output": keep,
        "stop": stops,
        "logprobs": 0,
        "seed": 1,
    }
    [whole] = server.complete(**body)["choices"]
    chunks = [chunk["choices"][0] for chunk in server.stream("/v1/completions", **body)]
    joined = "".join([chunk["text"] for chunk in chunks])
    assert joined == whole["text"]
    assert {name: [x for c in chunks for x in c["logprobs"][name]] for name in whole["logprobs"]} == whole[
        "logprobs"
    ]
    assert (chunks[-1]["finish_reason"], chunks[-1]["stop_reason"]) == (
        whole["finish_reason"],
        whole["stop_reason"],
    )
    if not stops:
        assert whole["text"] == full
    _check_offsets(tokenizer, prompt, ids, skip, whole)


def _check_offsets(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool, choice: dict) -> None:
    """Each offset is the length of the text that is certain before the token, of the answer as it was before a cut."""
    logprobs = choice["logprobs"]
    decoder = tokenizer.decoder(skip_special_tokens=skip, prompt_ids=prompt)
    length = 0
    for position in range(len(logprobs["tokens"])):
        assert logprobs["text_offset"][position] == length
        length += len(decoder.step(ids[position]))


@given(data=st.data())
@FEW
def test_the_bytes_of_chat_tokens_add_up_to_the_text(speaker, data):
    kind, server, _ = speaker
    ids = data.draw(spelled(kind))
    fields = {"forced_token_ids": ids, "skip_special_tokens": False, "logprobs": True, "top_logprobs": 2}
    [choice] = server.chat(**fields)["choices"]
    stream = server.stream("/v1/chat/completions", messages=[{"role": "user", "content": "Hello"}], **fields)
    chunks = [chunk["choices"][0] for chunk in stream]
    assert "".join([chunk["delta"].get("content", "") for chunk in chunks]) == choice["message"]["content"]
    entries = choice["logprobs"]["content"]
    assert [entry for chunk in chunks for entry in chunk["logprobs"]["content"]] == entries
    assert len(entries) == len(ids)
    data_bytes = b"".join([bytes(entry["bytes"]) for entry in entries])
    assert data_bytes.decode("utf-8", "replace") == choice["message"]["content"]
    for entry in entries:
        for token in (entry, *entry["top_logprobs"]):
            text = bytes(token["bytes"]).decode("utf-8", "replace")
            assert token["token"] == text or token["token"].startswith(("bytes:", "token_id:"))
            assert ("\ufffd" in text) == token["token"].startswith("bytes:")


@pytest.mark.parametrize("text", [FAMILY, CJK, f"a{FAMILY}{CJK}caf\u00e9" * 3])
def test_no_chunk_holds_half_a_character(speaker, text):
    kind, server, _ = speaker
    ids = backend_of(kind).encode(text, add_special_tokens=False).ids
    chunks = server.stream("/v1/completions", prompt=[3], forced_token_ids=ids)
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "\ufffd" not in "".join(texts)
    assert "".join(texts).strip() == text
    for raw in texts:
        assert json.loads(json.dumps(raw)).encode("utf-8")
