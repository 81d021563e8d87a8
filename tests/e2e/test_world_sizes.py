"""A request's ids and logprobs are the same on 1, 2, 4 and 8 ranks, in any company, schedule and place."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from moe_runtime.comm.groups import RankGroup
from moe_runtime.engine.llm import LLM
from moe_runtime.engine.request import SamplingParams
from moe_runtime.errors import InvalidRequestError
from moe_runtime.kernels.schedules import TREE_CONTROLS, Control, control
from moe_runtime.verify.drafting import Drafting, drafting
from tests.checkpoints import WEIGHT_KINDS, tiny_config, write_checkpoint
from tests.mixed_requests import bits, mixed_params, random_prompts
from tests.placements import in_order
from tests.ranks import RankContext

MODELS = ("qwen3_moe", "mixtral")
DTYPES = ("float32", "bfloat16")
COMBINATIONS = [(model, kind, dtype) for model in MODELS for kind in WEIGHT_KINDS for dtype in DTYPES]
# In each half every model has every kind, and every kind both dtypes.
HALVES = [
    [combination for i, combination in enumerate(COMBINATIONS) if (i // 2 + i) % 2 == k] for k in (0, 1)
]
# Normal data, in which sums often agree by luck, in every schedule are slow; world sizes below have them all.
FOR_EVERY_SCHEDULE = [
    combination
    if combination in HALVES[1] and combination[1] != "normal"
    else pytest.param(*combination, marks=pytest.mark.slow)
    for combination in COMBINATIONS
]
PROMPT_LENGTHS = (61, 1, 130, 64, 17, 62, 125, 5, 63, 33)  # several cross a block while they decode
NUM_OUTPUT = 7
MAX_NUM_SEQS = 16


def prompts() -> list[list[int]]:
    return random_prompts(1, PROMPT_LENGTHS)


def params() -> list[SamplingParams]:
    return mixed_params(len(PROMPT_LENGTHS), NUM_OUTPUT)


Result = list[tuple[Any, ...]]


def batch(llm: LLM) -> Result:
    return [bits(o) for o in llm.generate(prompts(), params())]


def alone(llm: LLM) -> Result:
    return [bits(llm.generate([p], q)[0]) for p, q in zip(prompts(), params(), strict=True)]


def shuffled(llm: LLM) -> Result:
    order = list(range(len(PROMPT_LENGTHS)))
    random.Random(2).shuffle(order)
    outputs = llm.generate([prompts()[i] for i in order], [params()[i] for i in order])
    by_place = dict(zip(order, outputs, strict=True))
    return [bits(by_place[i]) for i in range(len(order))]


def arrivals(llm: LLM) -> Result:
    generator = random.Random(3)
    steps = [generator.randrange(12) for _ in PROMPT_LENGTHS]
    return [bits(o) for o in llm.generate(prompts(), params(), arrival_steps=steps)]


def other_rank(llm: LLM) -> Result:
    ranks = [(i + 1) % llm.group.size for i in range(len(PROMPT_LENGTHS))]
    return [bits(o) for o in llm.generate(prompts(), params(), ranks=ranks)]


def last_rank(llm: LLM) -> Result:
    ranks = [llm.group.size - 1] * len(PROMPT_LENGTHS)
    return [bits(o) for o in llm.generate(prompts(), params(), ranks=ranks)]


def limited(llm: LLM, num_seqs: int, num_tokens: int) -> Result:
    before = llm.config
    llm.reconfigure(max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens)
    try:
        return batch(llm)
    finally:
        llm.reconfigure(
            max_num_seqs=before.max_num_seqs, max_num_batched_tokens=before.max_num_batched_tokens
        )


def preempted(llm: LLM) -> Result:
    """A cache of three blocks, and all on one rank: the longest request fits, others must give way."""
    before = llm.engine.scheduler.blocks.num_blocks
    llm.reconfigure(kv_cache_blocks=3)
    try:
        result = last_rank(llm)
        if llm.group.rank == llm.group.size - 1:
            assert llm.engine.scheduler.num_preemptions > 0, "nothing was preempted"
        assert llm.engine.scheduler.blocks.num_free_blocks == 3
        return result
    finally:
        llm.reconfigure(kv_cache_blocks=before)


def drafted(llm: LLM) -> Result:
    """Drafts of which every third one is wrong."""
    answers = {str(i): row[2][0][0] for i, row in enumerate(batch(llm))}
    with drafting(llm, Drafting(kind="mixed", most_drafts=3, answers=answers), list(answers)):
        result = batch(llm)
        stats = llm.engine.stats().speculation
        assert stats is not None
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    return result


SCENARIOS = {
    "batch": batch,
    "alone": alone,
    "shuffled": shuffled,
    "arrivals": arrivals,
    "other rank": other_rank,
    "last rank": last_rank,
    "chunks of 16": partial(limited, num_seqs=MAX_NUM_SEQS, num_tokens=16),
    "chunks of 63": partial(limited, num_seqs=MAX_NUM_SEQS, num_tokens=63),
    "two at once": partial(limited, num_seqs=2, num_tokens=200),
    "preempted": preempted,
    "drafted": drafted,
}


@dataclass(frozen=True)
class Job:
    """A model to load and scenarios to run."""

    folder: str
    dtype: str
    scenarios: tuple[str, ...]
    order: tuple[int, ...] | None = None  # of the experts


def run_job(job: Job, group: RankGroup, switched_off: Control = Control.NONE) -> dict[str, Result]:
    with in_order(job.order):
        llm = LLM(job.folder, group=group, dtype=job.dtype, max_num_seqs=MAX_NUM_SEQS)
    with control(switched_off):  # after the self-check, which would refuse
        return {name: SCENARIOS[name](llm) for name in job.scenarios}


def run_jobs(context: RankContext, jobs: list[Job]) -> list[dict[str, Result]]:
    group = RankGroup(rank=context.rank, size=context.world_size, process_group=context.process_group)
    return [run_job(job, group) for job in jobs]


def run_job_with_a_control(context: RankContext, job: Job, which: Control) -> dict[str, Result]:
    group = RankGroup(rank=context.rank, size=context.world_size, process_group=context.process_group)
    return run_job(job, group, which)


class Models:
    """Checkpoints, written when first asked for, and their reference results: world 1, one batch."""

    def __init__(self, root) -> None:
        self.root = root
        self.references: dict[tuple[str, str], Result] = {}

    def folder(self, model: str, kind: str, **changes: Any) -> str:
        name = "-".join(map(str, (model, kind, *changes.values())))
        if not (self.root / name).exists():
            write_checkpoint(self.root / name, tiny_config(model, **changes), kind=kind)
        return str(self.root / name)

    def reference(self, folder: str, dtype: str) -> Result:
        key = folder, dtype
        if key not in self.references:
            self.references[key] = run_job(Job(folder, dtype, ("batch",)), RankGroup())["batch"]
        return self.references[key]

    def check(self, job: Job, results: dict[str, Result], where: str) -> None:
        reference = self.reference(job.folder, job.dtype)
        for scenario, result in results.items():
            for i, (actual, expected) in enumerate(zip(result, reference, strict=True)):
                assert actual == expected, f"{where}, {job.folder}, {job.dtype}, {scenario}: request {i}"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return Models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(("model", "kind", "dtype"), FOR_EVERY_SCHEDULE)
def test_one_process_gives_the_same_bits_in_every_schedule(models, model, kind, dtype):
    job = Job(models.folder(model, kind), dtype, tuple(SCENARIOS))
    models.check(job, run_job(job, RankGroup()), "world 1")


@pytest.mark.parametrize(
    ("world_size", "combinations"),
    [
        pytest.param(2, HALVES[0], id="2"),
        pytest.param(8, HALVES[1], id="8"),
        *(pytest.param(size, COMBINATIONS, marks=pytest.mark.slow, id=f"{size}-all") for size in (2, 4, 8)),
    ],
)
def test_every_world_size_gives_the_same_bits_for_every_model(ranks, models, world_size, combinations):
    jobs = [
        Job(models.folder(model, kind), dtype, ("batch", "other rank")) for model, kind, dtype in combinations
    ]
    for rank, results in enumerate(ranks(world_size, run_jobs, jobs)):
        for job, result in zip(jobs, results, strict=True):
            models.check(job, result, f"world {world_size}, rank {rank}")


def test_eight_ranks_give_the_same_bits_in_every_schedule(ranks, models):
    jobs = [
        Job(models.folder("qwen3_moe", "cancelling"), "bfloat16", tuple(SCENARIOS)),
        Job(models.folder("mixtral", "cancelling"), "float32", ("shuffled", "arrivals", "preempted")),
        Job(models.folder("qwen3_moe", "tied"), "bfloat16", ("shuffled", "preempted", "drafted")),
    ]
    for rank, results in enumerate(ranks(8, run_jobs, jobs)):
        for job, result in zip(jobs, results, strict=True):
            models.check(job, result, f"world 8, rank {rank}")


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_any_number_and_order_of_experts_gives_the_same_bits(ranks, models, world_size):
    five = models.folder("qwen3_moe", "cancelling", num_experts=5)
    two = models.folder("mixtral", "cancelling", num_local_experts=2, num_experts_per_tok=2)
    dense = models.folder("qwen3_moe", "normal", mlp_only_layers=[0])
    eight = models.folder("qwen3_moe", "heavy_tailed")
    jobs = [
        Job(five, "float32", ("batch", "last rank")),
        Job(five, "bfloat16", ("batch",), order=(4, 2, 0, 3, 1)),
        Job(two, "float32", ("batch",)),
        Job(dense, "bfloat16", ("batch",)),
        Job(eight, "float32", ("batch",), order=(7, 6, 5, 4, 3, 2, 1, 0)),
    ]
    for rank, results in enumerate(ranks(world_size, run_jobs, jobs)):
        for job, result in zip(jobs, results, strict=True):
            models.check(job, result, f"world {world_size}, rank {rank}")


def test_a_request_has_the_same_bits_at_every_place_in_batches_of_every_size(models):
    llm = LLM(models.folder("qwen3_moe", "cancelling"), max_num_seqs=40)
    target, own = prompts()[4], params()[4]
    expected = bits(llm.generate([target], own)[0])
    generator = random.Random(4)
    for size in (2, 7, 16, 33):
        company = [
            [generator.randrange(128) for _ in range(generator.randrange(1, 30))] for _ in range(size - 1)
        ]
        for place in (0, size // 2, size - 1):
            batch = [*company[:place], target, *company[place:]]
            assert bits(llm.generate(batch, own)[place]) == expected, f"place {place} of {size}"


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("qwen3_moe", "bfloat16"),
        ("mixtral", "float32"),
        # The same chunks through the other dtype.
        pytest.param("qwen3_moe", "float32", marks=pytest.mark.slow),
        pytest.param("mixtral", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_a_long_prompt_has_the_same_bits_under_every_token_budget(models, model, dtype):
    llm = LLM(models.folder(model, "heavy_tailed"), dtype=dtype, max_num_seqs=2)
    generator = random.Random(5)
    long, rival = ([generator.randrange(128) for _ in range(length)] for length in (400, 333))
    q = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=0, seed=0)
    expected = bits(llm.generate([long], q)[0])
    for budget in (64, 100, 128, 257, 4096):
        llm.reconfigure(max_num_batched_tokens=budget)
        assert bits(llm.generate([long], q)[0]) == expected, f"alone, budget {budget}"
        assert bits(llm.generate([rival, long], q)[1]) == expected, f"with a rival, budget {budget}"


def without_a_seed(context: RankContext, folder: str) -> list[Result]:
    """A refused call, then requests that bring no seed, then the same with the seeds they report."""
    group = RankGroup(rank=context.rank, size=context.world_size, process_group=context.process_group)
    llm = LLM(folder, group=group, max_num_seqs=4)
    wild = SamplingParams(temperature=1.5, max_tokens=6, logprobs=1)
    with pytest.raises(InvalidRequestError):
        llm.generate([[1, 2], [128]], wild)
    outputs = llm.generate([[1, 2]] * 5, wild)
    again = llm.generate([[1, 2]] * 5, [replace(wild, seed=o.outputs[0].seed) for o in outputs])
    return [[bits(o) for o in outputs], [bits(o) for o in again]]


def test_every_rank_reports_the_same_seeds_and_they_repeat_the_results(ranks, models):
    results = ranks(3, without_a_seed, models.folder("mixtral", "normal"))
    assert all(result == results[0] for result in results)
    first, again = results[0]
    assert first == again
    assert len({row[2][0][0] for row in first}) == 5


def single_request(context: RankContext, folder: str) -> list[Result]:
    """One request of one token, on each rank in turn; the other ranks have nothing to do."""
    group = RankGroup(rank=context.rank, size=context.world_size, process_group=context.process_group)
    llm = LLM(folder, group=group, max_num_seqs=1)
    runs = [llm.generate([prompts()[1]], params()[1], ranks=[rank]) for rank in range(group.size)]
    return [[bits(o) for o in run] for run in runs]


def test_a_single_request_with_idle_ranks_has_the_same_bits_on_each_rank(ranks, models):
    folder = models.folder("mixtral", "normal")
    expected = models.reference(folder, "float32")[1]
    for results in ranks(4, single_request, folder):
        assert results == [[expected]] * 4


def answers_of_every_rank(context: RankContext, folder: str) -> Result:
    group = RankGroup(rank=context.rank, size=context.world_size, process_group=context.process_group)
    llm = LLM(folder, group=group)
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=3, seed=0)
    results = llm.generate(random_prompts(7, [70]) * 16, params, ranks=[i % group.size for i in range(16)])
    (alone,) = llm.generate(random_prompts(7, [70]), params, ranks=[group.size - 1])
    return [bits(result) for result in (*results, alone)]


def test_every_rank_gives_the_same_answer(ranks, models):
    """BI-17, BI-23, BI-24: sixteen times the same, on one rank and over four, and beside idle ones"""
    folder = models.folder("qwen3_moe", "normal")
    found = [
        answer
        for size in (1, 4)
        for of_rank in ranks(size, answers_of_every_rank, folder)
        for answer in of_rank
    ]
    assert len(found) == 5 * 17
    assert all(answer == found[0] for answer in found)


def forced_and_echoed(llm: LLM, reference: Result) -> None:
    """Scoring a generation's own tokens, as forced output or as prompt, gives its logprobs."""
    for own, prompt, q in zip(reference, prompts(), params(), strict=True):
        token_ids, logprobs, routing, _, _ = own[2][0]
        forced = llm.generate([prompt], replace(q, forced_token_ids=token_ids))[0]
        assert forced.outputs[0].token_ids == token_ids
        assert forced.outputs[0].logprobs == logprobs
        assert forced.outputs[0].routing == routing
        assert forced.prompt_logprobs == own[1]
        echo = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=3, return_routed_experts=True)
        scored = llm.generate([[*prompt, *token_ids]], echo)[0]
        assert scored.prompt_logprobs[len(prompt) :] == logprobs
        assert scored.outputs[0].token_ids == ()
        assert scored.outputs[0].routing.shape[0] == len(prompt) + len(token_ids)
        assert scored.outputs[0].routing.first(routing.shape[0]) == routing


def score(context: RankContext, folder: str, dtype: str, reference: Result) -> None:
    group = RankGroup(rank=context.rank, size=context.world_size, process_group=context.process_group)
    forced_and_echoed(LLM(folder, group=group, dtype=dtype, max_num_seqs=2), reference)


@pytest.mark.parametrize(("model", "kind", "dtype"), COMBINATIONS)
def test_scoring_a_generation_gives_its_logprobs(models, model, kind, dtype):
    folder = models.folder(model, kind)
    forced_and_echoed(LLM(folder, dtype=dtype, max_num_seqs=2), models.reference(folder, dtype))


def test_scoring_on_two_ranks_gives_the_logprobs_of_one(ranks, models):
    folder = models.folder("qwen3_moe", "cancelling")
    ranks(2, score, folder, "float32", models.reference(folder, "float32"))


def test_weights_tell_the_models_apart(models):
    """The comparisons above compare something: other weights, dtypes and seeds have other bits."""
    results = [models.reference(models.folder(m, k), d) for m, k, d in COMBINATIONS]
    for i, result in enumerate(results):
        for other in results[:i]:
            assert all(a[1:] != b[1:] for a, b in zip(result, other, strict=True) if a[1] != (None,))
    distinct = {token for result in results for row in result for token in row[2][0][0]}
    assert len(distinct) > 40, "the models say almost nothing"


# In bf16 the rounding after each op hides most changes of an fp32 tree in so small a model, so all are tried in fp32.
CONTROLS = [(which, "float32") for which in TREE_CONTROLS]
CONTROLS += [(Control.SPLIT_K_GEMM, "bfloat16"), (Control.BATCH_NOISE, "bfloat16")]


@pytest.mark.parametrize(("which", "dtype"), CONTROLS)
def test_control_a_tree_switched_off_is_seen(models, which, dtype):
    folder = models.folder("qwen3_moe", "cancelling")
    llm = LLM(folder, dtype=dtype, max_num_seqs=MAX_NUM_SEQS)
    with control(which):
        together, apart = batch(llm), alone(llm)
    assert together != apart
    assert batch(llm) == models.reference(folder, dtype), "and back"


def test_control_the_token_after_drafts_from_another_row_is_seen(models):
    folder = models.folder("qwen3_moe", "cancelling")
    llm = LLM(folder, max_num_seqs=MAX_NUM_SEQS)
    with control(Control.DRAFT_BONUS):
        assert drafted(llm) != models.reference(folder, "float32")


@pytest.mark.parametrize("which", [Control.SPLIT_K_GEMM, Control.ARRIVAL_COMBINE, Control.BATCH_NOISE])
def test_control_eight_ranks_with_a_tree_switched_off_differ_from_one(ranks, models, which):
    job = Job(models.folder("mixtral", "cancelling"), "float32", ("batch",))
    one = run_job(job, RankGroup(), which)["batch"]
    eight = ranks(8, run_job_with_a_control, job, which)
    assert all(results["batch"] == eight[0]["batch"] for results in eight)
    assert eight[0]["batch"] != one
