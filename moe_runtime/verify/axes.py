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
from moe_runtime.kernels.replicas import CopyChoice
from moe_runtime.verify.compare import Output
from moe_runtime.verify.drafting import Drafting
from moe_runtime.verify.placements import random_placement
from moe_runtime.verify.prompts import Case, PromptSource
from moe_runtime.verify.runner import Run
from moe_runtime.verify.schedule_axes import OVERLAP_ABSENT, overlap_runs, preemption_runs
from moe_runtime.verify.topologies import Topology

__all__ = [
    "AXES",
    "BUCKET_EDGES",
    "CACHE_ABSENT",
    "GRAPHS_ABSENT",
    "NUM_ALONE",
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
BUCKET_EDGES = (
    *(1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129),
    *(192, 193, 255, 256, 257, 384, 385, 512, 513),
)
FEWEST_STEP_TOKENS = 15
BUCKET_OUTPUT_TOKENS = 3
SHORT_OUTPUT_TOKENS = 8
CACHE_ABSENT = "not applicable: the engine has no prefix cache, or no room for a prompt with a full block"
GRAPHS_ABSENT = "not applicable: this device or transport has no graphs"
TOKENIZER_ABSENT = "not applicable: a grammar is over text, and the checkpoint has no tokenizer"
TOPOLOGIES_ABSENT = "not applicable: level batch promises one deployment, which has no other transport here"
PLACEMENT_ABSENT = (
    "not applicable: experts stay where they are on this deployment, and the level promises no other"
)
MOVE_STEPS = (1, 4)
NUM_SCORED = 2
NUM_NGRAM_DRAFTS = (1, 3, 8)
MOST_NGRAM_DRAFTS = 8
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
        prefix_cache: Whether the engines have a prefix cache.
        captures: Whether the deployment of the check can have graphs.
        num_alone: Cases that run by themselves, where not all do.
        overlap: Whether the engine started with overlap; None where it cannot overlap.
        has_draft_model: The engine started with one.
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
    num_alone: int = NUM_ALONE
    overlap: bool | None = False
    prefix_cache: bool = True
    has_draft_model: bool = False
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
        needs_hits: It proves nothing where no token was found in a prefix cache.
        needs_drafts: The same where no draft was right, or none was wrong.
        absent: Why it makes no batches, where it may have none to make.
    """

    verdict: Verdict
    make_runs: Callable[[AxisSetup], list[Run]]
    needs_preemption: bool = False
    needs_hits: bool = False
    needs_drafts: bool = False
    absent: str | None = None


def _again(setup: AxisSetup) -> list[Run]:
    return [Run(name="the same batch again", cases=setup.cases)]


def _shuffled(setup: AxisSetup) -> list[Run]:
    return [Run(name="shuffled", cases=setup.source.shuffle("all", setup.cases))]


def _alone(setup: AxisSetup) -> list[Run]:
    return [
        Run(name=f"alone on engine {i % setup.num_engines}", cases=[case], ranks=[i % setup.num_engines])
        for i, case in enumerate(setup.some_cases(setup.num_alone))
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


def _radix_cache(setup: AxisSetup) -> list[Run]:
    """Prompts with common beginnings: computed whole, then shared in one batch, found by a later one, by some that
    arrive now and then on any engine, by two tenants and some that opt out, in chunks, and while blocks are evicted
    and requests preempted for want of room.
    """
    source, cases = setup.source, setup.short(setup.source.cached_cases(setup.block_size))
    if not setup.prefix_cache or max(len(case.prompt_ids) for case in cases) <= setup.block_size:
        return []
    some = cases if setup.full else cases[::2]
    runs = [
        Run(name="computed", cases=cases),
        Run(name="cold", cases=cases, prefix_cache="cold"),
        Run(name="warm", cases=source.shuffle("warm", cases), prefix_cache="warm"),
        Run(
            name="flushed, random arrival",
            cases=cases,
            ranks=source.integers("cached ranks", len(cases), setup.num_engines),
            arrival_steps=source.integers("cached arrival", len(cases), NUM_ARRIVAL_STEPS),
            prefix_cache="cold",
        ),
        Run(
            name="two tenants",
            cases=source.shuffle(
                "tenants",
                [
                    *(case.salted("a") for case in cases),
                    *(case.salted("b") for case in some),
                    *(case.uncached() for case in some[::2]),
                    *some[1::2],
                ],
            ),
            prefix_cache="warm",
        ),
        Run(
            name=f"chunks of {setup.block_size + 1} tokens",
            cases=cases,
            max_num_seqs=min(len(cases), setup.block_size),
            max_num_batched_tokens=setup.block_size + 1,
            prefix_cache="cold",
        ),
    ]
    # Room for the longest and little more: every other one evicts what it does not share.
    tight = max(map(setup.end_blocks, cases)) + 1
    crowd = [*cases, *(case.salted("a") for case in some[::2])]
    for i in range(2):
        runs.append(
            Run(
                name=f"{tight} KV blocks a rank, {'cold' if i == 0 else 'then warm'}",
                cases=source.shuffle(f"crowd {i}", crowd),
                max_num_seqs=len(crowd),
                max_num_batched_tokens=4 * setup.block_size + len(crowd),
                kv_cache_blocks=tight,
                prefix_cache="cold" if i == 0 else "warm",
            )
        )
    return runs + [replace(run, name=f"{run.name}, cached", prefix_cache="cold") for run in _preempt(setup)]


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


def _speculation(setup: AxisSetup) -> list[Run]:
    """Drafts of every kind and number, beside prompts that are scored; at last with steps and a cache that are short of
    room for them. Prompts that repeat themselves are for n-grams, and are first run without drafts."""
    some = setup.source.shuffle("speculation", setup.some_cases(NUM_ALONE))
    scored = [case.scored(setup.reference[case.name].token_ids) for case in some[:NUM_SCORED]]
    repeated = setup.source.repetitive_cases()
    answers = {case.name: setup.reference[case.name].token_ids for case in some}
    lengths = range(1, MOST_NGRAM_DRAFTS + 1) if setup.full else NUM_NGRAM_DRAFTS
    kinds = [Drafting(kind="off"), *(Drafting(kind="ngram", most_drafts=length) for length in lengths)]
    if setup.has_draft_model:
        kinds.append(Drafting(kind="draft"))
    company = some if setup.full else some[:NUM_SCORED]
    runs = [Run(name=kind.name, cases=[*repeated, *company], drafting=kind) for kind in kinds]
    mixed = Drafting(kind="mixed", most_drafts=4, answers=answers)
    knowing = [
        Drafting(kind="right", most_drafts=8, answers=answers),
        Drafting(kind="wrong", most_drafts=3, answers=answers),
        mixed,
    ]
    runs += [Run(name=kind.name, cases=[*some, *scored], drafting=kind) for kind in knowing]
    runs.append(
        Run(
            name=f"{mixed.name}, short of room",
            cases=some,
            max_num_seqs=4,
            max_num_batched_tokens=setup.block_size + 1,
            kv_cache_blocks=max(map(setup.end_blocks, some)) + 1,
            drafting=mixed,
        )
    )
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
    """A few cases while experts move to random places, here and where experts have copies, chosen in bad ways too."""
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
        for choice in CopyChoice:
            if choice is not CopyChoice.SPREAD:
                named = choice.name.lower().replace("_", " ")
                runs.append(
                    Run(
                        name=f"copies by {named}",
                        cases=cases,
                        kv_cache_blocks=kv_cache_blocks,
                        enforce_eager=None if setup.enforce_eager is None else True,
                        topology=topology,
                        copies=choice,
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
    "preemption": Axis(Verdict.SCHEDULE, preemption_runs, needs_preemption=True),
    "overlap": Axis(Verdict.SCHEDULE, overlap_runs, absent=OVERLAP_ABSENT),
    "radix_cache": Axis(Verdict.SCHEDULE, _radix_cache, needs_hits=True, absent=CACHE_ABSENT),
    "forced": Axis(Verdict.SCHEDULE, _forced),
    "scored": Axis(Verdict.SCHEDULE, _scored),
    "buckets": Axis(Verdict.SCHEDULE, _buckets),
    "graph": Axis(Verdict.SCHEDULE, _graph, absent=GRAPHS_ABSENT),
    "speculation": Axis(Verdict.SCHEDULE, _speculation, needs_drafts=True),
    # These two last: another deployment takes the place of the one that the check started on.
    "placement": Axis(Verdict.TOPOLOGY, _placement, absent=PLACEMENT_ABSENT),
    "topology": Axis(Verdict.TOPOLOGY, _topology, absent=TOPOLOGIES_ABSENT),
}
"""All axes by name, in the order in which they run."""
