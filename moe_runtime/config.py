"""Configuration of the commands: each composes the small configurations of the layers it starts.

Flags, ``MOE_RUNTIME_*`` variables and their documentation all come from these classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from moe_runtime.engine.config import EngineConfig

__all__ = [
    "AuditConfig",
    "GenerateConfig",
    "HTTPConfig",
    "PlanPlacementConfig",
    "RecordRoutingConfig",
    "ServeConfig",
    "StepConfig",
]

MIN_HEARTBEAT_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HTTPConfig:
    """The HTTP front end.

    Attributes:
        host: Interface to listen on.
        port: Port to listen on; 0 takes a free one.
        api_key: Key that clients must send as ``Authorization: Bearer``; by default none is asked for.
        served_model_name: Name that requests give as ``model``; by default the model's folder or hub id.
        drain_timeout_s: Seconds that running requests may take to finish after a first SIGTERM.
        heartbeat_timeout_s: Seconds of silence after which a rank, or the front end, counts as hung and is ended, and
            all others with it.
        request_timeout_s: Seconds that a request may take, from its queueing to its last token; over it, 504. By
            default there is no limit.
        kv_events: Tell at ``/kv_events`` which blocks the prefix caches hold, as a router can use it.
        max_queued_seqs: Most sequences (choices of prompts) that wait for a place among the running ones; over it, 429
            with Retry-After.
        max_queued_tokens: Most prompt tokens of sequences that have no output yet, while some wait; over it, 429 with
            Retry-After.
        max_unread_bytes: Most bytes of outputs, about, that wait for a stream's client to read; over it, the request
            ends.
        reader_timeout_s: Seconds after which a connection is closed whose client reads nothing of what waits for it.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: Annotated[str | None, tyro.conf.arg(help_behavior_hint="(default: none)")] = field(
        default=None, repr=False
    )
    served_model_name: str | None = None
    drain_timeout_s: float = 20.0
    heartbeat_timeout_s: float = 5.0
    request_timeout_s: float | None = None
    kv_events: bool = False
    max_queued_seqs: int = 4096
    max_queued_tokens: int = 4 * 2**20
    max_unread_bytes: int = 4 * 2**20
    reader_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port ({self.port}) must be in [0, 65535]")
        if self.api_key is not None and not self.api_key:
            raise ValueError("api_key must not be empty; leave it out to ask for none")
        if self.served_model_name is not None and not self.served_model_name:
            raise ValueError("served_model_name must not be empty; leave it out to take the model's")
        if not math.isfinite(self.drain_timeout_s) or self.drain_timeout_s < 0:
            raise ValueError(f"drain_timeout_s ({self.drain_timeout_s}) must be finite and not negative")
        if not math.isfinite(self.heartbeat_timeout_s) or self.heartbeat_timeout_s <= 0:
            raise ValueError(f"heartbeat_timeout_s ({self.heartbeat_timeout_s}) must be finite and positive")
        if self.heartbeat_timeout_s < MIN_HEARTBEAT_TIMEOUT_S:
            raise ValueError(
                f"heartbeat_timeout_s ({self.heartbeat_timeout_s}) must be at least {MIN_HEARTBEAT_TIMEOUT_S:g}: signs "
                "of life come twice a second, and a busy machine delays them"
            )
        for name in ("request_timeout_s", "reader_timeout_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} ({value}) must be finite and positive")
        for name in ("max_queued_seqs", "max_queued_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} ({getattr(self, name)}) must not be negative")
        if self.max_unread_bytes < 1:
            raise ValueError(f"max_unread_bytes ({self.max_unread_bytes}) must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig:
    """The watch over the length of steps.

    Attributes:
        slow_step_s: Seconds after which a step is logged, with what every rank is doing, and counted.
        step_timeout_s: Seconds after which a step counts as hung, and all ranks end.
    """

    slow_step_s: float = 10.0
    step_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        for name in ("slow_step_s", "step_timeout_s"):
            value = getattr(self, name)
            if not math.isfinite(value) or value <= 0:
                raise ValueError(f"{name} ({value}) must be finite and positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Serve a model over HTTP.

    Attributes:
        log_format: ``text``, or ``json``: one object a line, with time, level, rank, logger and message.
    """

    engine: EngineConfig = field(default_factory=EngineConfig)
    http: HTTPConfig = field(default_factory=HTTPConfig)
    steps: StepConfig = field(default_factory=StepConfig)
    log_format: Literal["text", "json"] = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateConfig:
    """Generate for a file of prompts.

    Attributes:
        input: JSON lines; each an object with ``prompt`` (text or token ids) or ``messages``, and any sampling
            parameters (``temperature``, ``max_tokens``, ``logprobs``, ...). Temperature, top_p, top_k and min_p that a
            line leaves out are the checkpoint's (``generation_config.json``), as over HTTP. ``-`` is standard input.
        output: JSON lines, one per input line and in its order; another file than the input, and complete or not
            there. ``-`` is standard output.
    """

    input: Path
    output: Path = Path("-")
    engine: EngineConfig = field(default_factory=EngineConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRoutingConfig:
    """Generate for a file of prompts and record which experts each token went to.

    Attributes:
        input: JSON lines as ``generate`` takes them, or with ``input-format text`` one prompt a line. ``-`` is standard
            input.
        input_format: ``jsonl`` or ``text``.
        output: The log (docs/eplb.md); another file than the input, and complete or not there.
        max_tokens: Output tokens of lines that do not set it.
        batch_size: Prompts whose results are held in memory together.
    """

    input: Path
    output: Path
    input_format: Literal["jsonl", "text"] = "jsonl"
    max_tokens: int = 16
    batch_size: int = 256
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        if self.max_tokens < 0:
            raise ValueError(f"max_tokens ({self.max_tokens}) must not be negative")
        if self.batch_size < 1:
            raise ValueError(f"batch_size ({self.batch_size}) must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPlacementConfig:
    """Plan where experts go, from what they had to do, for ``--initial-placement`` or ``POST /expert_placement``.

    Attributes:
        load: A window of load (``GET /expert_load?format=npz``) or a routing log (``record-routing``).
        output: The placement file. ``-`` is standard output.
        ep_size: Ranks that experts are on.
        num_redundant_experts: Physical experts of every layer beyond one per logical expert.
        num_nodes: Nodes of consecutive ranks; above 1 all copies of an expert stay on one node.
        objective: ``total`` evens out the whole load, ``steps`` the sum of what the window's parts wait for.
    """

    load: Path
    output: Path = Path("-")
    ep_size: int
    num_redundant_experts: int = 0
    num_nodes: int = 1
    objective: Literal["total", "steps"] = "total"

    def __post_init__(self) -> None:
        for name, least in (("ep_size", 1), ("num_nodes", 1), ("num_redundant_experts", 0)):
            value = getattr(self, name)
            if isinstance(value, int) and value < least:  # a flag not given yet is none
                raise ValueError(f"{name} ({value}) must be at least {least}")
        if isinstance(self.ep_size, int) and self.num_nodes > self.ep_size:
            raise ValueError(f"num_nodes ({self.num_nodes}) must be at most ep_size ({self.ep_size})")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """Find which schedules give the same bits on this device, and keep the result for the engine.

    Attributes:
        model: Models whose shapes to audit: a folder, a hub id, ``builtin``, or ``qwen3-30b-a3b`` for the dimensions
            alone.
        dtype: Model dtype; ``auto`` takes the checkpoint's, bfloat16 for dimensions alone.
        device: ``auto`` takes the GPU where there is one.
        time: Measure every schedule that agrees. Vendor GEMMs come into use only where they were measured faster.
        max_rows: Largest row count of own schedules.
        output: JSON file for all comparisons.
        all_rows: Print every comparison, not a line per op, shape and row count.
        golden: ``check`` compares digests of canonical outputs with the committed ones, ``write`` replaces them.
        golden_folder: Where digests are; by default inside the package.
        only_golden: Leave the comparison of schedules out.
        compile_workers: Processes that compile kernels ahead; 0 compiles as it goes.
        audit_cache: Folder where results are kept; by default moe-runtime in the user's cache folder.
    """

    model: tuple[str, ...] = ("builtin",)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    time: bool = False
    max_rows: int = 4096
    output: Path | None = None
    all_rows: bool = False
    golden: Literal["none", "check", "write"] = "none"
    golden_folder: Path | None = None
    only_golden: bool = False
    compile_workers: int = 0
    audit_cache: str | None = None

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("model must name at least one model")
        if self.max_rows < 1:
            raise ValueError(f"max_rows ({self.max_rows}) must be at least 1")
        if self.compile_workers < 0:
            raise ValueError(f"compile_workers ({self.compile_workers}) must be at least 0")
        if self.only_golden and self.golden == "none":
            raise ValueError("only_golden (True) needs golden (none) to be check or write")
