"""What a rank is doing, read from the stacks of the threads that run it, which costs them nothing."""

from __future__ import annotations

from dataclasses import dataclass
from types import FrameType

__all__ = ["RankPhase", "rank_phase"]


@dataclass(frozen=True, slots=True)
class RankPhase:
    """A phase.

    Attributes:
        text: In words, with the innermost function of this package.
        waits: Whether other ranks are waited for, or may be.
    """

    text: str
    waits: bool = False


# The first that is on the stack counts; (module, function), what it means, whether it waits for other ranks.
_PHASES: tuple[tuple[str, str, str, bool], ...] = (
    ("moe_runtime.engine.step", "exchange_step", "waiting for the other ranks' step vectors", True),
    ("moe_runtime.engine.device_copies", "DeviceEvent.wait", "waiting for the device", True),
    ("moe_runtime.comm.groups", "RankGroup.exchange", "in an exchange with the other ranks", True),
    ("moe_runtime.engine.scheduler", "Scheduler.schedule", "scheduling", False),
    ("moe_runtime.engine.sampler", "score_rows", "sampling", False),
    ("moe_runtime.layers.attention", "Attention.__call__", "in an attention layer", False),
    ("moe_runtime.layers.mlp", "MoE.__call__", "in an expert layer", False),
    ("moe_runtime.layers.spread_experts", "SpreadExperts.run", "launching an expert layer", False),
    ("moe_runtime.engine.cpu_runner", "CpuRunner._run", "running the model", False),
    ("moe_runtime.engine.cpu_runner", "CpuRunner.launch", "preparing a step", False),
    ("moe_runtime.engine.cpu_runner", "CpuRunner.follow", "running the model", False),
    ("moe_runtime.engine.cuda_runner", "CudaRunner.launch", "launching", False),
    ("moe_runtime.engine.cuda_runner", "CudaRunner.follow", "launching", False),
    ("moe_runtime.engine.step_thread", "Job.wait", "waiting for its own thread of steps", False),
    ("moe_runtime.engine.engine", "Engine.step", "between scheduling and results", False),
    ("moe_runtime.engine.follower", "Follower.step", "following", False),
    ("moe_runtime.launch.rank_service", "RankService._receive", "idle or taking messages", False),
    ("moe_runtime.launch.rank_service", "RankService.run", "reporting or between steps", False),
    ("moe_runtime.engine.model_loader", "load_model", "loading the model", False),
    ("moe_runtime.engine.backend", "start_engine", "starting the engine", False),
    ("moe_runtime.launch.distributed", "close_ranks", "leaving", True),
)

_WAITS_FOR_STEPS = ("moe_runtime.engine.step_thread", "Job.wait")


def rank_phase(frame: FrameType | None, step_frame: FrameType | None = None) -> RankPhase:
    """The phase of a rank.

    Args:
        frame: Innermost frame of its main thread.
        step_frame: Of the thread that runs its steps, where there is one; it counts while the main thread waits for it.
    """
    stack = _stack(frame)
    if _WAITS_FOR_STEPS in stack and step_frame is not None:
        stack = _stack(step_frame) or stack
    if not stack:
        return RankPhase("outside this package")
    module, function = next(iter(stack))
    where = f"[{module.removeprefix('moe_runtime.')} {function}]"
    for phase_module, phase_function, text, waits in _PHASES:
        if (phase_module, phase_function) in stack:
            return RankPhase(f"{text} {where}", waits)
    return RankPhase(f"busy {where}")


def _stack(frame: FrameType | None) -> dict[tuple[str, str], None]:
    """Modules and functions of this package, innermost first."""
    stack: dict[tuple[str, str], None] = {}
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("moe_runtime."):
            stack[module, frame.f_code.co_qualname] = None
        frame = frame.f_back
    return stack
