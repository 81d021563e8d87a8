"""What ``ep8.py`` runs: the steps of each part, for GPUs or in a small form for ranks on a CPU, and how long they take.

Expected seconds are for a fresh machine with eight H200, where nothing is compiled yet. Known from one and two of them
(docs/benchmarks.md): the engine of Qwen3-30B-A3B starts in 4 s, in 49 s where its kernels are to be compiled, which is
the check's share here; a prompt of 2,500 tokens and 50 steps of one sequence take 0.2 s. The rest is estimated.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rank_processes import torchrun
from timed_steps import Command, Step

__all__ = ["PARTS", "Setting", "plan_steps"]

PARTS = ("check", "dispatch", "engine", "server")
FOLDER = Path(__file__).resolve().parent

NUM_PROMPTS, NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 64, 2500, 50
QWEN_CONTEXT = 4 * NUM_PROMPT_TOKENS
"""Prompts of the check are a quarter of the context long, with a deviation of a tenth: 2,500 and 1,000 tokens."""
DISPATCH_SHAPES = ((2048, 128, 8), (7168, 256, 8))
"""Hidden size, experts and experts of a token: of Qwen3-30B-A3B, and of the largest open models."""
DISPATCH_TOKENS = (1, 8, 32, 128, 512, 4096)
CHECK_AXES = ("again", "alone", "graph", "placement", "topology")
FEWER_AXES = ("again", "graph")
BUILTIN_HEADS = 4
NUM_SPECULATIVE_TOKENS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where and how the steps run.

    Attributes:
        device: ``cuda``, or ``cpu`` for a small form of everything.
        num_ranks: Ranks of the largest deployment: 2, 4 or 8.
        model: Folder with the configuration of Qwen3-30B-A3B and a tokenizer, for dummy weights; not read on a CPU.
        results: Folder for the programs' results.
        commit: Recorded by the programs that do.
    """

    device: str
    num_ranks: int
    model: Path
    results: Path
    commit: str = ""

    def __post_init__(self) -> None:
        if self.num_ranks not in (2, 4, 8):
            raise ValueError(f"num_ranks ({self.num_ranks}) must be 2, 4 or 8")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device ({self.device}) must be cpu or cuda")

    @property
    def is_cpu(self) -> bool:
        """The small form."""
        return self.device == "cpu"


def plan_steps(setting: Setting, parts: Sequence[str]) -> list[Step]:
    """The steps of these parts, in the order of ``parts``."""
    makers = {
        "check": _check_steps,
        "dispatch": _dispatch_steps,
        "engine": _engine_steps,
        "server": _server_steps,
    }
    unknown = [part for part in parts if part not in makers]
    if unknown or not parts:
        raise ValueError(f"parts ({', '.join(unknown)}) must be among {', '.join(PARTS)}, and at least one")
    return [step for part in parts for step in makers[part](setting)]


def _check_steps(setting: Setting) -> list[Step]:
    """On all ranks, then on fewer side by side, then with tensor parallelism: one digest for each model."""
    size = setting.num_ranks
    if setting.is_cpu:
        small = ["--num-prompts", "8", "--max-tokens", "6", "--num-alone", "8"]
        tp = min(size, BUILTIN_HEADS)
        return [
            _checks(setting, "built-in", [_Form(size, more=_axes(CHECK_AXES))], small, 75, 180),
            _checks(setting, "built-in", _fewer(size), small, 40, 120),
            _checks(setting, "built-in", [_Form(size, tp=tp), _Form(size // 2, tp=tp // 2)], small, 50, 120),
        ]
    # Half as many prompts by themselves: the model is small, so its steps are all launches.
    builtin = ["--num-prompts", str(NUM_PROMPTS), "--max-tokens", str(NUM_OUTPUT_TOKENS), "--num-alone", "32"]
    qwen = ["--model", str(setting.model), "--load-format", "dummy", "--max-model-len", str(QWEN_CONTEXT)]
    qwen += ["--max-num-batched-tokens", "8192", "--num-prompts", str(NUM_PROMPTS)]
    qwen += ["--max-tokens", str(NUM_OUTPUT_TOKENS), "--num-alone", str(NUM_PROMPTS)]
    builtin_axes = _axes((*CHECK_AXES, "chunks", "speculation"))
    half = size // 2
    smaller_tp = [_Form(half, tp=half)] if half > 1 else []
    smaller_tp += [_Form(half, tp=half // 2)] if half > 2 else []
    steps = [
        _checks(setting, "built-in", [_Form(size, more=builtin_axes)], builtin, 55, 110),
        _checks(setting, "built-in", _fewer(size), builtin, 25, 60),
        _checks(setting, "Qwen3-30B-A3B", [_Form(size, more=_axes(CHECK_AXES))], qwen, 140, 230),
        _checks(setting, "Qwen3-30B-A3B", _fewer(size), qwen, 45, 80),
        _checks(setting, "Qwen3-30B-A3B", [_Form(size, tp=size)], qwen, 25, 50),
    ]
    return [*steps, _checks(setting, "Qwen3-30B-A3B", smaller_tp, qwen, 25, 50)] if smaller_tp else steps


@dataclass(frozen=True, slots=True)
class _Form:
    """A deployment to check: its ranks, ranks of a tensor-parallel group, and further flags."""

    size: int
    tp: int = 1
    more: Sequence[str] = ()
    words: str = ""

    @property
    def name(self) -> str:
        return f"EP {self.size}" + (f" TP {self.tp}" if self.tp > 1 else "") + self.words

    @property
    def flags(self) -> list[str]:
        return [*(("--tp", str(self.tp)) if self.tp > 1 else ()), *(self.more or _axes(FEWER_AXES))]


def _fewer(num_ranks: int) -> list[_Form]:
    """EP 4, 2 and 1 of 8; on the GPU that is left, EP 1 with speculation."""
    forms = [_Form(num_ranks >> i) for i in range(1, num_ranks.bit_length())]
    flags = ["--speculative", "ngram", "--num-speculative-tokens", str(NUM_SPECULATIVE_TOKENS)]
    words = f", speculation {NUM_SPECULATIVE_TOKENS}"
    return [*forms, _Form(1, more=[*flags, *_axes(("again", "alone"))], words=words)]


def _checks(
    setting: Setting,
    model: str,
    forms: Sequence[_Form],
    flags: Sequence[str],
    expected_s: float,
    limit_s: float,
) -> Step:
    """One after the other's GPUs, all at the same time."""
    commands, first = [], 0
    for form in forms:
        is_whole = setting.is_cpu or form.size == setting.num_ranks
        env = {} if is_whole else _visible_gpus(first, form.size, os.environ)
        commands.append(_check(setting, model, form, flags, env))
        first += form.size
    return Step(
        name=f"{model}, {'; '.join(form.name for form in forms)}",
        part="check",
        commands=commands,
        expected_s=expected_s,
        limit_s=limit_s,
    )


def _check(
    setting: Setting, model: str, form: _Form, flags: Sequence[str], env: Mapping[str, str]
) -> Command:
    title = f"check {model} {form.name}"
    result = _result(setting, title)
    program = ["-m", "moe_runtime.check", "--device", setting.device, "--json", str(result)]
    argv = torchrun(form.size, *program, *flags, *form.flags)
    return Command(name=title, argv=argv, result=result, env=env)


def _axes(names: Sequence[str]) -> list[str]:
    return ["--axes", *names]


def _visible_gpus(first: int, count: int, environ: Mapping[str, str]) -> dict[str, str]:
    """GPUs ``[first, first + count)`` of those that are visible here."""
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    ids = visible.split(",") if visible else [str(i) for i in range(first + count)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(ids[first : first + count])}


def _dispatch_steps(setting: Setting) -> list[Step]:
    if setting.is_cpu:
        program = ["--tokens", "1", "16", "64", "--repeats", "20"]
        return [
            _ranks_step(setting, "dispatch", "dispatch and all-reduce", "bench_dispatch_cpu", program, 35, 90)
        ]
    steps = []
    for hidden, num_experts, num_topk in DISPATCH_SHAPES:
        program = ["--hidden", str(hidden), "--experts", str(num_experts), "--topk", str(num_topk)]
        program += ["--tokens", *map(str, DISPATCH_TOKENS), "--parts", "layers", "collective"]
        program += ["--budget-s", "50", "--limit-s", "75", "--commit", setting.commit]
        steps.append(
            _ranks_step(
                setting,
                "dispatch",
                f"hidden {hidden}, {num_experts} experts",
                "bench_dispatch",
                program,
                45,
                75,
            )
        )
    usual = ["--usual", "--commit", setting.commit]
    return [*steps, _ranks_step(setting, "dispatch", "all-reduce", "bench_all_reduce", usual, 20, 40)]


def _engine_steps(setting: Setting) -> list[Step]:
    if setting.is_cpu:
        program = ["--device", "cpu", "--model", "builtin", "--parts", "steady,prefill", "--repeats", "1"]
        program += ["--seqs-per-rank", "4", "--steady-tokens", "24", "--prefill-prompts", "16"]
        program += ["--prefill-tokens", "128"]
        return [_ranks_step(setting, "engine", "engine, built-in", "bench_engine", program, 40, 120)]
    program = ["--parts", "steady,prefill,decode", "--repeats", "2", "--seqs-per-rank", "256"]
    program += ["--steady-tokens", "1024", "--prefill-prompts", str(8 * setting.num_ranks)]
    return [_ranks_step(setting, "engine", "engine, Qwen3-30B-A3B", "bench_engine", program, 65, 100)]


def _server_steps(setting: Setting) -> list[Step]:
    result = _result(setting, "server")
    program = ["--ranks", str(setting.num_ranks), "--device", setting.device, "--output", str(result)]
    if setting.is_cpu:
        program += [
            "--requests",
            "48",
            "--streams",
            "16",
            "--longest-prompt",
            "200",
            "--longest-output",
            "12",
        ]
        program += ["--repeated", "8"]
        expected_s, limit_s = 50.0, 150.0
    else:
        program += ["--model", str(setting.model), "--requests", "1000", "--streams", "512"]
        program += ["--ready-s", "70"]  # so that a server that does not start shows its log
        expected_s, limit_s = 45.0, 90.0
    return [
        Step(
            name="HTTP server",
            part="server",
            commands=[
                Command(
                    name="server",
                    argv=[sys.executable, str(FOLDER / "bench_mixed.py"), *program],
                    result=result,
                )
            ],
            expected_s=expected_s,
            limit_s=limit_s,
        )
    ]


def _ranks_step(
    setting: Setting,
    part: str,
    name: str,
    program: str,
    flags: Sequence[str],
    expected_s: float,
    limit_s: float,
) -> Step:
    """A benchmark on all ranks."""
    result = _result(setting, name)
    argv = torchrun(setting.num_ranks, str(FOLDER / f"{program}.py"), *flags, "--output", str(result))
    command = Command(name=name, argv=argv, result=result)
    return Step(name=name, part=part, commands=[command], expected_s=expected_s, limit_s=limit_s)


def _result(setting: Setting, name: str) -> Path:
    return setting.results / (re.sub(r"[^a-z0-9]+", "-", name.lower()) + ".json")
