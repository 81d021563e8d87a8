"""The soak: random mixed traffic for some minutes, and a fixed set of probes that must never change a bit.

Traffic comes in rounds, each one batch under limits of its own. What a round holds depends on the seed and its number
alone; only how many rounds there are depends on the clock, by rank 0's. The probes are in every round, in other
company, places, ranks and steps each time. Nobody compares the traffic: it is new every time.

``KINDS`` and ``CONDITIONS`` are the lists to extend by what an engine can do.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from moe_runtime.engine.disturbances import PlannedDisturbances
from moe_runtime.engine.llm import LLM
from moe_runtime.engine.request import SamplingParams
from moe_runtime.kernels.attention import BLOCK_SIZE
from moe_runtime.verify.axes import Verdict
from moe_runtime.verify.compare import Output, encode_output, first_difference
from moe_runtime.verify.drafting import Drafting
from moe_runtime.verify.prompts import NUM_TOP_LOGPROBS, STRUCTURED_FORMS, Case
from moe_runtime.verify.report import AxisResult
from moe_runtime.verify.runner import Run, Runner

__all__ = ["CONDITIONS", "KINDS", "SOAK", "Kind", "probes", "soak", "soak_round"]

SOAK = "soak"
NUM_TRAFFIC = (4, 24)
NUM_ROUND_STEPS = 60
ABORTED, PREEMPTED = 0.15, 0.3
"""Shares of the traffic, and of the probes."""
MOST_DRAFTS = 8
REPEATED = 0.5
"""Share of the traffic that begins as a probe does."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A feature of requests.

    Attributes:
        name: Shown in the table.
        change: The parameters with it, given a random source and the ids of the vocabulary.
        needs_tokenizer: Not for a checkpoint without one.
    """

    name: str
    change: Callable[[SamplingParams, random.Random, range], SamplingParams]
    needs_tokenizer: bool = False


def _sampled(params: SamplingParams, rng: random.Random, vocabulary: range) -> SamplingParams:
    return replace(
        params,
        temperature=rng.choice((0.3, 1.0, 1.7)),
        top_p=rng.choice((1.0, 0.9)),
        top_k=rng.choice((0, 1, 40)),
        min_p=rng.choice((0.0, 0.05)),
    )


def _ruled(params: SamplingParams, rng: random.Random, vocabulary: range) -> SamplingParams:
    return replace(
        params,
        repetition_penalty=rng.choice((1.0, 1.3)),
        frequency_penalty=rng.choice((0.0, 0.5)),
        presence_penalty=rng.choice((0.0, -0.5)),
        logit_bias={rng.choice(vocabulary): rng.choice((-100.0, 2.0))},
    )


def _given(params: SamplingParams, rng: random.Random, vocabulary: range) -> SamplingParams:
    num_output = params.max_tokens
    if not num_output or params.structured_outputs is not None:
        return params
    return replace(params, forced_token_ids=tuple(rng.choices(vocabulary, k=num_output)))


def _structured(params: SamplingParams, rng: random.Random, vocabulary: range) -> SamplingParams:
    if not params.max_tokens or params.forced_token_ids is not None:
        return params
    return replace(params, structured_outputs=rng.choice(list(STRUCTURED_FORMS.values())))


KINDS: tuple[Kind, ...] = (
    Kind("sampled", _sampled),
    Kind("ruled", _ruled),
    Kind("choices", lambda params, rng, _: replace(params, n=rng.randint(2, 4))),
    Kind("logprobs", lambda params, rng, _: replace(params, logprobs=rng.randint(0, 20))),
    Kind("prompt logprobs", lambda params, rng, _: replace(params, prompt_logprobs=rng.randint(0, 5))),
    Kind("scored only", lambda params, rng, _: replace(params, max_tokens=0, prompt_logprobs=1)),
    Kind(
        "stop tokens",
        lambda params, rng, ids: replace(params, stop_token_ids=tuple(rng.sample(ids, min(5, len(ids))))),
    ),
    Kind("routed experts", lambda params, rng, _: replace(params, return_routed_experts=True)),
    Kind("uncached", lambda params, rng, _: replace(params, cache_prompt=False)),
    Kind("salted", lambda params, rng, _: replace(params, cache_salt=rng.choice(("a", "b")))),
    Kind("given", _given),
    Kind("structured", _structured, needs_tokenizer=True),
)
"""What a request of the traffic may have, each with a chance of a quarter."""

CONDITIONS: tuple[tuple[str, Callable[[random.Random], dict[str, Any]]], ...] = (
    ("roomy", lambda rng: {}),
    ("overlap", lambda rng: {"overlap": "on"}),
    ("small cache", lambda rng: {"small_cache": True}),
    ("overlap, small cache", lambda rng: {"overlap": "on", "small_cache": True}),
    ("small steps", lambda rng: {"max_num_batched_tokens": rng.choice((64, 65, 100)), "max_num_seqs": 16}),
    ("few sequences", lambda rng: {"max_num_seqs": rng.randint(1, 4)}),
    ("no overlap", lambda rng: {"overlap": "off"}),
)
"""Under what two rounds run, each in its turn: fields of ``Run``, and ``small_cache``: room for the longest request and
little more."""

CACHES: tuple[Literal["off", "cold", "warm"], ...] = ("warm", "cold", "off")
"""The prefix cache of a round, each in its turn: as the round before left it (where limits are the same), flushed, or
not used."""

DRAFTERS: tuple[Literal["off", "ngram", "right", "wrong", "mixed"], ...] = (
    "off",
    "mixed",
    "ngram",
    "right",
    "wrong",
)
"""What drafts in a round, each in its turn; ``CONDITIONS``, these and ``CACHES`` have lengths that meet in all ways."""


def probes(llm: LLM, seed: int) -> list[Case]:
    """The requests that are watched: short and long ones, greedy and seeded, ruled, with choices, scored prompts, two
    with a form where there is a tokenizer."""
    rng = random.Random(f"{seed} soak probes")
    context = llm.limits.max_total_tokens
    vocabulary = range(llm.limits.vocab_size)
    num_output = max(1, min(24, context // 4))
    base = SamplingParams(
        temperature=0.0, seed=0, max_tokens=num_output, ignore_eos=True, logprobs=NUM_TOP_LOGPROBS
    )
    seeded = replace(base, temperature=0.9, top_p=0.95)
    lengths = (1, 7, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, context // 4, context // 2, context)
    cases = []
    for i, length in enumerate(lengths):
        num_prompt = max(1, min(length, context - num_output))
        prompt = tuple(rng.choice(vocabulary) for _ in range(num_prompt))
        params = replace(seeded if i % 2 else base, seed=i)
        if i % 4 >= 2:
            params = replace(params, frequency_penalty=0.5, repetition_penalty=1.3)
        if i % 3 == 1:
            params = replace(params, prompt_logprobs=2)
        if i % 5 == 3:
            params = replace(params, n=2)
        cases.append(Case(name=f"probe {i}", prompt_ids=prompt, params=params))
    if llm.tokenizer is not None:
        for case, form in ((cases[4], "regex"), (cases[1], "schema")):
            # A length of output that nothing ends before.
            params = replace(case.params, structured_outputs=STRUCTURED_FORMS[form], n=1)
            cases.append(replace(case, name=f"{case.name}, {form}", params=params))
    return cases


def soak_round(
    llm: LLM,
    seed: int,
    number: int,
    watched: Sequence[Case],
    answers: Mapping[str, Sequence[int]] | None = None,
) -> tuple[Run, dict[str, int], Counter[str]]:
    """A round: its batch, where in it each watched request stands, and what it holds.

    Args:
        llm: Tells vocabulary, context, number of engines, and whether there is a tokenizer.
        seed, number: Decide the round.
        watched: Must be in it.
        answers: Output tokens of watched requests, for drafts; before they are known there are none.
    """
    rng = random.Random(f"{seed} soak round {number}")
    context, vocabulary = llm.limits.max_total_tokens, range(llm.limits.vocab_size)
    kinds: Counter[str] = Counter()
    cases: list[Case] = []
    aborted: dict[str, int] = {}
    for i in range(rng.randint(*NUM_TRAFFIC)):
        name = f"traffic {number}.{i}"
        num_output = rng.randint(2, max(2, min(48, context // 4)))
        longest = context - num_output
        lengths = (rng.randint(1, min(8, longest)), rng.randint(1, longest), min(BLOCK_SIZE, longest))
        prompt = tuple(rng.choice(vocabulary) for _ in range(rng.choice(lengths)))
        if rng.random() < REPEATED:
            shared = rng.choice(watched).prompt_ids
            prompt = (*shared[: rng.randint(0, len(shared))], *prompt[:8])[:longest]
        params = SamplingParams(temperature=0.0, seed=rng.randrange(2**62), max_tokens=num_output)
        for kind in KINDS:
            if rng.random() < 0.25 and not (kind.needs_tokenizer and llm.tokenizer is None):
                params = kind.change(params, rng, vocabulary)
                kinds[kind.name] += 1
        if rng.random() < ABORTED:  # one that nothing else ends before
            aborted[name] = rng.randint(0, max(0, num_output - 2 - MOST_DRAFTS))
            params = replace(
                params,
                n=1,
                max_tokens=num_output,
                ignore_eos=True,
                stop_token_ids=(),
                structured_outputs=None,
                cache_prompt=False,
            )
        cases.append(Case(name=name, prompt_ids=prompt, params=params))
    kinds["traffic"] = len(cases)
    cases += watched
    rng.shuffle(cases)
    places = {case.name: i for i, case in enumerate(cases)}
    preempt_at = {}
    for case in watched:
        most = len(case.prompt_ids) + case.num_output_tokens - 2 - MOST_DRAFTS  # drafts leap over no more
        if case.params.n == 1 and most > 0 and rng.random() < PREEMPTED:
            preempt_at[places[case.name]] = [rng.randint(1, most)]
    abort_at = {places[name]: count for name, count in aborted.items()}
    condition, fields = CONDITIONS[number // 2 % len(CONDITIONS)]
    options = fields(rng)
    cache, drafter = CACHES[number % len(CACHES)], DRAFTERS[number % len(DRAFTERS)]
    kinds[condition] += 1
    kinds[f"{cache} prefix cache"] += 1
    drafting = Drafting(
        kind=drafter if answers else "off", most_drafts=rng.randint(1, MOST_DRAFTS), answers=answers
    )
    kinds[drafting.name.partition(",")[0]] += 1
    kinds["aborted"], kinds["preempted on purpose"] = len(abort_at), len(preempt_at)
    if options.pop("small_cache", False):
        longest = max(len(case.prompt_ids) + (case.params.max_tokens or 0) for case in cases)
        options["kv_cache_blocks"] = -(-longest // BLOCK_SIZE) + 2
    run = Run(
        name=f"round {number}, {condition}",
        cases=cases,
        ranks=[rng.randrange(llm.num_engines) for _ in cases],
        arrival_steps=[rng.randrange(NUM_ROUND_STEPS) for _ in cases],
        disturbances=PlannedDisturbances(preempt_at=preempt_at, abort_at=abort_at),
        prefix_cache=cache,
        drafting=drafting,
        **options,
    )
    return run, {case.name: places[case.name] for case in watched}, kinds


def soak(
    runner: Runner,
    seed: int,
    minutes: float,
    progress: Callable[[str], AbstractContextManager[Callable[[int, int], None]]],
) -> AxisResult:
    """Run rounds until the time is over, at least two; a collective of all ranks.

    Args:
        runner: Runs batches.
        seed: Decides every round.
        minutes: How long; the round under way is run to its end.
        progress: Shows progress, in seconds.

    Returns:
        As of an axis: every output of a probe but the first is a case.
    """
    llm = runner.llm
    found = AxisResult(name=SOAK, verdict=Verdict.BATCH)
    watched = probes(llm, seed)
    expected: dict[str, Output] = {}
    distinct: set[tuple[str, bytes]] = set()
    kinds: Counter[str] = Counter()
    start_s = time.perf_counter()
    with progress(SOAK) as on_progress:
        number = 0
        while number < 2 or _goes_on(llm, start_s, minutes):
            answers = {name: output.token_ids for name, output in expected.items()}
            run, places, of_round = soak_round(llm, seed, number, watched, answers)
            result = runner.run(run)
            number += 1
            kinds += of_round
            kinds["cached tokens"] += result.num_cached_tokens
            kinds["accepted drafts"] += result.num_accepted_drafts
            kinds["wrong drafts"] += result.num_rejected_drafts
            found.num_runs, found.num_preemptions = number, found.num_preemptions + result.num_preemptions
            for name, place in places.items():
                output = result.outputs[place]
                distinct.add((name, encode_output(output)))
                wanted = expected.setdefault(name, output)
                found.num_cases += number > 1
                difference = first_difference(run.name, name, wanted, output)
                if difference is not None:
                    found.num_differing += 1
                    found.first_difference = found.first_difference or difference
            on_progress(round(time.perf_counter() - start_s), round(60 * minutes))
    found.num_requests, found.num_unique_outputs = len(expected), len(distinct)
    found.wall_s = time.perf_counter() - start_s
    shown = ", ".join(f"{count} {name}" for name, count in kinds.items() if count)
    found.note = f"{number} rounds of {len(watched)} probes among {shown}"
    return found


def _goes_on(llm: LLM, start_s: float, minutes: float) -> bool:
    """By rank 0's clock, for all."""
    left = torch.tensor([int(time.perf_counter() - start_s < 60 * minutes)])
    return bool(llm.group.all_gather(left)[0])
