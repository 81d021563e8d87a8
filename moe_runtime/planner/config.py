"""What the planner and the calibration are told on their command lines. Imports no torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import numpy as np

from moe_runtime.eplb.load_window import LoadWindow
from moe_runtime.eplb.loads import IntArray
from moe_runtime.eplb.routing_log import MAGIC, routing_log_counts
from moe_runtime.planner.fleet import FleetSearch
from moe_runtime.planner.hardware import load_hardware
from moe_runtime.planner.routing_load import skewed_counts
from moe_runtime.planner.shape_configs import load_shape
from moe_runtime.planner.shapes import ModelShape
from moe_runtime.planner.trace import TraceSummary
from moe_runtime.planner.workload import Workload

__all__ = ["CalibrateConfig", "PlanConfig", "expert_load_of"]

LARGEST_SKEW = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """Plan a fleet: how many GPUs, which EP and TP size, what it gives and what invariance costs.

    Works from a config.json alone, in about a second; nothing is loaded or downloaded. Every time is predicted from
    times of kernels and transports alone, and says where it is from. Exit codes: 0 a fleet meets everything, 3 none
    does (with the nearest that would), 2 usage.

    Attributes:
        model: Folder with a config.json, such a file, or ``builtin``. Beside what the engine runs: DeepSeek-V3,
            GLM-4.5, GPT-OSS, and Qwen3-MoE and Mixtral in formats that it does not load yet.
        gpu: h200, h100, h800, b200, a100, mi300x, cpu, or a file that moe-runtime calibrate wrote.
        gpus: Number of GPUs, or fewest and most, as ``1..1024``.
        input_tokens: Of a request's prompt.
        output_tokens: Of its answer.
        ttft: Longest mean time to the first token, in seconds; by default any.
        tpot: Longest mean time per output token, in seconds; by default any.
        request_rate: Requests per second to carry.
        concurrency: Requests to run at once.
        invariance: Level of the fleet.
        expert_load: ``uniform``; ``zipf:EXPONENT``, a skew; or the file of a load window
            (``LoadWindow.save``) or a routing log (``record-routing``), whose experts must be the model's.
        max_num_batched_tokens: Most tokens that a rank runs in a step; by default the most whose buffers stay small.
        gpu_memory_utilization: Share of the free memory that may be used.
        greedy: Requests take the most likely token.
        ep_size: Only layouts of that EP size.
        tp: Only layouts of that TP size.
        trace: File of requests to replay on the fleet (docs/capacity.md), for percentiles; its means and rate then take
            the place of input_tokens, output_tokens and request_rate. ``ttft`` and ``tpot`` are then each request's.
        max_num_seqs: Sequences that a group runs at once while a trace is replayed.
        goodput: Share of a trace's requests that must end within ``ttft`` and ``tpot``.
        fail: Failures while a trace is replayed, each RANK@SECONDS: the rank's replica restarts at a smaller EP size.
        seed: Of the experts that a zipf load makes hot.
        json: File for everything; ``-`` is standard output, without tables.
        html: File for the plots, self-contained; needs the extra ``plan``.
    """

    model: str
    gpu: str = "h200"
    gpus: str = "1..1024"
    input_tokens: int = 1024
    output_tokens: int = 256
    ttft: float | None = None
    tpot: float | None = None
    request_rate: float | None = None
    concurrency: int | None = None
    invariance: Literal["topology", "batch"] = "topology"
    expert_load: str = "uniform"
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float = 0.9
    greedy: bool = False
    ep_size: int | None = None
    tp: int | None = None
    trace: Path | None = None
    max_num_seqs: int = 256
    goodput: float = 0.99
    fail: tuple[str, ...] = ()
    seed: int = 0
    json: Path | None = None
    html: Path | None = None

    def __post_init__(self) -> None:
        self.gpu_range  # noqa: B018 - raises
        self.workload  # noqa: B018
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < 1:
            raise ValueError(f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least 1")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization ({self.gpu_memory_utilization}) must be in (0, 1]")
        for name in ("ep_size", "tp", "max_num_seqs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} ({value}) must be at least 1")
        if self.seed < 0:
            raise ValueError(f"seed ({self.seed}) must be at least 0")
        if not 0 < self.goodput <= 1:
            raise ValueError(f"goodput ({self.goodput}) must be in (0, 1]")
        if self.trace is None and self.fail:
            raise ValueError(f"fail ({' '.join(self.fail)}) must be left out without a trace")

    @property
    def gpu_range(self) -> tuple[int, int]:
        """Fewest and most GPUs."""
        match = re.fullmatch(r"(\d{1,9})(?:\.\.(\d{1,9}))?", self.gpus, re.ASCII)
        fewest = int(match[1]) if match else 0
        most = int(match[2] or match[1]) if match else 0
        if not 1 <= fewest <= most:
            raise ValueError(
                f"gpus ({self.gpus!r}) must be a number of at least 1, or two such as 1..1024, ascending"
            )
        return fewest, most

    @property
    def workload(self) -> Workload:
        """What is asked for."""
        return Workload(
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            ttft_s=self.ttft,
            tpot_s=self.tpot,
            request_rate=self.request_rate,
            concurrency=self.concurrency,
        )

    def search(self) -> FleetSearch:
        """The search that this is.

        Raises:
            ValueError: model, device or expert load cannot be read or do not go together.
        """
        shape = load_shape(self.model)
        return FleetSearch(
            shape=shape,
            hardware=load_hardware(self.gpu),
            workload=self.workload,
            gpus=self.gpu_range,
            level=self.invariance,
            expert_load=expert_load_of(self.expert_load, shape, self.seed),
            max_num_batched_tokens=self.max_num_batched_tokens,
            utilization=self.gpu_memory_utilization,
            greedy=self.greedy,
            ep_size=self.ep_size,
            tp=self.tp,
        )

    def with_trace(self, summary: TraceSummary) -> PlanConfig:
        """The same with a trace's means and rate, for the search of a fleet.

        Raises:
            ValueError: what the trace says was given besides.
        """
        defaults = {f.name: f.default for f in fields(PlanConfig)}
        for name in ("input_tokens", "output_tokens", "request_rate", "concurrency"):
            if getattr(self, name) != defaults[name]:
                raise ValueError(f"{name} ({getattr(self, name)}) must be left out: the trace says it")
        count, last = summary.num_requests, summary.last_arrival
        return replace(
            self,
            input_tokens=max(1, round(summary.num_prompt_tokens / count)),
            output_tokens=max(1, round(summary.num_output_tokens / count)),
            request_rate=count / last if last and not summary.by_step else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateConfig:
    """Time this runtime's kernels and transports on the machine at hand, and write a file for ``plan --gpu FILE``.

    One process times the kernels. torchrun's ranks time what they exchange instead, and add it to what ``--like``
    holds: on CPUs rows to experts and home, on the GPUs of a host the sums of a tensor-parallel group. Weights are
    random. On a GPU compilation takes most of the time.

    Attributes:
        output: File to write.
        model: Whose dimensions to time: a folder with a config.json, such a file, or ``builtin``.
        device: ``auto`` takes the GPU where there is one.
        like: Device whose datasheet, node size and missing figures the file takes over: a name, or a file written
            before, which then keeps what is not timed again.
        title: What the file calls the machine; by default what the system does.
        dispatch_results: On GPUs, what ``benchmarks/bench_dispatch.py`` wrote there under torchrun: times of exchanges.
    """

    output: Path
    model: str = "builtin"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    like: str | None = None
    title: str | None = None
    dispatch_results: Path | None = None


def expert_load_of(text: str, shape: ModelShape, seed: int = 0) -> IntArray | None:
    """``[layers, experts]`` counts that ``--expert-load`` means; None for uniform.

    Raises:
        ValueError: neither a name nor a load window or routing log of this model, or without tokens.
    """
    if text == "uniform":
        return None
    if text.startswith("zipf:"):
        try:
            exponent = float(text.removeprefix("zipf:"))
        except ValueError:
            exponent = math.nan
        if not 0 <= exponent <= LARGEST_SKEW:
            raise ValueError(
                f"expert_load ({text!r}) must have an exponent from 0 to {LARGEST_SKEW:g}, as zipf:0.6"
            )
        return skewed_counts(shape.num_experts, exponent, seed)
    path = Path(text)
    if not path.is_file():
        raise ValueError(
            f"expert_load ({text!r}) must be uniform, zipf:EXPONENT or the file of a load window or routing log"
        )
    with path.open("rb") as file:
        is_log = file.read(len(MAGIC)) == MAGIC
    totals: IntArray = (
        routing_log_counts(path, 1)[0] if is_log else np.asarray(LoadWindow.load(path).totals())
    )
    if totals.shape[1] != shape.num_experts:
        raise ValueError(
            f"expert_load ({text!r}) has {totals.shape[1]} experts; must be the model's {shape.num_experts}"
        )
    if not totals.any():
        raise ValueError(f"expert_load ({text!r}) holds no tokens; must hold at least one")
    return totals
