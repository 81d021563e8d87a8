"""Threads of grammars: nothing waits for them longer than it is told to, and cheap work overtakes expensive work."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from moe_runtime.engine import grammar_threads
from moe_runtime.engine.grammar_threads import GrammarThreads, open_grammars, with_grammars
from moe_runtime.engine.request import RequestLimits, SamplingParams, make_request
from moe_runtime.engine.structured_outputs import Grammar, StructuredOutputs
from moe_runtime.errors import InvalidRequestError
from tests.moe_runtime.engine.test_grammar import EOS, TOKENIZER

VOCAB = 2048
LIMITS = RequestLimits(vocab_size=VOCAB, max_model_len=100, max_kv_tokens=100, eos_token_ids=EOS)


class HeldCompiler:
    """Its matchers are made when their grammar is released."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.released: dict[str, threading.Event] = {}
        self.started = threading.Event()

    def hold(self, *texts: str) -> None:
        self.released |= {text: threading.Event() for text in texts}

    def matcher(self, text: str):
        self.started.set()
        if text in self.released:
            assert self.released[text].wait(30)
        self.order.append(text)
        raise InvalidRequestError(f"made {text}")


@pytest.fixture
def held(monkeypatch):
    monkeypatch.setattr(grammar_threads, "NUM_COMPILE_THREADS", 1)
    compiler = HeldCompiler()
    threads = GrammarThreads(lambda: compiler, VOCAB, max_wait_s=0.01)  # type: ignore[arg-type,return-value]
    yield compiler, threads
    for event in compiler.released.values():
        event.set()
    threads.close()


def test_waiting_is_bounded_and_ends_with_the_work(held):
    compiler, threads = held
    compiler.hold("slow")
    slow = threads.open(Grammar(text="slow"), EOS)
    start_s = time.monotonic()
    threads.wait([slow])
    assert slow.is_working
    assert time.monotonic() - start_s >= 0.01
    compiler.released["slow"].set()
    while slow.is_working:  # each wait is bounded, so this may take several
        threads.wait([slow])
    end = slow.end(None, 0)
    assert end is not None
    assert end.error == "made slow"
    threads.wait([slow])


def test_who_runs_does_not_wait_for_what_compiles(held, monkeypatch):
    compiler, threads = held
    compiler.hold("slow")
    slow = threads.open(Grammar(text="slow"), EOS)
    waits = []
    monkeypatch.setattr(threads._changed, "wait_for", lambda done, limit_s: waits.append(limit_s))
    threads.wait([], [slow], is_busy=True)
    assert waits == []
    threads.wait([], [slow])
    assert waits == [0.01]
    threads._max_wait_s = None  # offline, where schedules repeat
    threads.wait([], [slow], is_busy=True)
    assert waits == [0.01, None]


def test_the_cheapest_grammar_is_compiled_first(held):
    compiler, threads = held
    compiler.hold("first")
    first = threads.open(Grammar(text="first", compile_s=1.0), EOS)
    assert compiler.started.wait(30)  # the only thread is taken
    others = [threads.open(Grammar(text=f"{cost}", compile_s=cost), EOS) for cost in (1.5, 0.1, 0.5, 0.1)]
    compiler.released["first"].set()
    while any(g.is_working for g in (first, *others)):
        threads.wait([first, *others])
    assert compiler.order == ["first", "0.1", "0.1", "0.5", "1.5"]


def test_masks_do_not_wait_for_compilers(held):
    compiler, threads = held
    compiler.hold("slow")
    threads.open(Grammar(text="slow"), EOS)
    assert compiler.started.wait(30)
    done = threading.Event()
    threads._to_mask.put(0.0, done.set)
    assert done.wait(30)


def test_the_compiler_is_made_once(monkeypatch):
    threads = open_grammars(TOKENIZER, VOCAB, EOS)
    assert threads is not None
    assert threads.compiler is threads.compiler
    assert open_grammars(None, VOCAB, EOS) is None


def request(**fields):
    wanted = StructuredOutputs(**fields) if fields else None
    return make_request("r", [1, 2], SamplingParams(structured_outputs=wanted), LIMITS)


def test_requests_get_their_grammars_each_compiled_once(monkeypatch):
    threads = open_grammars(TOKENIZER, VOCAB, EOS)
    assert threads is not None
    calls = []
    plain = threads.compiler.normalise
    monkeypatch.setattr(threads.compiler, "normalise", lambda wanted: calls.append(wanted) or plain(wanted))
    one, none, same, other = with_grammars(
        [request(regex="a+"), request(), request(regex="a+"), request(regex="b+")], threads
    )
    assert len(calls) == 2
    assert none.grammar is None
    assert one.grammar is not None
    assert one.grammar == same.grammar != other.grammar
    assert one.grammar.compile_s >= 0
    with pytest.raises(InvalidRequestError, match=r"(?s)cannot be compiled: .*unclosed group"):
        with_grammars([request(regex="(")], threads)


def test_without_a_tokenizer_a_grammar_is_refused():
    plain = [request()]
    assert with_grammars(plain, None) == plain
    with pytest.raises(
        InvalidRequestError, match="structured_outputs need a tokenizer, and the checkpoint has none"
    ):
        with_grammars([request(regex="a")], None)


def test_the_deepest_grammar_that_fits_is_compiled_and_its_masks_are_made():
    """In a thread of usual size this would end the process."""
    threads = open_grammars(TOKENIZER, VOCAB, EOS)
    assert threads is not None
    names = [f"{'abcdefghij'[i // 1000 % 10]}{i % 1000}" for i in range(9000)]
    chain = "\n".join(f"{a}:{b}" for a, b in itertools.pairwise(names))
    grammar = f'start:{names[0]}\n{chain}\n{names[-1]}:"c"'
    (made,) = with_grammars([request(grammar=grammar)], threads)
    assert made.grammar is not None
    opened = threads.open(made.grammar, EOS)
    threads.wait([opened])
    assert opened.end(None, 0) is None
    assert opened.is_ready_for(0)
    threads.close()
