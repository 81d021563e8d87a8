"""The GPU engine for tests: compiled where there is a GPU, else on CPU tensors in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moe_runtime.engine import llm as llm_module
from moe_runtime.engine.llm import LLM
from moe_runtime.engine.model_loader import load_on_gpu
from tests.checkpoints import tiny_config, write_checkpoint
from tests.kernels.triton_interpreter import DEVICE

__all__ = ["gpu_config", "gpu_llm", "write_gpu_checkpoint"]


def gpu_config(**changes: Any) -> dict[str, Any]:
    """A ``config.json`` as small as the GPU kernels take."""
    small: dict[str, Any] = {
        "dtype": "bfloat16",
        "head_dim": 32,
        "moe_intermediate_size": 40,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 96,
    }
    return tiny_config("qwen3_moe", **(small | changes))


def write_gpu_checkpoint(folder: Path, **changes: Any) -> Path:
    """A checkpoint of ``gpu_config``."""
    return write_checkpoint(folder, gpu_config(**changes))


def gpu_llm(folder: Path, **options: Any) -> LLM:
    """An engine with the GPU's decoder and runner."""
    if DEVICE == "cuda":
        return LLM(str(folder), device="cuda", **options)

    def load(plan: Any, config: Any, group: Any, on_progress: Any = None) -> Any:
        assert plan.device == torch.device("cpu"), "the interpreter takes CPU tensors"
        return load_on_gpu(plan, config, on_progress)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm_module, "load_model", load)
        return LLM(str(folder), device="cpu", **options)
