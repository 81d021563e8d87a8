"""Batches of the axes ``preemption`` and ``overlap``: when requests are interrupted, and when steps are planned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from moe_runtime.engine.disturbances import PlannedDisturbances
from moe_runtime.verify.prompts import Case
from moe_runtime.verify.runner import Run

if TYPE_CHECKING:
    from moe_runtime.verify.axes import AxisSetup

__all__ = ["OVERLAP_ABSENT", "overlap_runs", "phases", "preemption_runs"]

NUM_PREEMPTED = 4
NUM_OVERLAPPED = 9
OVERLAP_ABSENT = "not applicable: ranks that share an attention do not overlap"


def preemption_runs(setup: AxisSetup) -> list[Run]:
    """Every case preempted again and again: amid its prompt when it has computed a block less one token, a block, and
    one token more; at the same place while it is recomputed; once its prompt is computed; in decode around the next end
    of a block; with its last token to choose. Prompts run in chunks of such lengths, the first one on its own.
    """
    cases = [case for case in setup.cases if case.num_output_tokens > 1]
    cases = cases if setup.full else cases[:NUM_PREEMPTED]
    runs = []
    for edge in (setup.block_size - 1, setup.block_size, setup.block_size + 1):
        points = {i: phases(case, edge, setup.block_size) for i, case in enumerate(cases)}
        runs.append(
            Run(
                name=f"preempted at {edge} tokens and in every phase",
                cases=cases,
                max_num_seqs=min(edge, max(2, len(cases))),
                max_num_batched_tokens=edge,
                disturbances=PlannedDisturbances(preempt_at=points),
            )
        )
    return [run for run in runs if run.cases]


def phases(case: Case, edge: int, block_size: int) -> list[int]:
    """Numbers of computed tokens at which a case is preempted; it computes all but the last one of its output.

    Where its prompt is recomputed in one step, a case has one more token of its output at each preemption; points that
    it would then be too late for are left out.

    Example: 100 prompt and 50 output tokens, edge 63, blocks of 64: 63, 63, 100, 127, 148; with 4 output tokens 63, 63,
    100.
    """
    num_prompt = len(case.prompt_ids)
    most = (
        num_prompt + case.num_output_tokens - 2
    )  # one step before its last: a step boundary that it will meet
    amid = [edge, edge] if edge < num_prompt else [1]
    next_end = (num_prompt // block_size + 1) * block_size + edge - block_size
    points: list[int] = []
    num_output = 0
    for count in (*amid, num_prompt, next_end, most):
        latest = max(num_output + 1, count - num_prompt + 1)
        if count <= most and latest < case.num_output_tokens:
            points.append(count)
            num_output = latest
    return points


def overlap_runs(setup: AxisSetup) -> list[Run]:
    """The reference batch the other way than the engine started; then, both ways, a batch in which some requests are
    aborted, some preempted, some end early and some have their prompt scored, in a cache that they fill.
    """
    if setup.overlap is None:
        return []
    other: Literal["on", "off"] = "off" if setup.overlap else "on"
    runs = [Run(name=f"overlap {other}", cases=setup.cases, overlap=other)]
    cases = setup.cases if setup.full else setup.cases[:NUM_OVERLAPPED]
    mixed: list[Case] = []
    abort_at: dict[int, int] = {}
    preempt_at: dict[int, list[int]] = {}
    for i, case in enumerate(cases):
        kind = i % 4
        if kind == 0:
            mixed.append(case.scored(setup.reference[case.name].token_ids))
            continue
        mixed.append(case.shortened(2 + 3 * i) if kind == 3 else case)
        if kind == 1 and case.num_output_tokens > 2:
            abort_at[i] = 1 + i % (case.num_output_tokens - 2)
        elif kind == 2:
            preempt_at[i] = phases(case, setup.block_size, setup.block_size)[1:]
    disturbances = PlannedDisturbances(preempt_at=preempt_at, abort_at=abort_at)
    blocks = sorted(map(setup.end_blocks, mixed))
    ways: tuple[Literal["on", "off"], ...] = ("on", "off")
    for way in ways:
        runs.append(
            Run(
                name=f"overlap {way}, aborts, preemptions, scored prompts",
                cases=mixed,
                arrival_steps=setup.source.integers("overlap", len(mixed), 2 * len(mixed)),
                kv_cache_blocks=max(blocks[-1], sum(blocks) // (2 * setup.num_engines)),
                max_num_seqs=max(2, len(mixed) // 2),
                max_num_batched_tokens=2 * setup.block_size + len(mixed),
                overlap=way,
                disturbances=disturbances,
            )
        )
    return runs
