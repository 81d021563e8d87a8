"""Runs batches of requests on the ranks, deployed as asked, under given limits, and brings their outputs home."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

import msgspec
import torch

from moe_runtime.comm.groups import RankGroup
from moe_runtime.engine.disturbances import PlannedDisturbances
from moe_runtime.engine.llm import LLM, RequestOutput
from moe_runtime.engine.messages import SpeculationStats, TokenLogprobs
from moe_runtime.engine.model_loader import plan_model
from moe_runtime.eplb.placement import ModelPlacement
from moe_runtime.errors import CapacityError
from moe_runtime.kernels.replicas import CopyChoice, copy_choice
from moe_runtime.kernels.schedules import Control, control
from moe_runtime.verify.compare import Output
from moe_runtime.verify.drafting import Drafting, drafting
from moe_runtime.verify.prompts import Case
from moe_runtime.verify.room import lack_of_room
from moe_runtime.verify.topologies import Topology

__all__ = ["Run", "RunResult", "Runner"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One batch.

    Attributes:
        name: Told with a difference.
        cases: Requests in the order in which they are handed in.
        ranks: Group of ``tp`` ranks that serves each; by default they take turns.
        arrival_steps: Step at which each arrives; by default all at the first.
        max_num_seqs, max_num_batched_tokens, kv_cache_blocks: Limits; by default those the engine started with.
        enforce_eager: Launch kernels one by one; by default as the engine started.
        overlap: Plan the next step while one runs; by default as the engine started.
        moves: Moves of experts by step, as for ``LLM.generate``.
        copies: Which copy of an expert a row takes. Graphs keep the rule of their capture.
        disturbances: Preemptions and aborts; outputs of aborted cases are as long as they were.
        prefix_cache: ``off``: all of every request is computed. ``cold``: they share what they have in common, from
            empty caches on. ``warm``: also with earlier runs, if these had the same limits.
        drafting: What drafts; by default as the engine started.
        topology: Deployment to load for it; by default the one that the check started on. Where each rank is alone it
            runs its share of the cases, and ``ranks`` and ``arrival_steps`` are None.
    """

    name: str
    cases: Sequence[Case]
    ranks: Sequence[int] | None = None
    arrival_steps: Sequence[int] | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_blocks: int | None = None
    enforce_eager: bool | None = None
    overlap: Literal["on", "off"] | None = None
    moves: Mapping[int, ModelPlacement | None] = field(default_factory=dict)
    copies: CopyChoice = CopyChoice.SPREAD
    disturbances: PlannedDisturbances | None = None
    prefix_cache: Literal["off", "cold", "warm"] = "off"
    drafting: Drafting | None = None
    topology: Topology | None = None

    def __post_init__(self) -> None:
        is_alone = self.topology is not None and self.topology.ranks == "alone"
        assert not is_alone or (self.ranks, self.arrival_steps) == (None, None), (
            "each rank runs its share at once"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a batch gave.

    Attributes:
        outputs: In the order of the cases; the same on every rank.
        num_preemptions: Over all ranks.
        num_evictions: Blocks that prefix caches gave up, over all ranks.
        num_cached_tokens: Tokens that prefix caches spared computing.
        num_accepted_drafts, num_rejected_drafts: Over all ranks.
        wall_s: On this rank, with loading.
        not_run: Why the deployment cannot be here, where so; there are no outputs then.
    """

    outputs: list[Output]
    num_preemptions: int
    wall_s: float
    num_evictions: int = 0
    num_cached_tokens: int = 0
    num_accepted_drafts: int = 0
    num_rejected_drafts: int = 0
    not_run: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """Of an engine."""

    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_blocks: int
    enforce_eager: bool
    overlap: Literal["auto", "on", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Deployed:
    """What can run now."""

    llm: LLM
    topology: Topology | None
    limits: _Limits


class Runner:
    """Runs batches one after another; a collective of all ranks with equal arguments.

    Args:
        llm: The loaded model. Engines are replaced where limits change; otherwise blocks are used again as earlier
            runs left them. Its engine is stopped while another deployment runs, whose weights stand beside its own.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._start_limits = _Limits(
            max_num_seqs=llm.config.max_num_seqs,
            max_num_batched_tokens=llm.config.max_num_batched_tokens,
            kv_cache_blocks=llm.deployment.num_kv_blocks,
            enforce_eager=llm.config.enforce_eager,
            overlap=llm.config.overlap,
        )
        self._deployed: _Deployed | None = _Deployed(llm=llm, topology=None, limits=self._start_limits)
        self._refusals: dict[Topology, str] = {}

    def run(self, run: Run, *, on_finished: Callable[[int], None] | None = None) -> RunResult:
        """Run a batch to its end.

        Args:
            run: The batch.
            on_finished: Told how many of this rank's requests have finished.

        Raises:
            CapacityError, CheckpointError, InvarianceError, ValueError: As loading another deployment does.
        """
        with copy_choice(run.copies):
            return self._run(run, on_finished)

    def _run(self, run: Run, on_finished: Callable[[int], None] | None) -> RunResult:
        start_s = time.perf_counter()
        deployed = self._deploy(run)
        if isinstance(deployed, str):
            return RunResult(
                outputs=[], num_preemptions=0, wall_s=time.perf_counter() - start_s, not_run=deployed
            )
        llm, group = deployed.llm, self.llm.group
        is_alone = run.topology is not None and run.topology.ranks == "alone"
        cases = run.cases[group.rank :: group.size] if is_alone else run.cases
        if run.prefix_cache == "off":
            cases = [case.uncached() for case in cases]
        elif run.prefix_cache == "cold":
            llm.flush_cache()
        before = llm.engine.stats()
        with drafting(llm, run.drafting, [case.name for case in cases]):
            drafts_before = _num_drafts(llm)
            results = llm.generate(
                [case.prompt_ids for case in cases],
                [case.params for case in cases],
                ranks=run.ranks,
                arrival_steps=run.arrival_steps,
                moves=run.moves,
                disturbances=run.disturbances,
                on_finished=on_finished,
            )
            drafts = _num_drafts(llm) - drafts_before
        num_accepted, num_drafts = group.all_gather(drafts).sum(dim=0).tolist()
        after = llm.engine.stats()
        counts = [
            after.num_preemptions - before.num_preemptions,
            after.num_prefix_cache_evictions - before.num_prefix_cache_evictions,
        ]
        outputs = [_output(case, result) for case, result in zip(cases, results, strict=True)]
        if is_alone:
            outputs = _gather_shares(outputs, len(run.cases), group)
        num_preemptions, num_evictions = group.all_gather(torch.tensor(counts)).sum(dim=0).tolist()
        return RunResult(
            outputs=outputs,
            num_preemptions=num_preemptions,
            num_evictions=num_evictions,
            num_cached_tokens=sum(result.num_cached_tokens for result in results),
            wall_s=time.perf_counter() - start_s,
            num_accepted_drafts=num_accepted,
            num_rejected_drafts=num_drafts - num_accepted,
        )

    def restore(self) -> None:
        """Leave another deployment, so that the model that the check started on can be called again."""
        if self._deployed is not None and self._deployed.topology is None:
            return
        try:
            self._deploy(Run(name="as started", cases=()))
        except CapacityError as error:
            logger.warning("the engine stays stopped, for want of room: %s", error)

    def _deploy(self, run: Run) -> _Deployed | str:
        """Bring the deployment and limits of a run in force, or say why they cannot be."""
        limits, topology = self._limits(run), run.topology
        if self._deployed is not None and self._deployed.topology == topology:
            if self._deployed.limits == limits:
                return self._deployed
            llm = self._deployed.llm
            llm.reconfigure(**asdict(limits))
        else:
            self._retire()
            if topology is None:
                llm = self.llm
                llm.reconfigure(**asdict(limits))
            else:
                loaded = self._load(topology, limits)
                if isinstance(loaded, str):
                    return loaded
                llm = loaded
        self._deployed = _Deployed(llm=llm, topology=topology, limits=limits)
        return self._deployed

    def _limits(self, run: Run) -> _Limits:
        start = self._start_limits
        return _Limits(
            max_num_seqs=run.max_num_seqs or start.max_num_seqs,
            max_num_batched_tokens=run.max_num_batched_tokens or start.max_num_batched_tokens,
            kv_cache_blocks=run.kv_cache_blocks or start.kv_cache_blocks,
            enforce_eager=start.enforce_eager if run.enforce_eager is None else run.enforce_eager,
            overlap=run.overlap or start.overlap,
        )

    def _retire(self) -> None:
        """Make room: stop the engine that the check started on, or forget another deployment, weights and all."""
        if self._deployed is None:
            return
        llm, self._deployed = self._deployed.llm, None
        if llm is self.llm:
            llm.stop_engine()
        else:
            llm.close()
        del llm
        gc.collect()
        torch.cuda.empty_cache()

    def _load(self, topology: Topology, limits: _Limits) -> LLM | str:
        if topology in self._refusals:
            return self._refusals[topology]
        config = replace(
            topology.engine_config(self.llm.config),
            device="cuda" if self.llm.model.plan.device.type == "cuda" else "cpu",
            **asdict(limits),
        )
        is_alone = topology.ranks == "alone"
        group = RankGroup() if is_alone else replace(self.llm.group, links=None)
        # A control is for runs: the self-check at the start is to find nothing.
        with control(Control.NONE):
            try:
                refusal = lack_of_room(plan_model(config, group), config, self.llm.group, is_alone)
                if not refusal:
                    return LLM.from_config(config, group=group)
            except ValueError as error:
                if not topology.is_refused_by(error):
                    raise
                refusal = str(error)
        self._refusals[topology] = refusal
        return refusal


def _num_drafts(llm: LLM) -> torch.Tensor:
    """``[2]`` int64: drafts of this rank accepted so far, and drafts in all."""
    stats = llm.engine.stats().speculation or SpeculationStats()
    return torch.tensor([stats.num_accepted_tokens, stats.num_draft_tokens])


def _gather_shares(outputs: Sequence[Output], num_cases: int, group: RankGroup) -> list[Output]:
    """Outputs of all cases, of which rank r of W ran r, r + W, r + 2W, ..."""
    gathered = group.all_gather_bytes(msgspec.msgpack.encode(outputs))
    shares = [msgspec.msgpack.decode(data, type=list[Output]) for data in gathered]
    return [shares[i % group.size][i // group.size] for i in range(num_cases)]


def _output(case: Case, result: RequestOutput) -> Output:
    if not case.num_scored:
        # All that was promised of the request, choice after choice; prompt tokens that it wanted scored come first.
        scored = [entry for entry in result.prompt_logprobs or () if entry is not None]
        return Output(
            token_ids=tuple(token_id for choice in result.outputs for token_id in choice.token_ids),
            logprobs=(*scored, *(entry for choice in result.outputs for entry in choice.logprobs or ())),
        )
    assert result.prompt_logprobs is not None, f"{case.name} asked for prompt logprobs"
    entries: list[TokenLogprobs] = []
    for entry in result.prompt_logprobs[-case.num_scored :]:
        assert entry is not None, "only the first prompt token has no logprob, and no output starts there"
        entries.append(entry)
    return Output(token_ids=case.prompt_ids[-case.num_scored :], logprobs=tuple(entries))
