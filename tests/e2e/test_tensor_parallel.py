"""A request's ids and logprobs are the same whatever the number of ranks and of those that share its attention."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.tensor_parallel import TensorParallel
from moe_runtime.engine.engine import Engine
from moe_runtime.engine.llm import LLM
from moe_runtime.engine.request import SamplingParams
from moe_runtime.layers import row_parallel
from tests.checkpoints import WEIGHT_KINDS, tiny_config, write_checkpoint
from tests.mixed_requests import bits, mixed_params, random_prompts
from tests.ranks import RankContext

PROMPT_LENGTHS = (61, 1, 130, 5, 33, 300, 64)
NUM_OUTPUT = 5
MAX_NUM_SEQS = 8

Result = list[tuple[Any, ...]]


def prompts() -> list[list[int]]:
    return random_prompts(11, PROMPT_LENGTHS)


def params() -> list[SamplingParams]:
    return mixed_params(len(PROMPT_LENGTHS), NUM_OUTPUT)


def batch(llm: LLM) -> Result:
    """Requests take turns over the groups."""
    return [bits(o) for o in llm.generate(prompts(), params())]


def last_group(llm: LLM) -> Result:
    """All on one group; the ranks of the others have no token and join every exchange."""
    return [bits(o) for o in llm.generate(prompts(), params(), ranks=[llm.num_engines - 1] * len(prompts()))]


def alone(llm: LLM) -> Result:
    """One token in most steps: all but one rank of the group are home to none."""
    return [bits(llm.generate([p], q)[0]) for p, q in zip(prompts(), params(), strict=True)]


def arrivals(llm: LLM) -> Result:
    steps = [random.Random(3).randrange(9) for _ in PROMPT_LENGTHS]
    return [bits(o) for o in llm.generate(prompts(), params(), arrival_steps=steps)]


def chunks(llm: LLM) -> Result:
    before = llm.config.max_num_batched_tokens
    llm.reconfigure(max_num_batched_tokens=23)
    try:
        return batch(llm)
    finally:
        llm.reconfigure(max_num_batched_tokens=before)


def preempted(llm: LLM) -> Result:
    before = llm.deployment.num_kv_blocks
    llm.reconfigure(kv_cache_blocks=5)
    try:
        result = last_group(llm)
        if isinstance(llm.engine, Engine) and llm.group.rank == llm.group.size - llm.config.tp:
            assert llm.engine.scheduler.num_preemptions > 0, "nothing was preempted"
        return result
    finally:
        llm.reconfigure(kv_cache_blocks=before)


SCENARIOS = {f.__name__: f for f in (batch, last_group, alone, arrivals, chunks, preempted)}


@dataclass(frozen=True)
class Job:
    """A model to load over groups of ``tp`` ranks, and scenarios to run."""

    folder: str
    dtype: str
    tp: int
    scenarios: tuple[str, ...] = ("batch",)
    dispatcher: str = "auto"
    invariance: str = "topology"


def run_job(job: Job, group: RankGroup) -> dict[str, Result]:
    llm = LLM(
        job.folder,
        group=group,
        dtype=job.dtype,
        tp=job.tp,
        dispatcher=job.dispatcher,
        invariance=job.invariance,
        max_num_seqs=MAX_NUM_SEQS,
    )
    return {name: SCENARIOS[name](llm) for name in job.scenarios}


def run_jobs(context: RankContext, jobs: list[Job]) -> list[dict[str, Result]]:
    return [run_job(job, context.group) for job in jobs]


class Models:
    """Checkpoints, written when first asked for, and what one process gives for them."""

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
            self.references[key] = run_job(Job(folder, dtype, 1), RankGroup())["batch"]
        return self.references[key]

    def check(self, jobs: list[Job], by_rank: list[list[dict[str, Result]]]) -> None:
        for rank, results in enumerate(by_rank):
            for job, result in zip(jobs, results, strict=True):
                reference = self.reference(job.folder, job.dtype)
                for scenario, found in result.items():
                    for i, (actual, expected) in enumerate(zip(found, reference, strict=True)):
                        assert actual == expected, f"rank {rank}, {job}, {scenario}: request {i}"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return Models(tmp_path_factory.mktemp("models"))


ON_TRANSPORTS = [
    (model, kind, dtype, dispatcher)
    for model in ("qwen3_moe", "mixtral")
    for kind in WEIGHT_KINDS
    for dtype, dispatcher in (("float32", "collective"), ("bfloat16", "symmetric"))
]
# Every model with every kind; each model and each kind by both transports.
HALF_ON_TRANSPORTS = [case for i, case in enumerate(ON_TRANSPORTS) if (i // 2 + i) % 2]


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        pytest.param(8, HALF_ON_TRANSPORTS, id="8"),
        *(pytest.param(size, ON_TRANSPORTS, marks=pytest.mark.slow, id=f"{size}-all") for size in (2, 4, 8)),
    ],
)
def test_groups_of_two_give_the_bits_of_one_process_for_every_model_and_transport(
    ranks, models, world_size, cases
):
    jobs = [
        Job(models.folder(model, kind), dtype, 2, dispatcher=dispatcher)
        for model, kind, dtype, dispatcher in cases
    ]
    models.check(jobs, ranks(world_size, run_jobs, jobs))


def test_idle_groups_single_tokens_chunks_and_preemption_change_nothing(ranks, models):
    jobs = [
        Job(models.folder("qwen3_moe", "cancelling"), "float32", 2, tuple(SCENARIOS)),
        Job(models.folder("mixtral", "heavy_tailed"), "bfloat16", 2, ("last_group", "alone")),
    ]
    models.check(jobs, ranks(4, run_jobs, jobs))


def uneven(models: Models, kind: str) -> str:
    """A dense layer whose features, and a vocabulary whose ids, no group shares evenly; eight heads read two."""
    return models.folder(
        "qwen3_moe",
        kind,
        num_attention_heads=8,
        attention_bias=True,
        mlp_only_layers=[0],
        intermediate_size=91,
        vocab_size=131,
        tie_word_embeddings=kind == "cancelling",
    )


# One group of four, slow, is a half of (8, 4).
@pytest.mark.parametrize(
    ("world_size", "tp"), [(1, 1), (2, 2), pytest.param(4, 4, marks=pytest.mark.slow), (8, 4), (8, 8)]
)
def test_groups_of_any_size_give_the_bits_of_one_process(ranks, models, world_size, tp):
    jobs = [
        Job(uneven(models, kind), dtype, tp, scenarios, dispatcher)
        for kind, dtype, scenarios, dispatcher in (
            ("normal", "float32", ("batch",), "collective"),
            ("heavy_tailed", "bfloat16", ("batch",), "symmetric"),
            ("cancelling", "float32", ("batch", "last_group", "chunks"), "symmetric"),
        )
    ]
    models.check(jobs, ranks(world_size, run_jobs, jobs))


def without_routing(tensors: dict[str, torch.Tensor]) -> None:
    """All router logits are zero, so every token takes the lowest experts: those of the first rank."""
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate.weight"):
            tensor.zero_()


@pytest.mark.parametrize(("world_size", "tp"), [(2, 2), (8, 2), (8, 4)])
def test_all_tokens_routed_to_one_rank_change_nothing(ranks, models, world_size, tp):
    folder = models.root / "one-rank"
    if not folder.exists():
        config = tiny_config("qwen3_moe", num_experts=16, num_experts_per_tok=2)
        write_checkpoint(folder, config, kind="cancelling", edit=without_routing)
    jobs = [Job(str(folder), dtype, tp, ("batch", "last_group")) for dtype in ("float32", "bfloat16")]
    models.check(jobs, ranks(world_size, run_jobs, jobs))


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind == "cancelling" else pytest.mark.slow) for kind in WEIGHT_KINDS],
)
def test_level_batch_is_batch_invariant_and_depends_on_the_group(ranks, models, kind):
    """Ranks' shards are the parts: company and schedule change nothing, but the size of the group does."""
    folder = uneven(models, kind)
    scenarios = ("batch", "last_group", "alone", "arrivals", "chunks")
    jobs = [Job(folder, "float32", tp, scenarios, invariance="batch") for tp in (1, 2, 4)]
    by_rank = ranks(4, run_jobs, jobs)
    by_tp = [results["batch"] for results in by_rank[0]]
    for rank_results in by_rank:
        for results, expected in zip(rank_results, by_tp, strict=True):
            assert all(result == expected for result in results.values())
    one, two, four = by_tp
    assert two == one, "at two ranks the shards are the parts of level topology"
    assert all(a[1:] != b[1:] for a, b in zip(four, two, strict=True) if a[1] != (None,))


def without_parts(context: RankContext, job: Job) -> Result:
    """The control: a row-parallel layer's K is one chain, as if its parts were not fixed."""
    usual = row_parallel.PARTS
    row_parallel.PARTS = usual | {"row": 1}
    try:
        return run_job(job, context.group)["batch"]
    finally:
        row_parallel.PARTS = usual


@pytest.mark.parametrize("tp", [2, 4])
def test_control_another_number_of_parts_is_seen(ranks, models, tp):
    folder = uneven(models, "cancelling")
    results = ranks(tp, without_parts, Job(folder, "float32", tp))
    assert all(result == results[0] for result in results)
    assert all(a != b for a, b in zip(results[0], models.reference(folder, "float32"), strict=True))


def with_homes_swapped(context: RankContext, job: Job) -> Result:
    """The control: rows come back from their homes in another order."""
    usual = TensorParallel.gather_home_rows

    def swapped(self: TensorParallel, rows: torch.Tensor, num_tokens: int) -> torch.Tensor:
        return usual(self, rows, num_tokens).flip(0)

    TensorParallel.gather_home_rows = swapped
    try:
        return run_job(job, context.group)["batch"]
    finally:
        TensorParallel.gather_home_rows = usual


def test_control_rows_from_other_homes_are_seen(ranks, models):
    folder = models.folder("mixtral", "normal")
    (result, _) = ranks(2, with_homes_swapped, Job(folder, "bfloat16", 2))
    assert result != models.reference(folder, "bfloat16")
