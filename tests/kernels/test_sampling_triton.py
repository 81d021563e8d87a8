"""Greedy choice and sampling, on a GPU or in the interpreter: the CPU's tokens, a row at a time."""

from __future__ import annotations

import pytest
import torch

from tests.bits import HOSTILE_KINDS, hostile
from tests.kernels.triton_interpreter import DEVICE

from moe_runtime.kernels import sampling  # isort: skip
from moe_runtime.kernels.cutoff_triton import CutoffSchedule  # isort: skip
from moe_runtime.kernels.ranks_triton import KEY_SCHEDULES, KeySchedule  # isort: skip
from moe_runtime.kernels.sampling import RowSampling  # isort: skip
from moe_runtime.kernels.sampling_triton import (  # isort: skip
    MAX_SMALL_TOP_K,
    SAMPLE_SCHEDULES,
    SampleSchedule,
    SamplingRows,
    greedy,
    greedy_reference,
    sample,
    sample_reference,
)

REAL_VOCAB = 151_936
MAX_DISAGREEMENT = 0.005  # share of sampled tokens at a real size that may differ from the CPU's fp64
gpu_only = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")

FILTERS = [
    {},
    {"temperature": 0.0},
    {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
    {"min_p": 0.1},
    {"top_p": 0.8},
    {"top_k": 5, "min_p": 0.2, "temperature": 1.5},
    {"top_k": 60, "top_p": 0.5, "temperature": 3.0},
    {"top_k": MAX_SMALL_TOP_K, "temperature": 100.0},
]


def settings_of(num_rows, filters=FILTERS, position=11):
    """Row i has filter i modulo their number, a seed of its own and its own position."""
    return [
        RowSampling(**filters[i % len(filters)], seed=1 + 2**40 * i, position=position + 2**33 * i)
        for i in range(num_rows)
    ]


def greedy_of(logits, **options):
    out = torch.full((logits.shape[0],), -7, dtype=torch.int32, device=DEVICE)
    greedy(logits.to(DEVICE), out, **options)
    return out.tolist()


def sample_of(logits, rows, dtype=torch.int64, **options):
    settings = rows if isinstance(rows, SamplingRows) else SamplingRows.of(rows, DEVICE)
    out = torch.full((logits.shape[0],), -7, dtype=dtype, device=DEVICE)
    sample(logits.to(DEVICE), settings, out, **options)
    return out.tolist()


@pytest.mark.parametrize("vocab", [1, 2, 128, 300, 5000])
@pytest.mark.parametrize("kind", HOSTILE_KINDS)
def test_greedy_gives_the_lowest_id_of_the_highest_logit(vocab, kind):
    logits = hostile(kind, (3, vocab), seed=1).round()
    expected = sampling.sample(logits, [RowSampling(temperature=0.0)] * 3)
    assert greedy_of(logits) == greedy_reference(logits).tolist() == expected
    assert greedy_of(logits, schedule=KeySchedule(block_columns=256)) == expected


def test_greedy_ties_across_chunk_and_block_edges():
    for first in (126, 127, 128, 4095, 4096):
        logits = torch.zeros(1, 8200)
        logits[0, first:] = 2.0
        assert greedy_of(logits) == [first]


def test_rows_without_a_finite_logit_and_rows_with_nan():
    logits = torch.tensor(
        [
            [-torch.inf] * 4,
            [torch.nan] * 4,
            [torch.nan, -5.0, -3.0, torch.nan],
            [1.0, torch.inf, torch.inf, torch.nan],
        ]
    )
    assert greedy_of(logits) == [0, 0, 2, 1]
    for options in ({}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.5}):
        rows = [RowSampling(seed=i, **options) for i in range(4)]
        assert sample_of(logits, rows) == sampling.sample(logits, rows)


@pytest.mark.parametrize("kind", ["normal", "ties", "spread", "masked"])
def test_tokens_are_the_cpu_s_and_the_reference_s(kind):
    base = hostile("normal", (8, 256), seed=2)
    logits = {
        "normal": base * 3,
        "ties": (base * 2).round(),
        "spread": base * 1e30,
        "masked": base.masked_fill(torch.arange(256) % 7 > 0, -torch.inf),
    }[kind]
    rows = settings_of(8)
    found = sample_of(logits, rows)
    assert found == sampling.sample(logits, rows)
    assert found == sample_reference(logits, SamplingRows.of(rows, "cpu")).tolist()


def test_unfiltered_and_small_top_k_rows_of_a_longer_vocabulary_are_the_cpu_s():
    logits = hostile("normal", (4, 2500), seed=3) * 2
    rows = settings_of(4, [{}, {"top_k": 20, "top_p": 0.9}, {"temperature": 10.0}, {"min_p": 0.01}])
    expected = sampling.sample(logits, rows)
    assert sample_of(logits, rows) == expected
    assert sample_of(logits, rows, dtype=torch.int32, schedule=SampleSchedule(noise_columns=512)) == expected


def test_a_row_depends_on_itself_alone():
    logits = hostile("normal", (5, 200), seed=4) * 2
    rows = settings_of(5, [{}, FILTERS[1], FILTERS[2], {"top_p": 0.8}, {"min_p": 0.1}])
    whole = sample_of(logits, rows)
    assert sample_of(logits.flip(0), rows[::-1]) == whole[::-1]
    for i in (0, 2, 3):
        assert sample_of(logits[i : i + 1], rows[i : i + 1]) == [whole[i]]
    logits[0], logits[4] = torch.nan, torch.inf
    assert sample_of(logits, rows)[1:4] == whole[1:4]


def test_searches_that_nothing_needs_change_nothing():
    logits = hostile("normal", (4, 300), seed=5)
    rows = SamplingRows.of(settings_of(4, FILTERS[:4]), DEVICE)
    assert not rows.search_top_k
    assert not rows.search_top_p
    searching = SamplingRows(
        temperature=rows.temperature,
        top_k=rows.top_k,
        top_p=rows.top_p,
        min_p=rows.min_p,
        seeds=rows.seeds,
        positions=rows.positions,
    )
    assert sample_of(logits, searching) == sample_of(logits, rows)


def test_small_and_searched_top_k_keep_the_same_ranks():
    """Past the small limit the search decides; at the limit, one program. Equal logits: every id is as likely."""
    logits = torch.zeros(3, 200)
    for top_k in (MAX_SMALL_TOP_K, MAX_SMALL_TOP_K + 1):
        rows = [RowSampling(top_k=top_k, seed=seed) for seed in range(3)]
        found = sample_of(logits, rows)
        assert found == sampling.sample(logits, rows)
        assert max(found) < top_k


def test_schedules_agree():
    logits = hostile("normal", (3, 300), seed=6)
    rows = settings_of(3, [{"top_p": 0.7}, {"top_k": 50}, {}])
    expected = sample_of(logits, rows)
    schedule = SampleSchedule(
        keys=KeySchedule(block_columns=128), cutoff=CutoffSchedule(num_ways=16), noise_columns=128
    )
    assert sample_of(logits, rows, schedule=schedule) == expected


def test_control_another_seed_or_position_gives_other_tokens():
    logits = hostile("normal", (8, 300), seed=7)
    rows = settings_of(8, [{}])
    found = sample_of(logits, rows)
    assert sample_of(logits, settings_of(8, [{}], position=12)) != found
    assert sample_of(logits, [RowSampling(seed=row.seed + 1, position=row.position) for row in rows]) != found


def test_settings_arrive_as_they_are():
    rows = [
        RowSampling(temperature=0.7, top_k=40, top_p=0.9, min_p=0.1, seed=2**64 - 1, position=2**40),
        RowSampling(temperature=1e300, top_k=2**40, seed=5, position=7),
        RowSampling(temperature=0.0, top_k=-1, top_p=0.5),
    ]
    settings = SamplingRows.of(rows, DEVICE)
    assert settings.temperature.tolist() == pytest.approx([0.7, 3.4028235e38, 0.0])
    assert settings.top_k.tolist() == [40, 2**31 - 1, -1]
    assert settings.top_p.tolist() == pytest.approx([0.9, 1.0, 0.5])
    assert settings.min_p.tolist() == pytest.approx([0.1, 0.0, 0.0])
    assert settings.seeds.tolist() == [-1, 5, 0]
    assert settings.positions.tolist() == [2**40, 7, 0]
    assert (settings.search_top_k, settings.search_top_p) == (True, True)
    only_greedy = SamplingRows.of(rows[2:], DEVICE)
    assert (only_greedy.search_top_k, only_greedy.search_top_p) == (False, False)


def test_no_rows():
    logits = torch.zeros(0, 9)
    assert greedy_of(logits) == []
    assert sample_of(logits, []) == []


@pytest.mark.gpu
@gpu_only
@pytest.mark.parametrize("kind", ["flat", "normal", "peaked"])
def test_all_schedules_and_row_counts_agree_at_a_real_size(kind):
    logits = (
        hostile("normal", (128, REAL_VOCAB), seed=8).to(DEVICE)
        * {"flat": 0.0, "normal": 1.0, "peaked": 5.0}[kind]
    )
    rows = settings_of(128)
    whole = sample_of(logits, rows)
    highest = greedy_of(logits)
    assert highest == greedy_reference(logits).tolist()
    for num_rows in (1, 8, 33, 128):
        for i, schedule in enumerate(SAMPLE_SCHEDULES):
            found = sample_of(logits[:num_rows], rows[:num_rows], schedule=schedule, pdl=i % 2 == 0)
            assert found == whole[:num_rows], f"{num_rows} rows, {schedule}"
        for i, key_schedule in enumerate(KEY_SCHEDULES):
            assert greedy_of(logits[:num_rows], schedule=key_schedule, pdl=i % 2 == 0) == highest[:num_rows]


@pytest.mark.gpu
@gpu_only
def test_nearly_all_tokens_are_the_cpu_s_at_a_real_size():
    logits = hostile("normal", (256, REAL_VOCAB), seed=9) * 4
    rows = settings_of(256)
    found, expected = sample_of(logits, rows), sampling.sample(logits, rows)
    num_different = sum(a != b for a, b in zip(found, expected, strict=True))
    assert num_different <= MAX_DISAGREEMENT * 256, f"{num_different} of 256 tokens differ"
    assert greedy_of(logits) == sampling.sample(logits, [RowSampling(temperature=0.0)] * 256)


@pytest.mark.gpu
@gpu_only
def test_a_captured_graph_gives_the_eager_tokens_for_new_inputs():
    rows = SamplingRows.of(settings_of(8), DEVICE)
    logits = hostile("normal", (8, REAL_VOCAB), seed=10).to(DEVICE)
    out = torch.zeros(8, dtype=torch.int64, device=DEVICE)
    sample(logits, rows, out, pdl=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample(logits, rows, out, pdl=True)
    for seed in (11, 12):
        logits.copy_(hostile("normal", (8, REAL_VOCAB), seed=seed) * 3)
        rows.positions.add_(1)
        out.fill_(-7)
        graph.replay()
        assert out.tolist() == sample_of(logits, rows)
