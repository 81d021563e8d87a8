"""What the front end is told by its parent: one JSON document, the first line of its standard input."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from moe_runtime.engine.request import RequestLimits

__all__ = ["ServerConfig", "decode_config", "encode_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Everything the front end needs; it reads neither flags nor environment.

    Attributes:
        host: Interface of the HTTP socket.
        port: Port of the HTTP socket; 0 takes a free one.
        served_model_name: The ``model`` that requests name.
        model_dir: Folder with ``tokenizer.json``, chat template and generation config.
        limits: What the loaded model and the deployment allow.
        world_size: Number of ranks that will connect.
        tp: Ranks of a group that serves a request together; its first one takes requests and sends outputs.
        seed: Seeds the seeds given to requests that bring none, in order of arrival; None makes them random.
        api_key: Bearer key that clients must send; None asks for none.
        info: Shown by ``/server_info``; its ``system_fingerprint`` goes into responses.
        expert_placement: Where experts are at the start, in the form of a placement file; None without experts.
        load_window_steps: Steps of the window of expert load.
        experts_fixed_reason: Why they stay there; empty where they may be moved.
        zmq_host: Address to bind for the ranks, one that all of them can reach.
        drain_timeout_s: How long running requests may finish after the first SIGTERM.
        heartbeat_timeout_s: Silence after which a process counts as hung; see server/gang_watch.py.
        slow_step_s: Longest time of a step that is nothing to report.
        step_timeout_s: Time of a step after which a rank counts as hung.
        log_format: ``text``, or ``json`` for one object a line.
        request_timeout_s: Longest time a request may take; None sets no limit.
        max_num_seqs: Sequences that a group of ranks runs at once.
        max_queued_seqs: Most sequences that wait for a place; see server/admission.py.
        max_queued_tokens: Most prompt tokens of sequences without output while some wait.
        max_unread_bytes: Most bytes of outputs, about, that wait for a stream's client to read.
        reader_timeout_s: Longest time in which a client takes none of the bytes that wait for it.
        prefix_cache: Whether ranks have prefix caches: then a request goes where its prefix likely is.
        kv_block_size: Tokens of a KV block.
        kv_events: Whether ranks report what their prefix caches hold, for ``/kv_events``.
        read_timeout_s: Longest time from the first byte of a request to its last.
        max_body_bytes: Largest request body.
    """

    host: str
    port: int
    served_model_name: str
    model_dir: str
    limits: RequestLimits
    world_size: int
    tp: int = 1
    seed: int | None = None
    api_key: str | None = field(default=None, repr=False)
    info: dict[str, Any] = field(default_factory=dict)
    expert_placement: dict[str, Any] | None = None
    load_window_steps: int = 1024
    experts_fixed_reason: str = ""
    zmq_host: str = "127.0.0.1"
    drain_timeout_s: float = 20.0
    heartbeat_timeout_s: float = 5.0
    slow_step_s: float = 10.0
    step_timeout_s: float = 120.0
    log_format: Literal["text", "json"] = "text"
    request_timeout_s: float | None = None
    max_num_seqs: int = 64
    max_queued_seqs: int = 4096
    max_queued_tokens: int = 4 * 2**20
    max_unread_bytes: int = 4 * 2**20
    reader_timeout_s: float = 60.0
    prefix_cache: bool = True
    kv_block_size: int = 64
    kv_events: bool = False
    read_timeout_s: float = 60.0
    max_body_bytes: int = 8 * 2**20

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port ({self.port}) must be in [0, 65535]")
        if not self.served_model_name:
            raise ValueError("served_model_name must not be empty")
        if self.world_size < 1:
            raise ValueError(f"world_size ({self.world_size}) must be at least 1")
        if self.tp < 1:
            raise ValueError(f"tp ({self.tp}) must be at least 1")
        if self.world_size % self.tp:
            raise ValueError(f"world_size ({self.world_size}) must be divisible by tp ({self.tp})")
        if self.api_key is not None and not self.api_key:
            raise ValueError("api_key must not be empty; leave it out to ask for none")
        for name in ("heartbeat_timeout_s", "slow_step_s", "step_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} ({getattr(self, name)}) must be positive")
        if self.drain_timeout_s < 0:
            raise ValueError(f"drain_timeout_s ({self.drain_timeout_s}) must not be negative")
        if self.request_timeout_s is not None and self.request_timeout_s <= 0:
            raise ValueError(f"request_timeout_s ({self.request_timeout_s}) must be positive")
        if self.reader_timeout_s <= 0:
            raise ValueError(f"reader_timeout_s ({self.reader_timeout_s}) must be positive")
        for name in ("max_body_bytes", "max_num_seqs", "max_unread_bytes", "kv_block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 1")
        for name in ("max_queued_seqs", "max_queued_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} ({getattr(self, name)}) must not be negative")
        if self.read_timeout_s <= 0:
            raise ValueError(f"read_timeout_s ({self.read_timeout_s}) must be positive")

    @property
    def moe_layer_ids(self) -> list[int]:
        """The model's numbers of its layers with experts; counted from 0 where ``info`` does not name them."""
        known = self.info.get("resolved", {}).get("moe_layer_ids")
        if known is None:
            placed = (self.expert_placement or {}).get("physical_to_logical_map", ())
            return list(range(len(placed)))
        return [int(layer) for layer in known]

    @property
    def system_fingerprint(self) -> str | None:
        """What numerics clients may compare by: ``info["system_fingerprint"]``, where given."""
        value = self.info.get("system_fingerprint")
        return None if value is None else str(value)


def encode_config(config: ServerConfig) -> bytes:
    """One line of JSON, newline included."""
    return msgspec.json.encode(config) + b"\n"


def decode_config(line: bytes) -> ServerConfig:
    """Inverse of ``encode_config``.

    Raises:
        ValueError: the line is no such document (``msgspec.DecodeError`` is one).
    """
    try:
        return msgspec.json.decode(line, type=ServerConfig)
    except msgspec.DecodeError as error:
        raise ValueError(f"no server configuration on standard input: {error}") from error
