"""Text streams: any split gives the same text, stop strings are cut exactly; chat templates: as transformers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.engine.request import SamplingParams
from moe_runtime.engine.text import ChatTemplate, StopMatcher, TextStream, logprob_token
from moe_runtime.engine.tokenizer import Tokenizer
from moe_runtime.errors import InvalidRequestError
from tests.moe_runtime.engine.test_tokenizer import CJK, FAMILY, SAMPLE, any_ids, tokenizer_of, valid_ids

KINDS = ["byte_level", "sentencepiece", "metaspace"]
FAST = settings(max_examples=150, deadline=None)


def cut(text: str, stops: tuple[str, ...], keep: bool) -> tuple[str, str | None, int | None]:
    """The definition: the stop string that ends first wins, the longest of those that end together."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            stop = max(met, key=len)
            return text[: end if keep else end - len(stop)], stop, end
    return text, None, None


def tokens_until(
    tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool, num_chars: int | None
) -> int:
    """Number of ids after which ``num_chars`` characters of the text are certain."""
    decoder = tokenizer.decoder(skip_special_tokens=skip, prompt_ids=prompt)
    length = 0
    for i, token_id in enumerate(ids):
        length += len(decoder.step(token_id))
        if num_chars is not None and length >= num_chars:
            return i + 1
    return len(ids)


def split_at(ids: list[int], points: list[int]) -> list[list[int]]:
    bounds = [0, *sorted(min(point, len(ids)) for point in points), len(ids)]
    return [ids[a:b] for a, b in pairwise(bounds)]


def stream_text(stream: TextStream, pushes: list[list[int]]) -> str:
    return "".join([stream.push(ids).text for ids in pushes]) + stream.finish().text


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), skip=st.booleans(), keep=st.booleans())
@FAST
def test_any_split_gives_the_decoded_text_cut_at_the_stop(kind, data, skip, keep):
    tokenizer = tokenizer_of(kind)
    prompt, ids = data.draw(valid_ids(kind)), data.draw(any_ids(kind))
    full = tokenizer.decode(ids, skip_special_tokens=skip, prompt_ids=prompt)
    pieces = st.tuples(st.integers(0, len(full)), st.integers(1, 4)).map(
        lambda t: full[t[0] : sum(t)] or "zz"
    )
    stops = tuple(data.draw(st.lists(pieces, max_size=3)))
    params = SamplingParams(stop=stops, skip_special_tokens=skip, include_stop_str_in_output=keep)
    expected, stop, end = cut(full, stops, keep)

    stream = TextStream(tokenizer, prompt, params)
    pushes = split_at(ids, data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    deltas = [stream.push(part) for part in pushes]
    last = stream.finish()
    assert "".join([delta.text for delta in deltas]) + last.text == expected
    assert last.stop == stop == stream.stop
    assert sum(delta.num_tokens for delta in deltas) == tokens_until(tokenizer, prompt, ids, skip, end)
    assert stream_text(TextStream(tokenizer, prompt, params), [ids]) == expected


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), min_tokens=st.integers(0, 8), keep=st.booleans())
@FAST
def test_the_first_min_tokens_complete_no_stop_string(kind, data, min_tokens, keep):
    tokenizer = tokenizer_of(kind)
    ids = data.draw(any_ids(kind))
    full = tokenizer.decode(ids, skip_special_tokens=True)
    stops = tuple(
        {full[i : i + n] for i, n in data.draw(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 3))))}
        - {""}
    )
    decoder = tokenizer.decoder(skip_special_tokens=True)
    num_early = len("".join([decoder.step(token_id) for token_id in ids[:min_tokens]]))
    expected, expected_stop = full, None
    # The last characters of an output without more than min_tokens tokens come with none of its tokens.
    ends = range(num_early + 1, len(full) + 1) if len(ids) > min_tokens else []
    for end in ends:
        if met := [stop for stop in stops if full[:end].endswith(stop)]:
            expected_stop = max(met, key=len)
            expected = full[: end if keep else end - len(expected_stop)]
            break
    params = SamplingParams(stop=stops, min_tokens=min_tokens, include_stop_str_in_output=keep)
    stream = TextStream(tokenizer, [], params)
    pushes = split_at(ids, data.draw(st.lists(st.integers(0, len(ids)), max_size=4)))
    assert stream_text(stream, pushes) == expected
    assert stream.stop == expected_stop


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", [SAMPLE, FAMILY * 3, CJK * 3, f"a{FAMILY}{CJK}\u00e9"])
def test_no_part_of_a_character_is_ever_shown(kind, text):
    tokenizer = tokenizer_of(kind)
    ids = [i for i in tokenizer.encode(text, add_special_tokens=False) if not tokenizer.is_special(i)]
    stream = TextStream(tokenizer, ids, SamplingParams())
    shown = [stream.push([i]).text for i in ids]
    assert "\ufffd" not in "".join(shown)
    assert stream.finish().text == ""
    assert "".join(shown) == tokenizer.decode(ids, skip_special_tokens=True, prompt_ids=ids)


def test_an_incomplete_character_at_the_end_becomes_a_replacement_character():
    tokenizer = tokenizer_of("sentencepiece")
    stream = TextStream(tokenizer, [1], SamplingParams())
    assert stream.push([3 + byte for byte in "a\u4e2d".encode()[:-1]]).text == "a"
    assert stream.finish().text == "\ufffd"


def test_a_stop_string_across_tokens_is_never_shown_in_part():
    tokenizer = tokenizer_of("byte_level")
    ids = [tokenizer.encode(character, add_special_tokens=False)[0] for character in "xxabcyy"]
    stream = TextStream(tokenizer, [0], SamplingParams(stop=("abc",)))
    deltas = [stream.push([i]) for i in ids]
    assert [delta.text for delta in deltas] == ["x", "x", "", "", "", "", ""]
    assert [delta.num_tokens for delta in deltas] == [1, 1, 1, 1, 1, 0, 0]
    assert [delta.stop for delta in deltas] == [None] * 4 + ["abc"] * 3
    assert stream.finish().text == ""


def test_a_beginning_of_a_stop_string_is_shown_once_it_cannot_become_one():
    tokenizer = tokenizer_of("byte_level")
    ids = [tokenizer.encode(character, add_special_tokens=False)[0] for character in "aab"]
    stream = TextStream(tokenizer, [0], SamplingParams(stop=("aac", "abd")))
    assert [stream.push([i]).text for i in ids] == ["", "", "a"]
    assert stream.finish().text == "ab"


def test_the_kept_stop_string_needs_no_holding_back():
    tokenizer = tokenizer_of("byte_level")
    ids = [tokenizer.encode(character, add_special_tokens=False)[0] for character in "xabcd"]
    stream = TextStream(tokenizer, [0], SamplingParams(stop=("abc",), include_stop_str_in_output=True))
    assert [stream.push([i]).text for i in ids] == ["x", "a", "b", "c", ""]


def test_stop_strings_may_be_a_list_in_any_order_or_contain_each_other():
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer.encode("one two three", add_special_tokens=False)
    for stops in (["three", "two", "wo"], ["wo", "two"], ("two t", "two")):
        stream = TextStream(tokenizer, [0], SamplingParams(stop=stops))
        assert stream_text(stream, [ids]) == "one "
        assert stream.stop == "two"


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("skip", [False, True])
def test_the_token_that_ended_the_output_counts_but_adds_no_text(keep, skip):
    tokenizer = tokenizer_of("sentencepiece")
    the, at, eos = (tokenizer._backend.token_to_id(token) for token in ("\u2581the", "at", "</s>"))
    params = SamplingParams(include_stop_str_in_output=keep, skip_special_tokens=skip)
    for last, spelled in ((at, "at"), (eos, "" if skip else "</s>")):
        stream = TextStream(tokenizer, [the], params)
        delta = stream.push([the, last], ends_with_stop_token=True)
        assert delta.num_tokens == 2
        assert delta.text + stream.finish().text == " the" + (spelled if keep else "")


def test_each_token_is_looked_at_once_however_long_the_text():
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer.encode("ab" * 400, add_special_tokens=False)
    stream = TextStream(tokenizer, ids, SamplingParams(stop=("abababac", "b" * 50)))
    calls = []
    original = tokenizer.token_bytes
    tokenizer.token_bytes = lambda i: calls.append(i) or original(i)
    try:
        assert stream_text(stream, [[i] for i in ids]) == "ab" * 400
    finally:
        del tokenizer.token_bytes
    assert calls == ids


def test_a_finished_stream_takes_no_more():
    stream = TextStream(tokenizer_of("byte_level"), [0], SamplingParams())
    stream.finish()
    with pytest.raises(RuntimeError, match="push was called after finish"):
        stream.push([1])
    with pytest.raises(RuntimeError, match="finish was called twice"):
        stream.finish()


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=5),
)
@FAST
def test_stop_matcher_agrees_with_the_definition_in_every_state(text, stops):
    matcher, state = StopMatcher(stops), 0
    for end in range(1, len(text) + 1):
        state = matcher.step(state, text[end - 1])
        read = text[:end]
        assert matcher.matched[state] == max((s for s in stops if read.endswith(s)), key=len, default="")
        assert matcher.held[state] == max(n for s in stops for n in range(len(s) + 1) if read.endswith(s[:n]))


@pytest.mark.parametrize("kind", KINDS)
def test_logprob_tokens_have_exact_bytes_and_distinct_names(kind):
    tokenizer = tokenizer_of(kind)
    entries = [logprob_token(tokenizer, i) for i in range(tokenizer.vocab_size + 2)]
    for i, entry in enumerate(entries):
        assert bytes(entry.byte_values) == tokenizer.token_bytes(i)
    assert entries[-1].token == f"token_id:{tokenizer.vocab_size + 1}"
    names: dict[str, tuple[int, ...]] = {}
    for entry in entries:
        assert names.setdefault(entry.token, entry.byte_values) == entry.byte_values
        assert "\ufffd" not in entry.token
    if kind != "metaspace":  # which spells byte tokens out
        assert names["bytes:\\xe4"] == (0xE4,)


CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
INST = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"""
MIXED = """{% set ns = namespace(n=0, text='') %}
{% for message in messages recursive %}
  {% if loop.index > 3 %}{% break %}{% endif %}
  {% if not message.content %}{% continue %}{% endif %}
  {% set ns.n = ns.n + loop.length %}
  {% set ns.text = ns.text ~ loop.last ~ (loop.previtem.role if loop.previtem is defined else '-') %}
  {% generation %}{{ message.content | trim }}{% endgeneration %}
{% else %}nobody{% endfor %}
{% set block %}{{ ns.n }}|{{ ns.text }}{% endset %}{{ block * 2 }}{{ 2 ** 10 }}
{% macro show(x) %}<{{ x }}>{% endmacro %}{{ show(messages[0].content) }}
{{ messages | tojson }}{{ {'b': '<&>', 'a': '\u00e9'} | tojson(indent=2, sort_keys=true) }}{{ tools }}
{{ '%05d' % 7 }}{{ '{:>6}|{0}'.format('x') if false else '{:>6}'.format('x') }}{{ 'x' | center(9) }}
{{ messages | map(attribute='role') | join(',') }}{{ messages[-1]['content'].split(' ')[-1] }}"""
CHATS = [
    [{"role": "user", "content": "Hello <b>you</b> & co"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": " b "},
        {"role": "user", "content": "c d"},
    ],
    [{"role": "user", "content": CJK}, {"role": "assistant", "content": FAMILY, "name": None}],
]


@pytest.mark.parametrize("source", [CHATML, INST, MIXED])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}])
def test_templates_render_as_in_transformers(source, chat, variables):
    from transformers.utils.chat_template_utils import render_jinja_template

    scope = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True, **variables}
    cleaned = [{key: value for key, value in message.items() if value is not None} for message in chat]
    (expected,), _ = render_jinja_template([cleaned], chat_template=source, **scope)
    assert ChatTemplate(source).render(chat, scope) == expected


def test_text_parts_are_joined_before_the_template():
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": " world"}]
    rendered = ChatTemplate(CHATML).render(
        [{"role": "user", "content": parts}], {"add_generation_prompt": False}
    )
    assert rendered == "<|im_start|>user\nHello world<|im_end|>\n"


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "at least one message"),
        ("hi", "must be a list"),
        ([3], r"\[0\] must be an object with a role"),
        ([{"content": "x"}], r"\[0\] must be an object with a role"),
        ([{"role": "user"}], r"\[0\].content must be a string"),
        ([{"role": "user", "content": None}], r"\[0\].content must be a string"),
        ([{"role": "user", "content": 3}], r"\[0\].content must be a string"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "part of type 'image_url'"),
        ([{"role": "user", "content": ["x"]}], "part of type 'str'"),
        ([{"role": "user", "content": "x", "extra": {1, 2}}], "must hold JSON values only"),
        ([{"role": "assistant", "content": "x"}], "Conversation roles must alternate"),
    ],
)
def test_bad_messages_are_the_requests_error(messages, match):
    with pytest.raises(InvalidRequestError, match=match) as caught:
        ChatTemplate(INST).render(messages, {})
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ messages[0].content + 3 }}",
        "{{ nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception('no') }}",
        "{% include 'x' %}",
    ],
)
def test_a_failing_template_is_the_requests_error(source):
    with pytest.raises(InvalidRequestError, match=r"cannot be rendered by the chat template: .") as caught:
        ChatTemplate(source).render(CHATS[0], {})
    assert caught.value.param == "messages"
