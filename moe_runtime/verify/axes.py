"""The axes of the check: which batches each runs. What a request gives must be the same in all of them.

A request is known by its name. Its reference is its output in the reference batch or, for the modes that bring their
own prompts (``single``, ``mixed``, ``prefix``), in the first batch that holds it. All batches but those of ``topology``
run on one deployment, so both levels promise these axes. What ``topology`` runs depends on the level
(verify/topologies.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from moe_runtime.eplb.placement import ModelPlacement
from moe_runtime.verify.compare import Output
from moe_runtime.verify.placements import random_placement
from moe_runtime.verify.prompts import Case, PromptSource
from moe_runtime.verify.runner import Run
from moe_runtime.verify.topologies import Topology

__all__ = [
    "AXES",
    "BUCKET_EDGES",
    "GRAPHS_ABSENT",
    "PLACEMENT_ABSENT",
    "TOKENIZER_ABSENT",
    "TOPOLOGIES_ABSENT",
    "Axis",
    "AxisSetup",
    "Verdict",
]

NUM_ALONE = 8
NUM_ELSEWHERE = 8
NUM_ARRIVAL_STEPS = 24
CHUNK_TOKENS = (63, 64, 65)
FULL_CHUNK_TOKENS = (16, 63, 64, 65, 127, 256)
BATCH_SIZES = (1, 2, 7, 16, 33, 64)
BUCKET_EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
FEWEST_STEP_TOKENS = 15
BUCKET_OUTPUT_TOKENS = 3
SHORT_OUTPUT_TOKENS = 8
GRAPHS_ABSENT = "not applicable: this device or transport has no graphs"
TOKENIZER_ABSENT = "not applicable: a grammar is over text, and the checkpoint has no tokenizer"
TOPOLOGIES_ABSENT = "not applicable: level batch promises one deployment, which has no other transport here"
PLACEMENT_ABSENT = (
    "not applicable: experts stay where they are on this deployment, and the level promises no other"
)
MOVE_STEPS = (1, 4)
NUM_RANDOM_BATCHES = 2
FULL_NUM_RANDOM_BATCHES = 10


class Verdict(StrEnum):
    """What an axis proves."""

    RUN_TO_RUN = "run-to-run"  # the same batch twice: deterministic
    POSITION = "position"  # the same batch in another order, on other ranks
    BATCH = "batch"  # other company, or none
    SCHEDULE = "schedule"  # other steps: chunks, preemption, prefill for decode
    TOPOLOGY = "topology"  # another number of ranks, TP size, transport


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisSetup:
    """What axes make their batches from.

    Attributes:
        source: Makes further prompts and random choices.
        cases: The reference batch.
        reference: Its outputs by name.
        num_engines: Groups of ``tp`` ranks, each with batches of its own.
        block_size: Tokens of a KV block.
        max_num_seqs: Most sequences that one of them runs at once.
        enforce_eager: Whether the engine started without graphs; None on a device that has none.
        captures: Whether the deployment of the check can have graphs.
        full: Every case, every output token, more batches.
        has_tokenizer: Whether texts can be asked for.
        topologies: Other deployments whose bits must be these.
        placement: Where experts are; None where they stay.
        copies: A deployment with copies of experts whose bits must be these, and where its experts are.
    """

    source: PromptSource
    cases: Sequence[Case]
    reference: Mapping[str, Output]
    num_engines: int
    block_size: int
    max_num_seqs: int = 64
    enforce_eager: bool | None = None
    captures: bool = True
    full: bool = False
    has_tokenizer: bool = True
    topologies: Sequence[Topology] = ()
    placement: ModelPlacement | None = None
    copies: tuple[Topology, ModelPlacement] | None = None

    def some_cases(self, num_default: int | None = None) -> list[Case]:
        """All cases in full form, else the first ``num_default``, by default half."""
        return list(self.cases if self.full else self.cases[: num_default or -(-len(self.cases) // 2)])

    def short(self, cases: Sequence[Case]) -> list[Case]:
        """Cases with a short output, but in full form."""
        return [case if self.full else case.shortened(SHORT_OUTPUT_TOKENS) for case in cases]

    def end_blocks(self, case: Case) -> int:
        """KV blocks of a case at its end."""
        return -(-(len(case.prompt_ids) + case.num_output_tokens) // self.block_size)


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis.

    Attributes:
        verdict: What it proves.
        make_runs: Its batches.
        needs_preemption: It proves nothing where no request was preempted.
        absent: Why it makes no batches, where it may have none to make.
    """

    verdict: Verdict
    make_runs: Callable[[AxisSetup], list[Run]]
    needs_preemption: bool = False
    absent: str | None = None


def _again(setup: AxisSetup) -> list[Run]:
    return [Run(name="the same batch again", cases=setup.cases)]


def _shuffled(setup: AxisSetup) -> list[Run]:
    return [Run(name="shuffled", cases=setup.source.shuffle("all", setup.cases))]


def _alone(setup: AxisSetup) -> list[Run]:
    return [
        Run(name=f"alone on engine {i % setup.num_engines}", cases=[case], ranks=[i % setup.num_engines])
        for i, case in enumerate(setup.some_cases(NUM_ALONE))
    ]


def _arrival(setup: AxisSetup) -> list[Run]:
    cases = setup.source.shuffle("arrival", setup.some_cases())
    return [
        Run(
            name="random arrival on random engines",
            cases=cases,
            ranks=setup.source.integers("ranks", len(cases), setup.num_engines),
            arrival_steps=setup.source.integers("arrival", len(cases), NUM_ARRIVAL_STEPS),
        )
    ]


def _chunks(setup: AxisSetup) -> list[Run]:
    cases = setup.short(setup.some_cases())
    whole = sum(len(case.prompt_ids) for case in cases)
    sizes = FULL_CHUNK_TOKENS if setup.full else CHUNK_TOKENS
    return [
        Run(
            name=f"at most {size} tokens a step",
            cases=cases,
            max_num_seqs=min(len(cases), size),
            max_num_batched_tokens=size,
        )
        for size in (*sizes, max(whole, sizes[-1] + 1))
    ]


def _preempt(setup: AxisSetup) -> list[Run]:
    def start_blocks(case: Case) -> int:
        return -(-(len(case.prompt_ids) + 1) // setup.block_size)

    # Eight or more to a rank, admitted in the first step to a cache that they fill: the first one that grows by a block
    # preempts the latest. The shortest come latest: each gives back little, so that more are preempted.
    growing_first = sorted(setup.cases, key=lambda case: setup.end_blocks(case) == start_blocks(case))
    cases = growing_first if setup.full else growing_first[: max(NUM_ALONE, len(setup.cases) // 4)]
    cases.sort(key=lambda case: -len(case.prompt_ids))
    num_ranks = max(1, min(setup.num_engines, len(cases) // 8))
    ranks = [i % num_ranks for i in range(len(cases))]
    filled = min(sum(map(start_blocks, cases[rank::num_ranks])) for rank in range(num_ranks))
    kv_cache_blocks = max(filled, *map(setup.end_blocks, cases))
    return [
        Run(
            name=f"{kv_cache_blocks} KV blocks a rank",
            cases=cases,
            ranks=ranks,
            max_num_seqs=len(cases),
            max_num_batched_tokens=sum(len(case.prompt_ids) for case in cases) + len(cases),
            kv_cache_blocks=kv_cache_blocks,
        )
    ]


def _forced(setup: AxisSetup) -> list[Run]:
    cases = [case.forced(setup.reference[case.name].token_ids) for case in setup.some_cases(NUM_ALONE)]
    return [Run(name="reference tokens forced", cases=cases)]


def _scored(setup: AxisSetup) -> list[Run]:
    cases = [case.scored(setup.reference[case.name].token_ids) for case in setup.some_cases()]
    return [Run(name="output scored as prompt", cases=cases)]


def _single(setup: AxisSetup) -> list[Run]:
    variants = setup.short(setup.source.single_cases())
    most = min(len(setup.cases), BATCH_SIZES[-1])
    sizes = range(1, most + 1) if setup.full else sorted({min(size, most) for size in BATCH_SIZES} | {2})
    return [
        Run(name=f"batch of {size}", cases=[variants[i % len(variants)] for i in range(size)])
        for size in sizes
    ]


def _mixed(setup: AxisSetup) -> list[Run]:
    return _random_batches(setup, "mixed", setup.short(setup.source.mixed_cases()))


def _prefix(setup: AxisSetup) -> list[Run]:
    return _random_batches(setup, "prefix", setup.short(setup.source.prefix_cases()))


def _graph(setup: AxisSetup) -> list[Run]:
    if setup.enforce_eager is None or not setup.captures:
        return []
    name = "with graphs" if setup.enforce_eager else "without graphs"
    return [Run(name=name, cases=setup.cases, enforce_eager=not setup.enforce_eager)]


def _buckets(setup: AxisSetup) -> list[Run]:
    """Batches, then prompts cut into steps, of every size at which a tile or a graph of some schedule ends.

    Steps of one or two tokens are for the full form: a whole prompt of them takes long, and decoding has such rows.
    """
    most = setup.max_num_seqs + 1 if setup.full else setup.max_num_seqs
    sizes = [edge for edge in BUCKET_EDGES if edge <= most]
    cases = setup.source.bucket_cases(sizes[-1])
    cases = cases if setup.full else [case.shortened(BUCKET_OUTPUT_TOKENS) for case in cases]
    runs = [Run(name=f"{size} sequences", cases=cases[:size]) for size in sizes]
    longest = max(setup.cases, key=lambda case: len(case.prompt_ids)).shortened(1)
    runs += [
        Run(name=f"{edge} tokens a step", cases=[longest], max_num_seqs=1, max_num_batched_tokens=edge)
        for edge in BUCKET_EDGES
        if edge <= len(longest.prompt_ids) and (setup.full or edge >= FEWEST_STEP_TOKENS)
    ]
    return runs


def _topology(setup: AxisSetup) -> list[Run]:
    """A few cases on every other deployment, with and without graphs where there are graphs.

    They are shuffled: in their old places a control that goes by the place in the batch would have nothing to change.
    """
    cases = setup.source.shuffle("topology", setup.short(setup.some_cases(NUM_ELSEWHERE)))
    # Beside the weights of the deployment that the check started on: room for a few of the longest, no more.
    kv_cache_blocks = sum(sorted(map(setup.end_blocks, cases))[-NUM_ELSEWHERE:])
    forms: list[tuple[bool | None, str]] = [(None, "")]
    if setup.enforce_eager is not None:
        forms = [(False, " with graphs"), (True, " without graphs")]
    return [
        Run(
            name=f"{topology.name}{form}",
            cases=cases,
            kv_cache_blocks=kv_cache_blocks,
            enforce_eager=enforce_eager,
            topology=topology,
        )
        for topology in setup.topologies
        for enforce_eager, form in forms
        if topology.captures or enforce_eager is not False
    ]


def _placement(setup: AxisSetup) -> list[Run]:
    """A few cases while experts move to random places, here and where experts have copies."""
    cases = setup.source.shuffle("placement", setup.short(setup.some_cases(NUM_ELSEWHERE)))
    kv_cache_blocks = sum(sorted(map(setup.end_blocks, cases))[-NUM_ELSEWHERE:])

    def moves(what: str, like: ModelPlacement) -> dict[int, ModelPlacement | None]:
        return {step: random_placement(setup.source, f"{what} {step}", like) for step in MOVE_STEPS}

    runs = []
    if setup.placement is not None:
        runs.append(Run(name="experts moved amid", cases=cases, moves=moves("placement", setup.placement)))
    if setup.copies is not None:
        topology, placement = setup.copies
        runs.append(
            Run(
                name=f"{topology.name}, moved amid",
                cases=cases,
                kv_cache_blocks=kv_cache_blocks,
                topology=topology,
                moves=moves("copies", placement),
            )
        )
    return runs


def _structured_output(setup: AxisSetup) -> list[Run]:
    if not setup.has_tokenizer:
        return []
    cases = setup.source.structured_cases()
    alone = [
        Run(name=f"alone on engine {i % setup.num_engines}", cases=[case], ranks=[i % setup.num_engines])
        for i, case in enumerate(cases)
    ]
    others = [case for case in setup.some_cases(NUM_ALONE) if case.name in setup.reference]
    mixed = setup.source.shuffle("structured", [*cases, *setup.short(others)])
    (preempted,) = _preempt(replace(setup, cases=cases, full=True))
    return [
        *alone,
        Run(name="together", cases=cases),
        Run(
            name="among others, at random steps",
            cases=mixed,
            ranks=setup.source.integers("structured ranks", len(mixed), setup.num_engines),
            arrival_steps=setup.source.integers("structured steps", len(mixed), NUM_ARRIVAL_STEPS),
        ),
        Run(name="in chunks of 16 tokens", cases=cases, max_num_seqs=len(cases), max_num_batched_tokens=16),
        replace(preempted, name=f"preempted, {preempted.name}"),
    ]


def _random_batches(setup: AxisSetup, what: str, cases: list[Case]) -> list[Run]:
    """All cases in order, then random halves or more of them in random order."""
    num_batches = FULL_NUM_RANDOM_BATCHES if setup.full else NUM_RANDOM_BATCHES
    half = -(-len(cases) // 2)
    extras = setup.source.integers(f"sizes of {what}", num_batches, len(cases) - half + 1)
    runs = [Run(name="all in order", cases=cases)]
    for i, extra in enumerate(extras):
        batch = setup.source.shuffle(f"{what} {i}", cases)[: half + extra]
        runs.append(Run(name=f"random batch {i}, {len(batch)} requests", cases=batch))
    return runs


AXES: dict[str, Axis] = {
    "again": Axis(Verdict.RUN_TO_RUN, _again),
    "shuffled": Axis(Verdict.POSITION, _shuffled),
    "alone": Axis(Verdict.BATCH, _alone),
    "arrival": Axis(Verdict.BATCH, _arrival),
    "single": Axis(Verdict.BATCH, _single),
    "mixed": Axis(Verdict.BATCH, _mixed),
    "prefix": Axis(Verdict.BATCH, _prefix),
    "chunks": Axis(Verdict.SCHEDULE, _chunks),
    "structured_output": Axis(Verdict.BATCH, _structured_output, absent=TOKENIZER_ABSENT),
    "preempt": Axis(Verdict.SCHEDULE, _preempt, needs_preemption=True),
    "forced": Axis(Verdict.SCHEDULE, _forced),
    "scored": Axis(Verdict.SCHEDULE, _scored),
    "buckets": Axis(Verdict.SCHEDULE, _buckets),
    "graph": Axis(Verdict.SCHEDULE, _graph, absent=GRAPHS_ABSENT),
    # These two last: another deployment takes the place of the one that the check started on.
    "placement": Axis(Verdict.TOPOLOGY, _placement, absent=PLACEMENT_ABSENT),
    "topology": Axis(Verdict.TOPOLOGY, _topology, absent=TOPOLOGIES_ABSENT),
}
"""All axes by name, in the order in which they run."""
