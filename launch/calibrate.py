"""Times kernels, or between ranks what they exchange, on the machine at hand, and writes a device file for the planner.

Exit codes: 0 written, 2 usage.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.transports import open_transport
from moe_runtime.engine.llm import LLM
from moe_runtime.errors import CheckpointError
from moe_runtime.exit_codes import EXIT_OK
from moe_runtime.launch.cli import parse_config, usage_error
from moe_runtime.launch.distributed import close_ranks, init_ranks
from moe_runtime.launch.logs import setup_logging
from moe_runtime.models.resolve import BUILTIN
from moe_runtime.planner.calibration import base_of, device_file, write_device
from moe_runtime.planner.config import CalibrateConfig
from moe_runtime.planner.cpu_times import cpu_kernel_times
from moe_runtime.planner.exchange_times import cpu_exchange_times, gpu_exchange_rows
from moe_runtime.planner.shape_configs import load_shape
from moe_runtime.planner.sum_times import gpu_sum_times

__all__ = ["main"]


def main(args: Sequence[str] | None = None) -> int:
    """Calibrate. Returns the exit code."""
    config = parse_config(CalibrateConfig, args, prog="moe_runtime.calibrate")
    try:
        group = init_ranks(config.device)
        setup_logging(group.rank)
        on_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
        if on_gpu and not torch.cuda.is_available():
            raise ValueError("device (cuda) must be cpu here: torch sees no GPU")
        base = base_of(config.like or ("h200" if on_gpu else "cpu"))
        software = f"torch {torch.__version__}, Python {platform.python_version()}"
        shape = load_shape(config.model)
        if on_gpu:
            content = _gpu(config, base, software, group)
        else:
            kernels: Sequence[Any] = ()
            exchange: list[Any] = []
            if group.size == 1:
                kernels = cpu_kernel_times(_engine(config.model), shape)
            else:
                for name in ("collective", "symmetric"):
                    transport = open_transport(group, name)
                    exchange += cpu_exchange_times(transport.group, shape, name)
            content = device_file(
                base,
                name=config.output.stem,
                title=config.title or (str(base["title"]) if exchange else f"{platform.machine()} CPU"),
                software=software,
                memory_bytes=_memory_bytes(),
                num_multiprocessors=_num_cores(),
                kernels=kernels,
                exchange=exchange,
            )
        if group.rank == 0:
            write_device(content, config.output)
            print(f"written to {config.output}")
        close_ranks(group)
    except (CheckpointError, ValueError, OSError) as error:
        usage_error(str(error))
    return EXIT_OK


def _gpu(config: CalibrateConfig, base: dict[str, Any], software: str, group: RankGroup) -> dict[str, Any]:
    """Kernels by a process alone, the sums of a tensor-parallel group by torchrun's ranks."""
    try:
        import triton  # noqa: F401
    except ModuleNotFoundError:
        raise ValueError("calibrating a GPU needs Triton: install moe-runtime[gpu]") from None
    shape = load_shape(config.model)
    if shape.attention.kind != "gqa" or shape.dtype != "bfloat16":
        raise ValueError(f"model ({config.model}) must be one in bfloat16 that the GPU path runs")
    exchange = () if config.dispatch_results is None else gpu_exchange_rows(config.dispatch_results)
    kernels: Sequence[Any] = ()
    sums: Sequence[Any] = ()
    rates: dict[str, float] = {}
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    with torch.inference_mode():
        if group.size == 1:
            from moe_runtime.planner.gpu_times import attained_rates, gpu_kernel_times
            from moe_runtime.planner.kernel_cases import Cases, setting_of

            rates = attained_rates()
            kernels = list(gpu_kernel_times(shape, Cases(setting_of(shape), device)))
        else:
            sums = list(gpu_sum_times(group, shape, device))
    properties = torch.cuda.get_device_properties(device)
    return device_file(
        base,
        name=config.output.stem,
        title=config.title or properties.name,
        software=software,
        memory_bytes=properties.total_memory,
        num_multiprocessors=properties.multi_processor_count,
        kernels=kernels,
        exchange=exchange,
        all_reduce=sums,
        attained=rates,
        exchange_from=f"benchmarks/bench_dispatch.py ({config.dispatch_results})",
    )


def _engine(model: str) -> LLM:
    """One CPU rank with random weights, of a folder, a file or the built-in model."""
    if model == BUILTIN:
        return LLM(model, device="cpu")
    path = Path(model).expanduser()
    if path.is_dir():
        return LLM(str(path), device="cpu", load_format="dummy")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(json.loads(path.read_text())))
        return LLM(folder, device="cpu", load_format="dummy")


def _memory_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemTotal")


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))
