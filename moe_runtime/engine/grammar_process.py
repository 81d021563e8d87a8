"""Compiles grammars of strangers in a process of its own, which may come to any harm: the caller has a message then.

A frame is a length, four bytes in network order, and as many bytes of MessagePack. The first frame on standard input
is a ``GrammarSetup``; each further one a ``StructuredOutputs``, answered by a ``CompiledGrammar`` on standard output.
The process ends where a grammar takes more processor time, memory or stack than the bounds below, all of which a rank
that compiles it again has in plenty; how it has ended says which.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import sys
import time
from pathlib import Path
from typing import BinaryIO

import msgspec

from moe_runtime.engine.grammar import STACK_BYTES, GrammarCompiler, compiler_from_dir, run_on_large_stack
from moe_runtime.engine.structured_outputs import StructuredOutputs
from moe_runtime.errors import InvalidRequestError

__all__ = [
    "COMPILE_CPU_S",
    "COMPILE_MEMORY_BYTES",
    "CompiledGrammar",
    "GrammarSetup",
    "frame",
    "harm_in_words",
]

COMPILE_CPU_S = 2
"""Least processor time after which compiling is given up; the system counts whole seconds, so at most one more."""
COMPILE_MEMORY_BYTES = 512 * 2**20
"""Of address space, beyond what the process has with its vocabulary."""

_LENGTH = struct.Struct("!I")
_COMPILE_STACK_BYTES = STACK_BYTES // 8


class GrammarSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What grammars are compiled for; fields as in ``GrammarCompiler``."""

    model_dir: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class CompiledGrammar(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar in llguidance's own form, or what is wrong with it, where ``message`` is not empty."""

    text: str = ""
    compile_s: float = 0.0
    message: str = ""
    param: str = ""


def frame(message: GrammarSetup | StructuredOutputs | CompiledGrammar) -> bytes:
    """A message with its length before it."""
    data = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(data)) + data


def harm_in_words(returncode: int) -> str | None:
    """What a grammar did to the process, by its exit code as ``subprocess`` gives it; None where it is not to blame."""
    match -returncode:
        case signal.SIGXCPU:
            return f"it takes more than {COMPILE_CPU_S} s of processor time"
        case signal.SIGSEGV | signal.SIGBUS:
            return "its rules are nested too deeply"
        case signal.SIGABRT:
            return f"it takes more than {COMPILE_MEMORY_BYTES >> 20} MiB of memory"
        case _:
            return None


def _main() -> None:
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    setup = msgspec.msgpack.decode(_read(stdin), type=GrammarSetup)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    compiler = compiler_from_dir(Path(setup.model_dir), setup.vocab_size, setup.eos_token_ids)()
    run_on_large_stack(lambda: _serve(compiler, stdin, stdout), _COMPILE_STACK_BYTES)


def _serve(compiler: GrammarCompiler, stdin: BinaryIO, stdout: BinaryIO) -> None:
    address_bytes = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * os.sysconf(
        "SC_PAGE_SIZE"
    )
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_bytes + COMPILE_MEMORY_BYTES, hard))
    while data := _read(stdin):
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + COMPILE_CPU_S, hard))
        stdout.write(frame(_compile(compiler, msgspec.msgpack.decode(data, type=StructuredOutputs))))
        stdout.flush()


def _compile(compiler: GrammarCompiler, wanted: StructuredOutputs) -> CompiledGrammar:
    start_s = time.process_time()
    try:
        text = compiler.normalise(wanted)
    except InvalidRequestError as error:
        return CompiledGrammar(message=error.message, param=error.param or "structured_outputs")
    except MemoryError:
        os.abort()
    return CompiledGrammar(text=text, compile_s=time.process_time() - start_s)


def _read(stdin: BinaryIO) -> bytes:
    """The next frame; empty at the end."""
    head = stdin.read(_LENGTH.size)
    return stdin.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else b""


if __name__ == "__main__":
    _main()
