"""Servers for tests: the real process over fake ranks."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
from tokenizers import processors

from moe_runtime.engine.tokenizer import Tokenizer
from moe_runtime.server.config import ServerConfig, encode_config
from tests.moe_runtime.server.fake_rank import LIMITS, SPECIAL_TOKENS, FakeRanks, write_checkpoint


class RunningServer:
    """``python -m moe_runtime.server`` and the fake ranks that serve it."""

    def __init__(self, config: ServerConfig, *, with_ranks: bool = True, **rank_options: Any) -> None:
        self.config = config
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moe_runtime.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(encode_config(config))
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            log = self.log()
            self.process.wait(10)
            raise AssertionError(log)
        self.announced = json.loads(line)
        self.url = f"http://127.0.0.1:{self.announced['port']}"
        headers = {} if config.api_key is None else {"Authorization": f"Bearer {config.api_key}"}
        self.http = httpx.Client(base_url=self.url, timeout=60, headers=headers)
        watch = self.announced["watch"]
        self.ranks = FakeRanks(self.announced["zmq"], config.world_size, watch_endpoint=watch, **rank_options)
        if with_ranks:
            self.ranks.start()
            wait_until(lambda: self.http.get("/health").status_code == 200)

    def complete(self, **fields: Any) -> dict[str, Any]:
        """A completion that must succeed."""
        return self._ok("/v1/completions", {"model": "m", "prompt": "Hello", **fields})

    def chat(self, **fields: Any) -> dict[str, Any]:
        """A chat completion that must succeed."""
        messages = [{"role": "user", "content": "Hello"}]
        return self._ok("/v1/chat/completions", {"model": "m", "messages": messages, **fields})

    def stream(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        """Chunks of a stream that must end with [DONE]."""
        with self.http.stream("POST", path, json={"model": "m", "stream": True, **fields}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            events = [line[6:] for line in response.iter_lines() if line]
        assert events[-1] == "[DONE]"
        return [json.loads(event) for event in events[:-1]]

    def log(self) -> str:
        """Standard error so far."""
        self._log.seek(0)
        return self._log.read().decode()

    def close(self) -> None:
        """End everything."""
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        if self.ranks.is_alive():
            self.ranks.stop()
        self._log.close()

    def _ok(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        document: dict[str, Any] = response.json()
        return document


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Poll until ``condition`` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition has not come true"
        time.sleep(0.01)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of bytes."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def bos_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, with a tokenizer that puts ``<|endoftext|>`` before a text."""
    path = write_checkpoint(tmp_path_factory.mktemp("bos"))
    file = str(path / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(file)
    bos = SPECIAL_TOKENS[0]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
    )
    backend.save(file)
    return path


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    """Its tokenizer."""
    return Tokenizer.from_dir(checkpoint)


@pytest.fixture(scope="session")
def make_config(checkpoint: Path) -> Callable[..., ServerConfig]:
    """Configurations of two ranks on a free port."""

    def make(**overrides: Any) -> ServerConfig:
        fields: dict[str, Any] = {
            "host": "127.0.0.1",
            "port": 0,
            "served_model_name": "m",
            "model_dir": str(checkpoint),
            "limits": LIMITS,
            "world_size": 2,
            "info": {"system_fingerprint": "fp-1", "invariance": "topology"},
        }
        return ServerConfig(**{**fields, **overrides})

    return make


@pytest.fixture
def start_server(make_config: Callable[..., ServerConfig]) -> Iterator[Callable[..., RunningServer]]:
    """Starts servers that end with the test."""
    servers: list[RunningServer] = []

    def start(*, with_ranks: bool = True, step_s: float = 0.0, **overrides: Any) -> RunningServer:
        server = RunningServer(make_config(**overrides), with_ranks=with_ranks, step_s=step_s)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="session")
def server(make_config: Callable[..., ServerConfig]) -> Iterator[RunningServer]:
    """A server that all tests share which do not break it."""
    running = RunningServer(make_config())
    yield running
    running.close()
