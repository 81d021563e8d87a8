"""Runs the reference batch and the axes, and compares."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from moe_runtime.engine.llm import LLM
from moe_runtime.eplb.placement import ModelPlacement, contiguous_model_placement
from moe_runtime.kernels.attention import BLOCK_SIZE
from moe_runtime.kernels.schedules import Control, control
from moe_runtime.verify.axes import AXES, AxisSetup
from moe_runtime.verify.compare import (
    Output,
    count_logprob_differences,
    digest_outputs,
    encode_output,
    first_difference,
)
from moe_runtime.verify.config import CheckConfig
from moe_runtime.verify.prompts import PromptSource
from moe_runtime.verify.report import AxisResult, CheckReport
from moe_runtime.verify.runner import Run, Runner, RunResult
from moe_runtime.verify.soak import SOAK, soak
from moe_runtime.verify.topologies import Topology, copies_topology, other_topologies, own_topology

__all__ = ["ProgressFactory", "check"]

logger = logging.getLogger(__name__)

ProgressFactory = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]
"""Opens a display under a name; what it yields is told (done, total)."""


def check(
    llm: LLM,
    config: CheckConfig,
    progress: ProgressFactory,
    on_axis: Callable[[CheckReport], None] = lambda _: None,
) -> CheckReport:
    """Run a check; a collective of all ranks with equal arguments, which all get equal results.

    A control is in force in every run, the reference included: what differs then differs with the batch.

    Args:
        llm: The loaded model.
        config: What to run.
        progress: Shows progress.
        on_axis: Told of the report so far, after the reference batch and after each axis.

    Raises:
        ValueError: the context is too short for the outputs.
    """
    context = llm.limits.max_total_tokens
    if config.max_tokens >= context:
        raise ValueError(f"max_tokens ({config.max_tokens}) must be below the context length ({context})")
    start_s = time.perf_counter()
    source = PromptSource(
        seed=config.seed,
        vocab_size=llm.limits.vocab_size,
        context=context,
        max_tokens=config.max_tokens,
    )
    cases = source.random_cases(config.num_prompts, both=config.full)
    runner = Runner(llm)
    with control(Control(config.control)):
        reference_run = Run(name="reference", cases=cases)
        (result,) = _run_all(runner, "reference", [reference_run], progress)
        reference = {case.name: output for case, output in zip(cases, result.outputs, strict=True)}
        report = CheckReport(
            facts=_facts(llm, config),
            digest=digest_outputs(reference),
            control=Control(config.control),
            expected_digest=config.expect_digest,
            is_complete=False,
        )
        on_axis(report)
        setup = AxisSetup(
            source=source,
            cases=cases,
            reference=reference,
            num_engines=llm.num_engines,
            block_size=BLOCK_SIZE,
            max_num_seqs=llm.config.max_num_seqs,
            prefix_cache=llm.config.prefix_cache,
            enforce_eager=llm.config.enforce_eager if llm.model.plan.device.type == "cuda" else None,
            num_alone=config.num_alone,
            full=config.full,
            has_draft_model=llm.config.speculative == "draft",
            captures=own_topology(llm).captures,
            overlap=None if llm.config.tp > 1 else llm.engine.runner.overlaps,
            has_tokenizer=llm.tokenizer is not None,
            placement=None if llm.model.plan.fixed_reason else llm.placement,
            copies=_copies(llm),
            topologies=other_topologies(
                own_topology(llm),
                num_ranks=llm.group.size,
                level=llm.config.invariance,
                full=config.full,
                deepep=_deepep_is_there(llm),
            ),
        )
        for name in config.axis_names:
            if name == SOAK:
                assert config.soak_minutes is not None, "a soak has a length"
                found = soak(runner, config.seed, config.soak_minutes, progress)
            else:
                found = _check_axis(runner, name, setup, progress)
            logger.info("%s: %d outputs, %s, %.1f s", name, found.num_cases, found.finding, found.wall_s)
            report.axes.append(found)
            report.wall_s = time.perf_counter() - start_s
            on_axis(report)
    runner.restore()
    report.wall_s, report.is_complete = time.perf_counter() - start_s, True
    return report


def _deepep_is_there(llm: LLM) -> bool:
    """Whether all ranks run on GPUs and find deep_ep; that it can be opened shows when it is."""
    found = llm.model.plan.device.type == "cuda" and importlib.util.find_spec("deep_ep") is not None
    return bool(llm.group.all_gather(torch.tensor([int(found)])).all())


def _check_axis(runner: Runner, name: str, setup: AxisSetup, progress: ProgressFactory) -> AxisResult:
    start_s = time.perf_counter()
    axis = AXES[name]
    runs = axis.make_runs(setup)
    if not runs and axis.absent is not None:
        return AxisResult(name=name, verdict=axis.verdict, not_applicable=axis.absent)
    results = _run_all(runner, name, runs, progress)
    found = AxisResult(name=name, verdict=axis.verdict)
    found.num_runs = sum(result.not_run is None for result in results)
    found.num_preemptions = sum(result.num_preemptions for result in results)
    found.num_cached_tokens = sum(result.num_cached_tokens for result in results)
    found.num_accepted_drafts = sum(result.num_accepted_drafts for result in results)
    found.num_rejected_drafts = sum(result.num_rejected_drafts for result in results)
    expected = dict(setup.reference)
    distinct: set[tuple[str, int, bytes]] = set()
    bad_run: tuple[Run, RunResult] | None = None
    for run, result in zip(runs, results, strict=True):
        if result.not_run is not None:
            assert run.topology is not None, "the deployment of the check is there"
            found.not_run[run.topology.name] = result.not_run
            continue
        num_differing_before = found.num_differing
        for i, (case, output) in enumerate(zip(run.cases, result.outputs, strict=True)):
            num_tokens = len(output.token_ids)
            distinct.add((case.name, num_tokens, encode_output(output)))
            if case.name not in expected:
                expected[case.name] = output
                continue
            is_aborted = run.disturbances is not None and i in run.disturbances.abort_at
            wanted = expected[case.name].prefix(num_tokens if is_aborted else case.num_output_tokens)
            distinct.add((case.name, len(wanted.token_ids), encode_output(wanted)))
            found.num_cases += 1
            difference = first_difference(run.name, case.name, wanted, output)
            if difference is not None:
                found.num_differing += 1
                if bad_run is None:
                    found.first_difference, bad_run = difference, (run, result)
        if run.topology is not None:
            found.deployments[run.name] = found.num_differing - num_differing_before
    found.num_requests = len({(name, num_tokens) for name, num_tokens, _ in distinct})
    found.num_unique_outputs = len(distinct)
    if found.not_run and found.num_runs == 0:
        found.not_applicable = "not applicable: no other deployment can be here"
    elif found.num_cases == 0:
        found.proves_nothing = "no request ran twice: this proves nothing"
    elif axis.needs_preemption and found.num_preemptions == 0:
        found.proves_nothing = "no request was preempted: this proves nothing"
    elif axis.needs_hits and found.num_cached_tokens == 0:
        found.proves_nothing = "no token was found in a cache: this proves nothing"
    elif axis.needs_drafts and not (found.num_accepted_drafts and found.num_rejected_drafts):
        found.proves_nothing = "no draft was right, or none was wrong: this proves nothing"
    if bad_run is not None:
        forced = _with_forced_tokens(runner, name, *bad_run, expected, progress)
        for case, output in zip(bad_run[0].cases, forced, strict=True):
            wanted = expected[case.name].prefix(len(output.token_ids))
            found.num_forced_tokens += len(output.token_ids)
            found.num_forced_differing += count_logprob_differences(wanted.logprobs, output.logprobs)
    found.wall_s = time.perf_counter() - start_s
    return found


def _with_forced_tokens(
    runner: Runner,
    name: str,
    run: Run,
    result: RunResult,
    expected: Mapping[str, Output],
    progress: ProgressFactory,
) -> list[Output]:
    """The run again with the reference tokens as its output, so that every position has the same past."""
    if all(case.is_forced for case in run.cases):
        return result.outputs
    cases = [
        case if case.is_forced else case.forced(expected[case.name].token_ids[: case.num_output_tokens])
        for case in run.cases
    ]
    (again,) = _run_all(runner, f"{name}, reference tokens forced", [replace(run, cases=cases)], progress)
    return again.outputs


def _run_all(runner: Runner, what: str, runs: Sequence[Run], progress: ProgressFactory) -> list[RunResult]:
    total = sum(len(run.cases) for run in runs)
    results: list[RunResult] = []
    with progress(what) as on_progress:
        done = 0
        for run in runs:
            num_cases = len(run.cases)

            def on_finished(num_mine: int, before: int = done, most: int = num_cases) -> None:
                # The other ranks' share is guessed until the run ends.
                on_progress(before + min(most, num_mine * runner.llm.num_engines), total)

            results.append(runner.run(run, on_finished=on_finished))
            done += num_cases
            on_progress(done, total)
    return results


def _copies(llm: LLM) -> tuple[Topology, ModelPlacement] | None:
    plan = llm.model.plan
    num_layers, num_experts = len(plan.config.moe_layer_ids), plan.config.num_experts
    found = copies_topology(
        own_topology(llm),
        num_ranks=llm.group.size,
        num_experts=num_experts if num_layers else 0,
        level=llm.config.invariance,
    )
    if found is None:
        return None
    topology, ep_size = found
    num_copies = topology.num_redundant_experts or 0
    return topology, contiguous_model_placement(num_layers, num_experts, ep_size, num_copies)


def _facts(llm: LLM, config: CheckConfig) -> dict[str, str | int]:
    return {
        "model": llm.config.model,
        "fingerprint": llm.model.plan.fingerprint,
        "dtype": llm.model.plan.dtype,
        "context": llm.limits.max_total_tokens,
        "ranks": llm.group.size,
        "transport": llm.transport.name,
        "tp": llm.config.tp,
        "invariance": llm.config.invariance,
        "multiple reduction": "on" if llm.model.plan.multiple_reduction.enabled else "off",
        "prompts": config.num_prompts,
        "output tokens": config.max_tokens,
        "seed": config.seed,
    }
