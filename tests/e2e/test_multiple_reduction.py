"""Level batch on several ranks: batch-invariant for one deployment, other bits on another; level topology: never."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from moe_runtime.comm.groups import RankGroup
from moe_runtime.engine.llm import LLM
from moe_runtime.kernels.schedules import Control, control
from tests.checkpoints import tiny_config, write_checkpoint
from tests.e2e.test_world_sizes import MAX_NUM_SEQS, SCENARIOS, Result
from tests.placements import in_order
from tests.ranks import RankContext

KINDS = ("cancelling", "heavy_tailed")
DTYPES = ("float32", "bfloat16")
DATA = list(zip(KINDS, DTYPES, strict=True))
NUM_RANKS = 4


@dataclass(frozen=True)
class Job:
    """A model to load and scenarios to run."""

    folder: str
    dtype: str
    level: str = "batch"
    dispatcher: str = "auto"
    scenarios: tuple[str, ...] = ("batch",)
    num_virtual_ranks: int = NUM_RANKS
    order: tuple[int, ...] | None = None  # of the experts


def run_job(
    job: Job, group: RankGroup, switched_off: Control = Control.NONE
) -> tuple[str, dict[str, Result]]:
    """The fingerprint, and the results of each scenario."""
    with in_order(job.order):
        llm = LLM(
            job.folder,
            group=group,
            dtype=job.dtype,
            max_num_seqs=MAX_NUM_SEQS,
            invariance=job.level,
            dispatcher=job.dispatcher,
            loopback_ranks=job.num_virtual_ranks,
        )
    with control(switched_off):
        return llm.model.plan.fingerprint, {name: SCENARIOS[name](llm) for name in job.scenarios}


def on_a_rank(
    context: RankContext, jobs: list[Job], switched_off: Control = Control.NONE
) -> list[tuple[str, dict[str, Result]]]:
    return [run_job(job, context.group, switched_off) for job in jobs]


def loopback(folder: str, dtype: str, num_ranks: int, level: str = "batch", **options: Any) -> Job:
    return Job(folder, dtype, level, "loopback", num_virtual_ranks=num_ranks, **options)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {kind: str(write_checkpoint(root / kind, tiny_config("qwen3_moe"), kind=kind)) for kind in KINDS}


@pytest.fixture(scope="module")
def four_virtual_ranks(folders: dict[str, str]) -> dict[tuple[str, str], tuple[str, dict[str, Result]]]:
    """In every schedule, per kind and dtype."""
    return {
        (kind, dtype): run_job(
            loopback(folders[kind], dtype, NUM_RANKS, scenarios=tuple(SCENARIOS)), RankGroup()
        )
        for kind, dtype in DATA
    }


@pytest.mark.parametrize(("kind", "dtype"), DATA)
def test_four_virtual_ranks_give_the_same_bits_in_every_schedule(four_virtual_ranks, kind, dtype):
    _, results = four_virtual_ranks[kind, dtype]
    for scenario, result in results.items():
        assert result == results["batch"], scenario


def test_four_ranks_give_the_bits_of_virtual_ones_by_every_transport_in_every_schedule(
    ranks, folders, four_virtual_ranks
):
    jobs = [Job(folders[kind], dtype, dispatcher="collective") for kind, dtype in DATA]
    jobs += [
        Job(folders[kind], dtype, dispatcher="symmetric", scenarios=("batch", "alone", "chunks of 63"))
        for kind, dtype in DATA
    ]
    jobs.append(Job(folders["cancelling"], "float32", scenarios=tuple(SCENARIOS)))
    for rank, found in enumerate(ranks(NUM_RANKS, on_a_rank, jobs)):
        for job, (fingerprint, results) in zip(jobs, found, strict=True):
            kind = "cancelling" if job.folder == folders["cancelling"] else "heavy_tailed"
            own_fingerprint, expected = four_virtual_ranks[kind, job.dtype]
            assert fingerprint == own_fingerprint
            for scenario, result in results.items():
                assert result == expected["batch"], f"rank {rank}, {job}, {scenario}"


@pytest.mark.parametrize(("kind", "dtype"), DATA)
def test_ep_sizes_differ_at_level_batch_and_never_at_level_topology(
    ranks, folders, four_virtual_ranks, kind, dtype
):
    jobs = [Job(folders[kind], dtype, level) for level in ("batch", "topology")]
    (two_fingerprint, two), (topology_fingerprint, two_topology) = ranks(2, on_a_rank, jobs)[0]
    four_fingerprint, four = four_virtual_ranks[kind, dtype]
    assert two["batch"] != four["batch"]
    assert two_fingerprint != four_fingerprint
    # The control: the same data at level topology.
    at_four = run_job(loopback(folders[kind], dtype, NUM_RANKS, "topology"), RankGroup())
    assert at_four == (topology_fingerprint, two_topology)
    assert two_topology["batch"] not in (two["batch"], four["batch"])
    # One rank has one group of slots, which is the sum of level topology.
    for one in (Job(folders[kind], dtype), loopback(folders[kind], dtype, 1)):
        assert run_job(one, RankGroup()) == at_four


def test_only_which_experts_share_a_rank_counts(folders, four_virtual_ranks):
    def run(*order: int) -> tuple[str, Result]:
        job = loopback(folders["cancelling"], "float32", NUM_RANKS, order=order)
        fingerprint, results = run_job(job, RankGroup())
        return fingerprint, results["batch"]

    fingerprint, results = four_virtual_ranks["cancelling", "float32"]
    assert run(1, 0, 3, 2, 5, 4, 7, 6) == (fingerprint, results["batch"])
    other_fingerprint, other = run(0, 4, 1, 5, 2, 6, 3, 7)
    assert other_fingerprint != fingerprint
    assert other != results["batch"]


def test_control_sums_in_order_of_arrival_are_seen(ranks, folders):
    scenarios = ("batch", "alone")
    virtual = loopback(folders["cancelling"], "float32", NUM_RANKS, scenarios=scenarios)
    _, results = run_job(virtual, RankGroup(), Control.ARRIVAL_COMBINE)
    assert results["batch"] != results["alone"]
    job = Job(folders["cancelling"], "float32", scenarios=scenarios)
    for [(_, results)] in ranks(NUM_RANKS, on_a_rank, [job], Control.ARRIVAL_COMBINE):
        assert results["batch"] != results["alone"]
