"""A small model for checks in process, and small checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from moe_runtime.engine.config import EngineConfig
from moe_runtime.engine.llm import LLM
from moe_runtime.engine.messages import TokenLogprobs
from moe_runtime.verify.checker import ProgressFactory
from moe_runtime.verify.compare import Output
from moe_runtime.verify.config import CheckConfig
from tests.checkpoints import tiny_config, write_checkpoint


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("verify") / "tiny", tiny_config("qwen3_moe"))


@pytest.fixture
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model))


@pytest.fixture
def small_check(tiny_model: Path) -> Callable[..., CheckConfig]:
    """``small_check(**changes)``: eight prompts of 40 output tokens."""
    config = CheckConfig(num_prompts=8, max_tokens=40, engine=EngineConfig(model=str(tiny_model)))
    return lambda **changes: replace(config, **changes)


@pytest.fixture
def progress() -> ProgressFactory:
    """Shows nothing."""

    @contextmanager
    def silent(what: str) -> Iterator[Callable[[int, int], None]]:
        yield lambda done, total: None

    return silent


@pytest.fixture
def an_output() -> Output:
    """Four tokens with two alternatives each."""
    entries = [TokenLogprobs(-0.5 - i, (i, i + 1), (-0.5 - i, -0.75 - i)) for i in range(4)]
    return Output(token_ids=(3, 1, 4, 1), logprobs=tuple(entries))
