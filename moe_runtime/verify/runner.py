"""Runs batches of requests on the ranks under given limits, and brings their outputs home."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from moe_runtime.engine.llm import LLM, RequestOutput
from moe_runtime.engine.messages import TokenLogprobs
from moe_runtime.verify.compare import Output
from moe_runtime.verify.prompts import Case

__all__ = ["Run", "RunResult", "Runner"]


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
    """

    name: str
    cases: Sequence[Case]
    ranks: Sequence[int] | None = None
    arrival_steps: Sequence[int] | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_blocks: int | None = None
    enforce_eager: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a batch gave.

    Attributes:
        outputs: In the order of the cases; the same on every rank.
        num_preemptions: Over all ranks.
        wall_s: On this rank.
    """

    outputs: list[Output]
    num_preemptions: int
    wall_s: float


class Runner:
    """Runs batches one after another; a collective of all ranks with equal arguments.

    Args:
        llm: The loaded model. Engines are replaced where limits change; otherwise blocks are used again as earlier
            runs left them.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._start_limits = (
            llm.config.max_num_seqs,
            llm.config.max_num_batched_tokens,
            llm.deployment.num_kv_blocks,
            llm.config.enforce_eager,
        )
        self._limits = self._start_limits

    def run(self, run: Run, *, on_finished: Callable[[int], None] | None = None) -> RunResult:
        """Run a batch to its end.

        Args:
            run: The batch.
            on_finished: Told how many of this rank's requests have finished.
        """
        start_s = time.perf_counter()
        self._apply_limits(run)
        num_preemptions_before = self.llm.engine.stats().num_preemptions
        results = self.llm.generate(
            [case.prompt_ids for case in run.cases],
            [case.params for case in run.cases],
            ranks=run.ranks,
            arrival_steps=run.arrival_steps,
            on_finished=on_finished,
        )
        num_preemptions = self.llm.engine.stats().num_preemptions - num_preemptions_before
        total = self.llm.group.all_gather(torch.tensor([num_preemptions])).sum()
        return RunResult(
            outputs=[_output(case, result) for case, result in zip(run.cases, results, strict=True)],
            num_preemptions=int(total),
            wall_s=time.perf_counter() - start_s,
        )

    def _apply_limits(self, run: Run) -> None:
        wanted = (run.max_num_seqs, run.max_num_batched_tokens, run.kv_cache_blocks)
        max_num_seqs, max_num_batched_tokens, kv_cache_blocks = (
            own or start for own, start in zip(wanted, self._start_limits[:3], strict=True)
        )
        enforce_eager = self._start_limits[3] if run.enforce_eager is None else run.enforce_eager
        limits = (max_num_seqs, max_num_batched_tokens, kv_cache_blocks, enforce_eager)
        if limits != self._limits:
            self.llm.reconfigure(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                kv_cache_blocks=kv_cache_blocks,
                enforce_eager=enforce_eager,
            )
            self._limits = limits


def _output(case: Case, result: RequestOutput) -> Output:
    if not case.num_scored:
        (choice,) = result.outputs
        return Output(token_ids=choice.token_ids, logprobs=choice.logprobs or ())
    assert result.prompt_logprobs is not None, f"{case.name} asked for prompt logprobs"
    entries: list[TokenLogprobs] = []
    for entry in result.prompt_logprobs[-case.num_scored :]:
        assert entry is not None, "only the first prompt token has no logprob, and no output starts there"
        entries.append(entry)
    return Output(token_ids=case.prompt_ids[-case.num_scored :], logprobs=tuple(entries))
