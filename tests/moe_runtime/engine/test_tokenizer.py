"""Tokenizer: loading, exact bytes, decoding against the tokenizers library, special tokens, sampling defaults."""

from __future__ import annotations

import functools
import json
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

import moe_runtime.builtin
from moe_runtime.engine.tokenizer import Tokenizer
from moe_runtime.errors import CheckpointError, InvalidRequestError

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"  # three emoji joined by ZWJ
CJK = "\u4e2d\u6587\u5b57"
SAMPLE = f"the cat sat on the mat. The cat's {CJK} mat {FAMILY} caf\u00e9 \u00fcber\n"
FAST = settings(max_examples=150, deadline=None)


def byte_level_backend() -> Backend:
    """GPT-2 style: every byte has a token; special, added and oddly spelled added tokens at the end."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    backend.train_from_iterator([SAMPLE] * 4, trainer)
    backend.add_tokens([AddedToken("<think>"), AddedToken(" sp\u4e2d"), AddedToken("\u00e9\u0120")])
    return backend


def sentencepiece_backend() -> Backend:
    """Llama-2 / Mixtral style: U+2581 for spaces, byte fallback, one leading space stripped from a text."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [
        "\u2581",
        *"abcdefghijklmnopqrstuvwxyz.",
        "\u4e2d",
        "\u00e9",
        "\u2581t",
        "\u2581th",
        "\u2581the",
        "at",
    ]
    pieces += ["\u2581\u2581"]
    merges = [("\u2581", "t"), ("\u2581t", "h"), ("\u2581th", "e"), ("a", "t"), ("\u2581", "\u2581")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Backend(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    stages = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    backend.decoder = decoders.Sequence(stages)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def metaspace_backend() -> Backend:
    backend = sentencepiece_backend()
    backend.decoder = decoders.Metaspace()
    return backend


def joined_backend() -> Backend:
    """No decoder at all: tokens are joined with spaces."""
    backend = Backend(
        models.WordLevel({"<unk>": 0, "the": 1, "cat": 2, "\u4e2d": 3, "<s>": 4}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>"])
    return backend


BACKENDS = {
    "byte_level": byte_level_backend,
    "sentencepiece": sentencepiece_backend,
    "metaspace": metaspace_backend,
    "joined": joined_backend,
}


@functools.cache
def backend_of(kind: str) -> Backend:
    return BACKENDS[kind]()


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    return Tokenizer(BACKENDS[kind](), special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


def valid_ids(kind: str) -> st.SearchStrategy[list[int]]:
    """Ids whose byte tokens spell whole characters."""
    backend = backend_of(kind)
    size = backend.get_vocab_size()
    is_byte = [(backend.id_to_token(i) or "").startswith("<0x") for i in range(size)]
    plain = st.sampled_from([[i] for i in range(size) if not is_byte[i]] + [[size + 3]])
    if not any(is_byte):
        return st.lists(plain, max_size=30).map(lambda parts: [i for part in parts for i in part])
    spelled = st.sampled_from([*"a\u00e9\u4e2d \U0001f468\u200d"]).map(
        lambda text: [backend.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    )
    return st.lists(st.one_of(plain, spelled), max_size=30).map(
        lambda parts: [i for part in parts for i in part]
    )


def any_ids(kind: str) -> st.SearchStrategy[list[int]]:
    """Any ids: halves of characters, bytes in wrong order, special tokens, ids beyond the vocabulary."""
    return st.lists(st.integers(0, backend_of(kind).get_vocab_size() + 2), max_size=40)


def save(backend: Backend, folder: Path, config: dict | None = None, **files: object) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


@pytest.mark.parametrize("kind", sorted(BACKENDS))
@given(data=st.data(), skip=st.booleans())
@FAST
def test_decode_equals_the_library_where_bytes_are_valid(kind, data, skip):
    ids = data.draw(any_ids(kind) if kind == "byte_level" else valid_ids(kind))
    expected = backend_of(kind).decode(ids, skip_special_tokens=skip)
    assert tokenizer_of(kind).decode(ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@given(data=st.data(), skip=st.booleans())
@FAST
def test_steps_are_those_of_the_library_s_stream_or_sooner(kind, data, skip):
    """Sooner, because the library's looks at text and not at bytes; where characters are whole both say the same."""
    backend, tokenizer = backend_of(kind), tokenizer_of(kind)
    texts = st.lists(st.sampled_from([SAMPLE, FAMILY, CJK, " the", "caf\u00e9", "a"]), min_size=1, max_size=5)
    ids = backend.encode("x" + "".join(data.draw(texts)), add_special_tokens=False).ids
    theirs = decoders.DecodeStream(skip_special_tokens=skip)
    ours = tokenizer.decoder(skip_special_tokens=skip)
    said, said_by_library = "", ""
    for token_id in ids:
        said += ours.step(token_id)
        said_by_library += theirs.step(backend, token_id) or ""
        assert said.startswith(said_by_library)
    assert said == said_by_library


@pytest.mark.parametrize("kind", sorted(BACKENDS))
@given(data=st.data(), skip=st.booleans())
@FAST
def test_text_of_an_output_is_the_continuation_of_the_prompts_text(kind, data, skip):
    prompt, ids = data.draw(valid_ids(kind)), data.draw(valid_ids(kind))
    tokenizer = tokenizer_of(kind)
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode(prompt + ids, skip_special_tokens=skip)
    text = tokenizer.decode(ids, skip_special_tokens=skip, prompt_ids=prompt)
    if not before.endswith("\ufffd"):
        assert before + text == whole


@pytest.mark.parametrize("kind", sorted(BACKENDS))
@given(data=st.data())
@FAST
def test_steps_add_up_to_the_decoded_text(kind, data):
    ids = data.draw(any_ids(kind))
    tokenizer = tokenizer_of(kind)
    decoder = tokenizer.decoder(skip_special_tokens=False)
    pieces = [decoder.step(i) for i in ids]
    assert "".join(pieces) + decoder.finish() == tokenizer.decode(ids, skip_special_tokens=False)


@given(data=st.data())
@FAST
def test_token_bytes_of_a_byte_level_tokenizer_add_up_to_the_text(data):
    tokenizer = tokenizer_of("byte_level")
    ids = data.draw(any_ids("byte_level"))
    joined = b"".join(tokenizer.token_bytes(i) for i in ids)
    assert joined.decode("utf-8", "replace") == tokenizer.decode(ids, skip_special_tokens=False)


@given(text=st.text(max_size=40))
@FAST
def test_text_survives_encoding_and_decoding(text):
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode()


def test_a_leading_space_is_dropped_only_at_the_start_of_a_text():
    tokenizer = tokenizer_of("sentencepiece")
    the = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.decode(the, skip_special_tokens=True) == "the"
    assert tokenizer.decode(the, skip_special_tokens=True, prompt_ids=the) == " the"
    assert tokenizer.decode(the, skip_special_tokens=True, prompt_ids=[1]) == "the"
    assert tokenizer.decode(the, skip_special_tokens=False, prompt_ids=[1]) == " the"
    assert tokenizer.token_text(the[0]) == " the"


def test_invalid_byte_fallback_keeps_the_valid_characters_of_the_run():
    tokenizer = tokenizer_of("sentencepiece")
    ids = [3 + byte for byte in ("\u4e2d".encode() + b"\xe4\xb8" + b"a" + b"\xff\xb8")]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "\u4e2d\ufffda\ufffd\ufffd"


def test_bytes_that_the_prompt_left_incomplete_do_not_reach_the_output():
    tokenizer = tokenizer_of("sentencepiece")
    first, *rest = [3 + byte for byte in "\u4e2d".encode()]
    assert (
        tokenizer.decode([*rest, 3 + ord("a")], skip_special_tokens=True, prompt_ids=[first])
        == "\ufffd\ufffda"
    )


@pytest.mark.parametrize("kind", sorted(BACKENDS))
def test_ids_beyond_the_vocabulary_are_empty(kind):
    tokenizer = tokenizer_of(kind)
    for token_id in (tokenizer.vocab_size, tokenizer.vocab_size + 1000, 2**40, -1):
        assert tokenizer.token_bytes(token_id) == b""
        assert tokenizer.token_text(token_id) == ""
        assert tokenizer.decode([token_id], skip_special_tokens=False) == ""


def test_byte_tokens_are_exact_bytes():
    assert [tokenizer_of("sentencepiece").token_bytes(3 + b) for b in range(256)] == [
        bytes([b]) for b in range(256)
    ]
    tokenizer = tokenizer_of("byte_level")
    singles = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    assert {bytes([b]) for b in range(256)} <= singles


def test_unpaired_surrogates_are_refused_by_name():
    with pytest.raises(InvalidRequestError, match="messages must be valid Unicode: character 1 ") as caught:
        tokenizer_of("byte_level").encode("a\ud83d", add_special_tokens=False, param="messages")
    assert caught.value.param == "messages"


def test_stored_truncation_and_padding_do_not_shorten_or_pad_prompts(tmp_path):
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = Tokenizer.from_dir(save(backend, tmp_path))
    ids = tokenizer.encode(SAMPLE, add_special_tokens=True)
    assert tokenizer.decode(ids, skip_special_tokens=False) == SAMPLE


CONFIGS = [
    {},
    {"bos_token": "<s>", "eos_token": "</s>"},
    {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False},
    {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True},
    {"bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": None},
    {"eos_token": "at", "add_bos_token": True},
]


@pytest.mark.parametrize("config", CONFIGS)
def test_special_tokens_are_added_and_skipped_as_transformers_does(config, tmp_path):
    from transformers import PreTrainedTokenizerFast

    save(sentencepiece_backend(), tmp_path, {**config, "tokenizer_class": "PreTrainedTokenizerFast"})
    expected = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenizer = Tokenizer.from_dir(tmp_path)
    for text in ("", "the cat", " the</s> \u4e2d\U0001f468"):
        for special in (False, True):
            ids = tokenizer.encode(text, add_special_tokens=special)
            assert ids == expected.encode(text, add_special_tokens=special)
            for skip in (False, True):
                assert tokenizer.decode(ids, skip_special_tokens=skip) == expected.decode(
                    ids, skip_special_tokens=skip
                )


def test_special_tokens_map_and_added_tokens_decoder_are_honoured(tmp_path):
    backend = byte_level_backend()
    new_id = backend.get_vocab_size()
    config = {"added_tokens_decoder": {str(new_id): {"content": "<|tool|>", "special": True}}}
    save(backend, tmp_path, config, special_tokens_map={"eos_token": {"content": "<|im_end|>"}})
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.encode("a<|tool|>", add_special_tokens=False)[-1] == new_id
    assert tokenizer.is_special(new_id)
    assert tokenizer.token(tokenizer.eos_token_id) == "<|im_end|>"
    assert tokenizer.bos_token_id is None


def test_an_added_token_with_another_id_is_refused(tmp_path):
    save(byte_level_backend(), tmp_path, {"added_tokens_decoder": {"7": {"content": "<|tool|>"}}})
    with pytest.raises(
        CheckpointError, match=r"tokenizer_config.json: added_tokens_decoder gives '<\|tool\|>' id 7"
    ):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer", "{"),
        ("tokenizer", "{}"),
        ("tokenizer_config", "["),
        ("tokenizer_config", "[]"),
        ("tokenizer_config", '{"eos_token": 3}'),
        ("tokenizer_config", '{"chat_template": [{"name": "default"}]}'),
        ("tokenizer_config", '{"chat_template": 3}'),
        ("tokenizer_config", '{"added_tokens_decoder": {"1": {"special": true}}}'),
        ("tokenizer_config", '{"added_tokens_decoder": {"x": {"content": "a"}}}'),
        ("special_tokens_map", "nonsense"),
    ],
)
def test_a_malformed_file_is_named(name, text, tmp_path):
    save(byte_level_backend(), tmp_path, None, **{name: text})
    with pytest.raises(CheckpointError, match=f"{name}.json"):
        Tokenizer.from_dir(tmp_path)


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer.json is missing"):
        Tokenizer.from_dir(tmp_path)


def test_a_decoder_that_is_not_implemented_is_named(tmp_path):
    backend = byte_level_backend()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match="WordPiece"):
        Tokenizer.from_dir(save(backend, tmp_path))


def test_chat_template_file_wins_over_the_config_and_tools_pick_their_own(tmp_path):
    entries = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    save(byte_level_backend(), tmp_path, {"chat_template": entries})
    messages = [{"role": "user", "content": "hi"}]
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.apply_chat_template(messages) == "D"
    assert tokenizer.apply_chat_template(messages, tools=[{"type": "function"}]) == "T"
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}{{ eos_token }}")
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    assert Tokenizer.from_dir(tmp_path).apply_chat_template(messages) == "hi<|im_end|>"


def test_a_missing_chat_template_is_the_requests_error(tmp_path):
    tokenizer = Tokenizer.from_dir(save(byte_level_backend(), tmp_path))
    with pytest.raises(InvalidRequestError, match="no chat template") as caught:
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert caught.value.param == "messages"


def test_a_hopeless_text_is_refused_without_encoding_it() -> None:
    tokenizer = Tokenizer.from_dir(Path(moe_runtime.builtin.__file__).parent)
    with pytest.raises(InvalidRequestError, match="9000000 bytes of text") as raised:
        tokenizer.encode("a" * 9_000_000, add_special_tokens=True, max_tokens=1024)
    assert raised.value.code == "context_length_exceeded"
    text = "To be or not to be " * 20
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert tokenizer.encode(text, add_special_tokens=True, max_tokens=len(ids)) == ids


def test_encoding_in_a_thread_does_not_stop_the_others() -> None:
    tokenizer = Tokenizer.from_dir(Path(moe_runtime.builtin.__file__).parent)
    thread = threading.Thread(
        target=tokenizer.encode, args=("a" * 2_000_000,), kwargs={"add_special_tokens": True}
    )
    thread.start()
    num_turns = 0
    while thread.is_alive():
        thread.join(0.001)
        num_turns += 1
    assert num_turns > 3  # one that held the interpreter's lock would leave a single turn


TRIMS = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[end]{% endfor %}"


@pytest.mark.parametrize("template", [TRIMS, TRIMS.replace("m.content | trim", "m.content")])
@pytest.mark.parametrize("content", ["It is", "[end] It is", "CONTINUEX CONTINUE"])
def test_a_conversation_is_cut_where_its_last_message_ends_as_in_transformers(template, content, tmp_path):
    from transformers.utils.chat_template_utils import render_jinja_template

    save(byte_level_backend(), tmp_path, {"chat_template": template})
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
    (expected,), _ = render_jinja_template([messages], chat_template=template, continue_final_message=True)
    tokenizer = Tokenizer.from_dir(tmp_path)
    found = tokenizer.apply_chat_template(messages, add_generation_prompt=False, continue_final_message=True)
    assert found == expected == f"[user]{content}[end][assistant]{content}"


def test_space_at_the_end_of_a_message_to_continue_is_kept(tmp_path):
    save(byte_level_backend(), tmp_path, {"chat_template": TRIMS})
    flags = {"add_generation_prompt": False, "continue_final_message": True}
    messages = [{"role": "assistant", "content": "It is "}]
    assert Tokenizer.from_dir(tmp_path).apply_chat_template(messages, **flags) == "[assistant]It is "


@pytest.mark.parametrize(
    ("messages", "template", "match"),
    [
        ([{"role": "user", "content": "x"}], TRIMS, "must end with one of the assistant"),
        ([{"role": "assistant", "content": ""}], TRIMS, "must end with text"),
        ([{"role": "assistant"}], TRIMS, "must end with text"),
        ([], TRIMS, "must end with one of the assistant"),
        ([{"role": "assistant", "content": "x"}], "none", "the chat template leaves out the last one"),
    ],
)
def test_what_cannot_be_continued_is_refused(messages, template, match, tmp_path):
    save(byte_level_backend(), tmp_path, {"chat_template": template})
    tokenizer = Tokenizer.from_dir(tmp_path)
    with pytest.raises(InvalidRequestError, match=match) as caught:
        tokenizer.apply_chat_template(messages, add_generation_prompt=False, continue_final_message=True)
    assert caught.value.param == "messages"
    with pytest.raises(InvalidRequestError, match="must be given with add_generation_prompt false"):
        tokenizer.apply_chat_template(messages, continue_final_message=True)


def test_a_bad_word_has_a_form_with_a_space_and_one_without():
    tokenizer = tokenizer_of("byte_level")

    def encode(text):
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    for word in ("ab", " ab", "  ab"):
        assert tokenizer.bad_word_ids(word) == [encode("ab"), encode(" ab")]
    assert tokenizer.bad_word_ids(" ") == [encode(" ")]
    with pytest.raises(InvalidRequestError, match="bad_words must be valid Unicode"):
        tokenizer.bad_word_ids("\ud800")
