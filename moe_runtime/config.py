"""Configuration of the commands: each composes the small configurations of the layers it starts.

Flags, ``MOE_RUNTIME_*`` variables and their documentation all come from these classes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from moe_runtime.engine.config import EngineConfig

__all__ = ["GenerateConfig", "HTTPConfig", "ServeConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HTTPConfig:
    """The HTTP front end.

    Attributes:
        host: Interface to listen on.
        port: Port to listen on; 0 takes a free one.
        api_key: Key that clients must send as ``Authorization: Bearer``; by default none is asked for.
        served_model_name: Name that requests give as ``model``; by default the model's folder or hub id.
        drain_timeout_s: Seconds that running requests may take to finish after a first SIGTERM.
        heartbeat_timeout_s: Seconds of silence after which a rank counts as lost.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    served_model_name: str | None = None
    drain_timeout_s: float = 20.0
    heartbeat_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port ({self.port}) must be in [0, 65535]")
        if self.api_key is not None and not self.api_key:
            raise ValueError("api_key must not be empty; leave it out to ask for none")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Serve a model over HTTP."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    http: HTTPConfig = field(default_factory=HTTPConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateConfig:
    """Generate for a file of prompts.

    Attributes:
        input: JSON lines; each an object with ``prompt`` (text or token ids) or ``messages``, and any sampling
            parameters (``temperature``, ``max_tokens``, ``logprobs``, ...). ``-`` is standard input.
        output: JSON lines, one per input line and in its order. ``-`` is standard output.
    """

    input: Path
    output: Path = Path("-")
    engine: EngineConfig = field(default_factory=EngineConfig)
