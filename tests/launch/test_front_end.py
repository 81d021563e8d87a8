"""The HTTP front end as a child of rank 0."""

from __future__ import annotations

import dataclasses
import signal
import socket
from pathlib import Path

import pytest

from moe_runtime.engine.config import EngineConfig
from moe_runtime.engine.model_loader import plan_model
from moe_runtime.engine.request import RequestLimits
from moe_runtime.launch.front_end import ChildFailedError, FrontEndProcess
from moe_runtime.server.config import ServerConfig


def _config(port: int = 0) -> ServerConfig:
    return ServerConfig(
        host="127.0.0.1",
        port=port,
        served_model_name="m",
        model_dir=str(plan_model(EngineConfig()).model_dir),
        limits=RequestLimits(vocab_size=2048, max_model_len=64, max_kv_tokens=64),
        world_size=1,
    )


def test_it_announces_its_addresses_and_goes_when_let_go() -> None:
    child = FrontEndProcess(_config())
    assert child.endpoint.startswith("tcp://127.0.0.1:")
    assert child.watch_endpoint.startswith("tcp://127.0.0.1:")
    assert child.is_alive()
    with socket.create_connection(("127.0.0.1", child.port), timeout=5):
        pass
    assert child.close() == 1  # its parent let go without a drain
    assert not child.is_alive()
    assert child.how_it_ended().endswith("exit code 1")
    child.forward(signal.SIGTERM)  # nothing left to tell


def test_a_port_in_use_raises_with_the_exit_code(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ChildFailedError) as raised:
            FrontEndProcess(_config(taken.getsockname()[1]))
    assert raised.value.exit_code == 2
    assert "cannot listen on 127.0.0.1" in capfd.readouterr().err


def test_a_checkpoint_without_tokenizer_is_found_before_anything_is_announced(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = dataclasses.replace(_config(), model_dir=str(tmp_path))
    with pytest.raises(ChildFailedError) as raised:
        FrontEndProcess(config)
    assert raised.value.exit_code == 2
    assert "tokenizer.json is missing" in capfd.readouterr().err


def test_a_child_that_does_not_go_is_killed() -> None:
    child = FrontEndProcess(_config())
    child.forward(signal.SIGSTOP)
    assert child.close(0.2) == -signal.SIGKILL
    assert child.how_it_ended().endswith("ended by SIGKILL")
