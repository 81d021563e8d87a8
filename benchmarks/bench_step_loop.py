"""Host time per decode step, by the parts of the step loop, at 1, 64 and 256 sequences.

    python benchmarks/bench_step_loop.py --output benchmarks/results/step_loop_cpu.json
    python benchmarks/bench_step_loop.py --device cuda --output benchmarks/results/step_loop_h200.json

On the CPU the real engine and the real host code of the GPU's runner run with a device that does nothing and costs
nothing, so CPU time of the thread is the host's part alone. On a GPU the offline engine runs Qwen3-30B-A3B dimensions
with dummy weights, and the wall time of each part is taken; ``wait`` is what the host waits for the device, and no host
time. Greedy requests of 128 prompt tokens. Medians over ``--steps`` decode steps, of ``--repeats`` the least disturbed
(lowest total): other load on the machine only adds.

schedule: which sequences run. vector: exchange of the step vector. batch: rows, plan, device inputs. launch: slots,
copies, kernels or graph. collect: results to tokens. advance: tokens into sequences, ends. messages: report to the
front end. loop: the rest of the step. cpu_batch: what the CPU's runner does in place of batch; not part of the total.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from part_timing import PartTimer
from shapes import write_config

from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.tensor_parallel import TensorParallel
from moe_runtime.engine import cuda_runner, device_copies
from moe_runtime.engine import engine as engine_module
from moe_runtime.engine.batch import make_batch
from moe_runtime.engine.cuda_runner import CudaRunner
from moe_runtime.engine.engine import Engine
from moe_runtime.engine.messages import RankReport, encode
from moe_runtime.engine.request import RequestLimits, SamplingParams, make_request
from moe_runtime.engine.runner import LaunchedStep
from moe_runtime.engine.scheduler import ScheduledChunk, Scheduler, SchedulerConfig
from moe_runtime.kernels.gpu_schedules import GpuSchedules

PROMPT_TOKENS = 128
MAX_MODEL_LEN = 4096
VOCAB_SIZE = 1024
LARGEST = 256


class StandInRunner(CudaRunner):
    """The GPU runner's host code; what it would launch costs nothing, and every token is 0."""

    def __init__(self) -> None:
        model = SimpleNamespace(
            num_kv_heads=1, head_dim=1, num_layers=0, vocab_size=VOCAB_SIZE, num_query_heads_per_kv_head=1
        )
        decoder: Any = SimpleNamespace(
            local=model,
            config=model,
            device=torch.device("cpu"),
            dtype=torch.bfloat16,
            tensor_parallel=TensorParallel(),
            expert_counts=torch.zeros(1, 1, dtype=torch.int64),
            max_split_rows=64,
            waits_for=None,
            schedules=GpuSchedules("interpreter", torch.bfloat16),
        )
        super().__init__(decoder, 1, LARGEST, MAX_MODEL_LEN, use_graphs=False)

    def _launch_decode(self, bucket: int, variant: str, rehearse: bool) -> None:
        pass

    def _mixed(self, plan: Any, slots: Any, tokens_per_rank: Any) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens = len(plan.token_ids)
        return torch.zeros(num_tokens, 1), torch.zeros(num_tokens, dtype=torch.int32)

    def _score_hidden(self, rows: Any, hidden: torch.Tensor, token_ids: torch.Tensor) -> LaunchedStep:
        return self._score(rows, self.logits[: len(rows)], token_ids, greedy_done=True)


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--num-seqs", default="1,64,256")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=48, help="of the model on a GPU")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engine, limits = _stand_in() if options.device == "cpu" else _on_gpu(Path(folder), options.layers)
    result: dict[str, Any] = {
        "device": "none: stand-in" if options.device == "cpu" else torch.cuda.get_device_name(),
        "host": platform.processor() or platform.machine(),
        "num_cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "clock": "CPU time of the thread" if options.device == "cpu" else "wall",
        "unit": "us per step",
        "steps": options.steps,
        "repeats": options.repeats,
    }
    for num_seqs in map(int, options.num_seqs.split(",")):
        found = [measure(engine, limits, num_seqs, options.steps) for _ in range(options.repeats)]
        best = min(found, key=lambda parts: parts["total"] - parts.get("wait", 0.0))
        result[f"{num_seqs} sequences"] = {part: round(us, 1) for part, us in best.items()}
        print(num_seqs, ", ".join(f"{part} {us:.0f}" for part, us in best.items()), flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


def measure(engine: Engine, limits: RequestLimits, num_seqs: int, num_steps: int) -> dict[str, float]:
    """Median microseconds of each part over decode steps of ``num_seqs`` sequences, all from one prefill on."""
    clock_ns = time.thread_time_ns if engine.runner.device.type == "cpu" else time.perf_counter_ns
    timer = PartTimer(clock_ns)
    params = SamplingParams(temperature=0.0, max_tokens=num_steps + 20, ignore_eos=True, seed=0)
    for i in range(num_seqs):
        prompt = [(i + j) % VOCAB_SIZE for j in range(PROMPT_TOKENS)]
        engine.add_request(make_request(str(i), prompt, params, limits))
    while any(s.num_uncomputed_tokens > 1 for s in (*engine.scheduler.waiting, *engine.scheduler.running)):
        engine.step()
    for _ in range(4):
        engine.step()
    places: list[tuple[Any, str, str]] = [
        (engine, "step", "loop"),
        (Scheduler, "schedule", "schedule"),
        (engine_module, "exchange_step", "vector"),
        (cuda_runner, "wanted_rows", "batch"),
        (cuda_runner, "plan_step", "batch"),
        (CudaRunner, "_decode", "batch"),
        (type(engine.runner), "_launch_decode", "launch"),
        (cuda_runner.InputRing, "upload", "launch"),
        (engine.runner, "launch", "launch"),
        (engine, "_collect", "collect"),
        (engine, "_advance", "advance"),
        (device_copies.DeviceEvent, "wait", "wait"),
    ]
    if engine.runner.graphs is not None:  # type: ignore[attr-defined]
        places.append((engine.runner.graphs, "replay", "launch"))  # type: ignore[attr-defined]
    report = _Report(engine)
    with timer.wrap_all([*places, (report, "make", "messages")]):
        for _ in range(num_steps):
            _, outputs = engine.step()
            report.make(outputs)
            timer.end_step()
    medians = timer.medians_us()
    medians["cpu_batch"] = _cpu_batch_us(engine)
    engine.abort_all()
    while not engine.step()[0].may_sleep:
        pass
    return medians


def _cpu_batch_us(engine: Engine) -> float:
    """Median microseconds of a decode step's tensors as the CPU's runner makes them, 8 query heads to a key head."""
    chunks = [ScheduledChunk(sequence, 1) for sequence in engine.scheduler.running]
    took_us = []
    for _ in range(20):
        start_ns = time.thread_time_ns()
        make_batch(chunks, [len(chunks)], 8)
        took_us.append((time.thread_time_ns() - start_ns) / 1e3)
    return statistics.median(took_us)


class _Report:
    """What a rank tells the front end after a step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def make(self, outputs: list[Any]) -> bytes:
        """Encoded."""
        return encode(RankReport(0, 1, tuple(outputs), self.engine.stats(), None, None, None, ()))


def _stand_in() -> tuple[Engine, RequestLimits]:
    num_blocks = LARGEST * (MAX_MODEL_LEN // 64)
    limits = RequestLimits(
        vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, max_kv_tokens=64 * num_blocks, eos_token_ids=(1,)
    )
    config = SchedulerConfig(max_num_seqs=LARGEST, max_num_batched_tokens=8192)
    return Engine(StandInRunner(), num_blocks, config, RankGroup(), (1,)), limits


def _on_gpu(folder: Path, num_layers: int) -> tuple[Engine, RequestLimits]:
    from moe_runtime.engine.llm import LLM

    llm = LLM(
        str(write_config(folder, num_hidden_layers=num_layers)),
        load_format="dummy",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=LARGEST,
        max_num_batched_tokens=8192,
    )
    assert isinstance(llm.engine, Engine), "one rank has no follower"
    return llm.engine, llm.limits


if __name__ == "__main__":
    main()
