"""Threads that compile grammars and make masks, so that no step waits long for either.

llguidance gives Python's interpreter lock back while it works. Compiling has threads of its own, cheapest grammar
first, so that an expensive one delays neither the masks nor the cheap ones of others.

A server makes its compiler before it serves, not in such a thread when the first grammar comes: reading the tokenizer
and making llguidance's form of the vocabulary each keep the lock to their end, 0.36 and 0.30 s for 151,669 tokens
(measured on a CPU core: no other thread ran), and the list of the tokens' bytes takes as long again in Python. No step
of the rank could begin meanwhile, and so none of the ranks that work with it.
"""

from __future__ import annotations

import functools
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from moe_runtime.engine.grammar import GrammarCompiler, run_on_large_stack, start_on_large_stack
from moe_runtime.engine.request import Request
from moe_runtime.engine.sequence_grammar import SequenceGrammar
from moe_runtime.engine.structured_outputs import Grammar, StructuredOutputs
from moe_runtime.engine.tokenizer import Tokenizer
from moe_runtime.errors import InvalidRequestError

__all__ = ["MASK_WAIT_S", "GrammarThreads", "open_grammars", "with_grammars"]

MASK_WAIT_S = 0.002
"""Most of a served step's time that goes into waiting for masks; a sequence without one sits the step out."""

NUM_COMPILE_THREADS = 2
MAX_MASK_THREADS = 4


class GrammarThreads:
    """One rank's.

    Args:
        make_compiler: Called once, by the first use of ``compiler``.
        vocab_size: Of the model.
        max_wait_s: Most of a step's time that ``wait`` takes; None is all that the work takes.
    """

    def __init__(
        self, make_compiler: Callable[[], GrammarCompiler], vocab_size: int, max_wait_s: float | None = None
    ) -> None:
        self._vocab_size = vocab_size
        self._max_wait_s = max_wait_s
        self._make_compiler = make_compiler
        self._compiler: GrammarCompiler | None = None
        self._compiler_lock = threading.Lock()
        self._changed = threading.Condition()
        self._to_compile = _Workers("grammar-compile", NUM_COMPILE_THREADS)
        self._to_mask = _Workers("grammar-mask", min(MAX_MASK_THREADS, os.cpu_count() or 1))

    @property
    def compiler(self) -> GrammarCompiler:
        """The checkpoint's."""
        with self._compiler_lock:
            if self._compiler is None:
                self._compiler = self._make_compiler()
            return self._compiler

    def open(self, grammar: Grammar, eos_token_ids: Sequence[int]) -> SequenceGrammar:
        """Start a sequence's grammar; its first mask is on its way.

        Args:
            grammar: Of the request.
            eos_token_ids: To be chosen where the output may end; none where it does not end by one.
        """
        opened = SequenceGrammar(
            lambda: self.compiler.matcher(grammar.text),
            eos_token_ids,
            self._vocab_size,
            compile_later=functools.partial(self._to_compile.put, grammar.compile_s),
            run_later=functools.partial(self._to_mask.put, 0.0),
            changed=self._changed,
        )
        opened.start()
        return opened

    def wait(
        self,
        grammars: Sequence[SequenceGrammar],
        later: Sequence[SequenceGrammar] = (),
        *,
        is_busy: bool = False,
    ) -> None:
        """Wait until none of these is at work, for ``max_wait_s`` at most.

        Args:
            grammars: Of sequences that run.
            later: Of sequences that wait to, some of which may take long to compile.
            is_busy: Whether some sequence runs: then ``later`` is waited for only where there is no limit.
        """
        if self._max_wait_s is None or not is_busy:
            grammars = [*grammars, *later]
        if any(grammar.is_working for grammar in grammars):
            with self._changed:
                self._changed.wait_for(lambda: not any(g.is_working for g in grammars), self._max_wait_s)

    def close(self) -> None:
        """Let the threads end."""
        self._to_compile.close()
        self._to_mask.close()


def open_grammars(
    tokenizer: Tokenizer | None,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    max_wait_s: float | None = None,
) -> GrammarThreads | None:
    """For one rank of a model; None where it has no tokenizer. Arguments as for ``GrammarCompiler`` and the threads."""
    if tokenizer is None:
        return None
    return GrammarThreads(
        lambda: GrammarCompiler(tokenizer, vocab_size, eos_token_ids), vocab_size, max_wait_s
    )


def with_grammars(requests: Sequence[Request], grammars: GrammarThreads | None) -> list[Request]:
    """Requests with the grammars that they ask for, each compiled here, to its end.

    Raises:
        InvalidRequestError: one cannot be compiled, or there is no tokenizer.
    """
    compiled: list[tuple[StructuredOutputs, Grammar]] = []

    def compile_one(wanted: StructuredOutputs) -> Grammar:
        if grammars is None:
            raise InvalidRequestError(
                "structured_outputs need a tokenizer, and the checkpoint has none", param="structured_outputs"
            )
        found = next((grammar for known, grammar in compiled if known == wanted), None)
        if found is None:
            start_s = time.process_time()
            text = grammars.compiler.normalise(wanted)
            found = Grammar(text=text, compile_s=time.process_time() - start_s)
            compiled.append((wanted, found))
        return found

    wanted = {
        i: w for i, request in enumerate(requests) if (w := request.params.structured_outputs) is not None
    }
    result = list(requests)

    def compile_all() -> None:
        for i, structured_outputs in wanted.items():
            result[i] = replace(requests[i], grammar=compile_one(structured_outputs))

    if wanted:
        run_on_large_stack(compile_all)
    return result


class _Workers:
    """Threads that take work from one queue, least cost first; they start with the first piece of work."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._name = name
        self._num_threads = num_threads
        self._queue: queue.PriorityQueue[tuple[float, int, Callable[[], None] | None]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._is_started = False

    def put(self, cost: float, work: Callable[[], None]) -> None:
        if not self._is_started:
            self._is_started = True
            for index in range(self._num_threads):
                start_on_large_stack(self._run, f"{self._name}-{index}")
        self._queue.put((cost, next(self._order), work))

    def close(self) -> None:
        for _ in range(self._num_threads if self._is_started else 0):
            self._queue.put((-1.0, next(self._order), None))
        self._is_started = False

    def _run(self) -> None:
        while (work := self._queue.get()[2]) is not None:
            work()
