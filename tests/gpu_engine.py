"""The GPU engine for tests: compiled where there is a GPU, else on CPU tensors in Triton's interpreter."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_runtime.engine import llm as llm_module
from moe_runtime.engine.llm import LLM
from moe_runtime.engine.model_loader import load_on_gpu
from tests.checkpoints import tiny_config, write_checkpoint
from tests.kernels.triton_interpreter import DEVICE

from moe_runtime.comm.gpu_exchange import StepShape  # isort: skip
from moe_runtime.kernels.attention import BLOCK_SIZE  # isort: skip
from moe_runtime.kernels.attention_tiles import make_row_tiles  # isort: skip
from moe_runtime.kernels.prefill_attention_triton import CANONICAL_ROWS  # isort: skip
from moe_runtime.layers.cuda_decoder import CudaDecoder, MixedInput, RowTiles  # isort: skip

__all__ = ["gpu_config", "gpu_llm", "gpu_logits", "qwen3_30b_config", "write_gpu_checkpoint"]


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


def write_gpu_checkpoint(folder: Path, *, kind: str = "normal", **changes: Any) -> Path:
    """A checkpoint of ``gpu_config``."""
    return write_checkpoint(folder, gpu_config(**changes), kind=kind)


def gpu_llm(folder: Path, **options: Any) -> LLM:
    """An engine with the GPU's decoder and runner."""
    if DEVICE == "cuda":
        return LLM(str(folder), device="cuda", **options)

    def load(plan: Any, *args: Any, **options: Any) -> Any:
        assert plan.device == torch.device("cpu"), "the interpreter takes CPU tensors"
        return load_on_gpu(plan, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm_module, "load_model", load)
        return LLM(str(folder), device="cpu", **options)


def gpu_logits(llm: LLM, ids: list[int]) -> torch.Tensor:
    """``[T, vocab]`` float32 logits of a prompt in one step of the GPU's decoder, on a cache of its own."""
    decoder = llm.model.decoder
    assert isinstance(decoder, CudaDecoder), "an engine of gpu_llm"
    config, num = decoder.config, len(ids)
    blocks = torch.arange(-(-num // BLOCK_SIZE), dtype=torch.int32, device=DEVICE)
    shape = (len(blocks), config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    caches = [
        (
            torch.zeros(shape, dtype=decoder.dtype, device=DEVICE),
            torch.zeros(shape, dtype=decoder.dtype, device=DEVICE),
        )
        for _ in decoder.layers
    ]
    tiles = make_row_tiles(
        [num],
        [0],
        num_groups=config.num_query_heads_per_kv_head,
        block_rows=CANONICAL_ROWS.block_rows,
        sequences=[0],
    )
    positions = torch.arange(num, dtype=torch.int32, device=DEVICE)
    step = MixedInput(
        shape=StepShape.of_tokens([num]),
        token_ids=torch.tensor(ids, dtype=torch.int32, device=DEVICE),
        positions=positions,
        slot_mapping=positions.long(),
        num_tokens=torch.tensor([num], dtype=torch.int32, device=DEVICE),
        block_table=blocks.view(1, -1),
        tiles=[RowTiles(schedule=CANONICAL_ROWS, tiles=torch.from_numpy(tiles).to(DEVICE))],
    )
    with torch.inference_mode():
        return decoder.logits(decoder.mixed(step, caches)).clone()


def qwen3_30b_config(folder: Path, **overrides: Any) -> Path:
    """A folder with the configuration of Qwen3-30B-A3B, for dummy weights; benchmarks have its dimensions."""
    shapes = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "shapes.py"))
    written: Path = shapes["write_config"](folder, **overrides)
    return written
