"""``python -m moe_runtime.generate``: a file of prompts in, a file of results out, in the same order.

Under torchrun every rank reads the input, rank 0 writes the output: beside its place first, which it takes when it is
complete.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import msgspec
import torch

from moe_runtime.comm.groups import RankGroup
from moe_runtime.config import GenerateConfig
from moe_runtime.engine.llm import LLM, RequestOutput
from moe_runtime.engine.messages import TokenLogprobs
from moe_runtime.engine.request import SamplingParams
from moe_runtime.errors import CapacityError, CheckpointError, InvalidRequestError, InvarianceError, PeerError
from moe_runtime.exit_codes import EXIT_NO_FIT, EXIT_OK, EXIT_SELF_CHECK
from moe_runtime.launch.cli import parse_config, print_error, usage_error
from moe_runtime.launch.distributed import close_ranks, init_ranks
from moe_runtime.launch.leave import leave_at_once, meet_processes
from moe_runtime.launch.logs import setup_logging
from moe_runtime.launch.progress import progress_bar
from moe_runtime.server.processes import ProcessId

__all__ = ["main", "open_output", "parse_line", "prompt_of", "read_lines", "result_line", "run_offline"]

_PARAMS = {f.name for f in fields(SamplingParams)}


def main(args: Sequence[str] | None = None) -> int:
    """Generate for every line of the input. Returns the exit code."""
    config = parse_config(GenerateConfig, args, prog="moe_runtime.generate")

    def run(group: RankGroup) -> LLM:
        lines = read_lines(config.input)
        parsed = [parse_line(line, number) for number, line in enumerate(lines, 1) if line.strip()]
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(open_output(config.output)) if group.rank == 0 else None
            llm, results = _generate(config, parsed, group)
            if output is not None:
                output.write(b"".join(result_line(result) + b"\n" for result in results))
                output.flush()
        return llm

    return run_offline(config.engine.device, config.input, config.output, run)


def run_offline(
    device: Literal["auto", "cpu", "cuda"], source: Path, target: Path, run: Callable[[RankGroup], LLM]
) -> int:
    """Run a program that reads a file and writes another, on all ranks. Returns the exit code.

    Args:
        device: ``EngineConfig.device``.
        source: What it reads.
        target: What it writes; another file.
        run: The program; told this rank's group, and gives the stopped engine it made.
    """
    processes: list[ProcessId] = []
    try:
        _check_distinct(source, target)
        group = init_ranks(device)
        setup_logging(group.rank)
        processes = meet_processes(group)
        llm = run(group)
        close_ranks(llm.group, llm.model.tensor_parallel)
    except PeerError as error:
        leave_at_once(error, processes)
    except InvarianceError as error:
        print_error(str(error))
        return EXIT_SELF_CHECK
    except (CapacityError, MemoryError, torch.OutOfMemoryError) as error:
        print_error(f"the model does not fit: {error}")
        return EXIT_NO_FIT
    except InvalidRequestError as error:
        usage_error(error.message)
    except (CheckpointError, ValueError, OSError) as error:
        usage_error(str(error))
    return EXIT_OK


def parse_line(line: str, number: int) -> tuple[str | list[int] | list[dict[str, str]], dict[str, Any]]:
    """A prompt (text, token ids, or chat messages) and the fields of ``SamplingParams`` that one line of JSON sets.

    Raises:
        ValueError: naming the line, field, value and rule.
    """
    try:
        fields_given = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise ValueError(f"line {number} is not JSON: {error}") from None
    if not isinstance(fields_given, dict) or ("prompt" in fields_given) == ("messages" in fields_given):
        raise ValueError(f"line {number} must be an object with either prompt or messages")
    prompt = fields_given.pop("prompt", None)
    messages = fields_given.pop("messages", None)
    unknown = sorted(set(fields_given) - _PARAMS)
    if unknown:
        raise ValueError(f"line {number}: {unknown[0]} is no sampling parameter; known are {sorted(_PARAMS)}")
    try:
        if prompt is not None:
            content: Any = msgspec.convert(prompt, str | list[int])
        else:
            content = msgspec.convert(messages, list[dict[str, str]])
        params = msgspec.convert(fields_given, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        raise ValueError(f"line {number}: {error}") from None
    return content, {name: getattr(params, name) for name in fields_given}


def result_line(result: RequestOutput) -> bytes:
    """One result as a line of JSON: ``prompt_token_ids``, ``prompt_logprobs`` and ``choices``."""
    choices = [
        {
            "text": output.text,
            "token_ids": output.token_ids,
            "logprobs": _entries(output.logprobs),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "seed": output.seed,
            "routed_experts": None if output.routing is None else output.routing.document(),
        }
        for output in result.outputs
    ]
    return msgspec.json.encode(
        {
            "prompt_token_ids": result.prompt_ids,
            "prompt_logprobs": _entries(result.prompt_logprobs),
            "choices": choices,
        }
    )


def _generate(
    config: GenerateConfig,
    parsed: Sequence[tuple[str | list[int] | list[dict[str, str]], dict[str, Any]]],
    group: RankGroup,
) -> tuple[LLM, list[RequestOutput]]:
    with progress_bar("loading weights", shown=group.rank == 0) as on_progress:
        llm = LLM.from_config(config.engine, group=group, on_progress=on_progress)
    defaults = llm.default_sampling_params()
    num_mine = len(range(0, len(parsed), llm.num_engines))  # rank 0's, which alone are shown
    with progress_bar("generating", shown=group.rank == 0) as on_progress:
        results = llm.generate(
            [prompt_of(llm, prompt) for prompt, _ in parsed],
            [replace(defaults, **given) for _, given in parsed],
            on_finished=lambda done: on_progress(done * llm.num_engines, num_mine * llm.num_engines),
        )
    llm.stop_engine()  # captured graphs hold on to the communicators that end next
    return llm, results


def _entries(logprobs: Sequence[TokenLogprobs | None] | None) -> list[dict[str, Any] | None] | None:
    if logprobs is None:
        return None
    return [None if entry is None else msgspec.structs.asdict(entry) for entry in logprobs]


def _check_distinct(source: Path, target: Path) -> None:
    if str(source) != "-" and source.is_file() and target.exists() and target.samefile(source):
        raise ValueError(f"output ({target}) must be another file than input ({source})")


@contextlib.contextmanager
def open_output(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of ``path`` at the end, and is gone after an error.

    Standard output, and what exists but is no regular file (a pipe, /dev/null), is written to directly.
    """
    if str(path) == "-":
        yield sys.stdout.buffer
        return
    target = Path(os.path.realpath(path))  # a link stays, and what it names is replaced
    is_direct = target.exists() and not target.is_file()
    partial = target if is_direct else target.with_name(f".moe-runtime-{os.getpid()}.partial")
    try:
        if target.is_file():
            target.open("ab").close()  # renaming would replace even a file that may not be written
        file = partial.open("wb")
    except OSError as error:
        raise ValueError(f"output ({path}) cannot be written: {error.strerror}") from None
    try:
        with file:
            yield file
        if not is_direct:
            if target.exists():
                shutil.copymode(target, partial)
            partial.replace(target)
    finally:
        if not is_direct:
            partial.unlink(missing_ok=True)


def read_lines(path: Path) -> list[str]:
    """Lines of a text file; of standard input where it is ``-``."""
    text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    return text.splitlines()


def prompt_of(llm: LLM, prompt: str | list[int] | list[dict[str, str]]) -> str | list[int]:
    """Text or token ids of a prompt of ``parse_line``; conversations are rendered."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        return llm.chat_prompt(prompt)
    return cast(str | list[int], prompt)
