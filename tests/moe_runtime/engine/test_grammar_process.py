"""The process that compiles: answers in frames, and an end that says what a grammar has done to it."""

from __future__ import annotations

import itertools
import signal
import struct
import subprocess
import sys

import msgspec
import pytest

from moe_runtime.engine.grammar_process import CompiledGrammar, GrammarSetup, frame, harm_in_words
from moe_runtime.engine.structured_outputs import StructuredOutputs
from tests.moe_runtime.engine.test_grammar import BUILTIN, EOS

SETUP = GrammarSetup(model_dir=str(BUILTIN), vocab_size=2048, eos_token_ids=EOS)


def answers(data: bytes) -> list[CompiledGrammar]:
    found = []
    while data:
        (length,) = struct.unpack("!I", data[:4])
        found.append(msgspec.msgpack.decode(data[4 : 4 + length], type=CompiledGrammar))
        data = data[4 + length :]
    return found


def run(*wanted: StructuredOutputs, code: str = "") -> subprocess.CompletedProcess[bytes]:
    data = frame(SETUP) + b"".join(frame(w) for w in wanted)
    program = ["-m", "moe_runtime.engine.grammar_process"] if not code else ["-c", code]
    return subprocess.run([sys.executable, "-P", *program], input=data, capture_output=True, check=False)


def test_each_frame_is_answered_and_the_end_of_input_is_the_end():
    done = run(
        StructuredOutputs(json={"type": "object"}),
        StructuredOutputs(regex="(a"),
        StructuredOutputs(grammar='root ::= "a" [b-d]*'),
    )
    good, bad, gbnf = answers(done.stdout)
    assert done.returncode == 0, done.stderr
    assert "json_schema" in good.text
    assert good.compile_s >= 0
    assert not good.message
    assert bad.message.startswith("structured_outputs.regex cannot be compiled: ")
    assert bad.param == "structured_outputs.regex"
    assert "lark_grammar" in gbnf.text or "start:" in gbnf.text


def test_a_chain_of_rules_that_is_too_deep_ends_the_process_alone():
    names = [f"r{i}" for i in range(7000)]
    chain = "\n".join(f"{a}:{b}" for a, b in itertools.pairwise(names))
    done = run(StructuredOutputs(regex="a"), StructuredOutputs(grammar=f'start:r0\n{chain}\nr6999:"c"'))
    assert len(answers(done.stdout)) == 1
    assert harm_in_words(done.returncode) == "its rules are nested too deeply"


def test_memory_is_bounded():
    code = (
        "import moe_runtime.engine.grammar_process as p; p.COMPILE_MEMORY_BYTES = 2**20; "
        "p._compile = lambda *_: bytearray(2**26); p._main()"
    )
    assert b"MemoryError" in run(StructuredOutputs(regex="a"), code=code).stderr


def test_it_loads_no_torch():
    code = "import moe_runtime.engine.grammar_process, sys; sys.exit('torch' in sys.modules)"
    assert run(code=code).returncode == 0


@pytest.mark.parametrize(
    ("returncode", "words"),
    [
        (-signal.SIGXCPU, "it takes more than 2 s of processor time"),
        (-signal.SIGSEGV, "its rules are nested too deeply"),
        (-signal.SIGBUS, "its rules are nested too deeply"),
        (-signal.SIGABRT, "it takes more than 512 MiB of memory"),
        (-signal.SIGKILL, None),
        (3, None),
    ],
)
def test_how_it_ended_says_why(returncode, words):
    assert harm_in_words(returncode) == words
