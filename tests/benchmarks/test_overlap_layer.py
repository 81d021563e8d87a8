"""A micro-batch's layers over virtual ranks: every plan and every way of sending gives the serial plan's bits.

Ranks that really wait for each other: benchmarks/bench_prefill_overlap.py compares the same on two GPUs.
"""

from __future__ import annotations

from tests.kernels.triton_interpreter import DEVICE  # isort: skip

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from moe_runtime.comm.gpu_exchange import StepShape
from moe_runtime.comm.symmetric_memory import SymmetricSpace
from moe_runtime.kernels.attention import BLOCK_SIZE
from moe_runtime.kernels.attention_tiles import make_row_tiles
from moe_runtime.layers.cuda_decoder import CudaDecoder, MixedInput, RowTiles
from moe_runtime.models.qwen3_moe import parse_config
from tests.benchmark_modules import load_benchmark_module
from tests.gpu_engine import gpu_config

layers = load_benchmark_module("overlap_layer")
kernels = load_benchmark_module("overlap_kernels")
plans = load_benchmark_module("overlap_plans")

SIZE, SEQS, SEQ_LEN, LAYERS = 2, 1, 3, 2
CONFIG = parse_config(gpu_config(), None)


@pytest.fixture(scope="module")
def ranks():
    """``[rank][micro-batch]``."""
    sizes = layers.MicroBatch.sizes_of(CONFIG, SIZE, SEQS * SEQ_LEN, LAYERS)
    device = torch.device(DEVICE)
    stacks = [layers.LayerStack.draw(CONFIG, LAYERS, rank, SIZE, device) for rank in range(SIZE)]
    made = [[] for _ in range(SIZE)]
    for i in range(2):
        for space in SymmetricSpace.virtual(SIZE, layers.MicroBatch.region_bytes(sizes), device):
            stack, seed = stacks[space.rank], 10 * space.rank + i
            made[space.rank].append(layers.MicroBatch(stack, space, sizes, SEQS, SEQ_LEN, seed, waits=False))
    return made


@pytest.fixture(scope="module")
def expected(ranks):
    """``[rank][micro-batch]`` outputs of the serial plan."""
    run("serial", ranks)
    return outputs(ranks)


def run(name, ranks, programs=None, spare=0) -> None:
    for batches in ranks:
        for batch in batches:
            batch.programs, batch.spare = programs, spare
            batch.poison()
    layers.run_in_turn(plans.PLANS[name](LAYERS), ranks)


def outputs(ranks):
    return [[batch.outputs() for batch in batches] for batches in ranks]


def equal(found, expected) -> bool:
    return all(
        torch.equal(a, b)
        for of_rank, want_of_rank in zip(found, expected, strict=True)
        for of_batch, want in zip(of_rank, want_of_rank, strict=True)
        for a, b in zip(of_batch, want, strict=True)
    )


@pytest.mark.parametrize(
    ("name", "programs", "spare"), [("pipeline", 2, 1), ("pipeline", 0, 9), ("two_streams", None, 0)]
)
def test_every_plan_and_way_gives_the_serial_plan_s_bits(ranks, expected, name, programs, spare):
    assert not torch.equal(*(expected[rank][0][0] for rank in range(SIZE))), "ranks have rows of their own"
    run(name, ranks, programs, spare)
    assert equal(outputs(ranks), expected)


def test_the_serial_plan_is_the_engine_s_step(ranks, expected):
    """Both ranks' rows as one prompt batch of the product's decoder, which finds each row in its embedding."""
    num_tokens = SEQS * SEQ_LEN
    rows = torch.cat([batches[1]._residual for batches in ranks])
    stacks = [batches[1].stack for batches in ranks]

    def read(role, layer_idx, expert):
        if role == "embed":
            return rows
        if role == "final_norm" or role == "lm_head":
            return torch.ones(*((CONFIG.hidden_size,) if role == "final_norm" else rows.shape))
        return stacks[0].read(role, layer_idx, expert)

    config = replace(stacks[0].config, vocab_size=rows.shape[0])
    decoder = CudaDecoder(config, read, torch.bfloat16, 64, rows.shape[0], torch.device(DEVICE))
    lens = [SEQ_LEN] * (SIZE * SEQS)
    schedule = decoder.schedules.attention_rows(few=False)
    tiles = make_row_tiles(
        lens, [0] * len(lens), num_groups=config.num_query_heads_per_kv_head, block_rows=schedule.block_rows
    )
    positions = torch.arange(SEQ_LEN).repeat(len(lens))
    blocks = torch.arange(len(lens)).repeat_interleave(SEQ_LEN)
    step = MixedInput(
        shape=StepShape.of_tokens((rows.shape[0],)),
        token_ids=torch.arange(rows.shape[0], dtype=torch.int32, device=DEVICE),
        positions=positions.int().to(DEVICE),
        slot_mapping=(blocks * BLOCK_SIZE + positions).to(DEVICE),
        num_tokens=torch.tensor([rows.shape[0]], dtype=torch.int32, device=DEVICE),
        block_table=torch.arange(len(lens), dtype=torch.int32, device=DEVICE)[:, None],
        tiles=[RowTiles(schedule=schedule, tiles=torch.from_numpy(tiles).to(DEVICE))],
    )
    shape = (len(lens), config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    caches = [
        tuple(torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
        for _ in range(LAYERS)
    ]
    hidden = decoder.mixed(step, caches)
    for rank in range(SIZE):
        assert torch.equal(hidden[rank * num_tokens :][:num_tokens], expected[rank][1][1])


@pytest.mark.parametrize("programs", [None, 3, 0])
def test_an_exchange_alone_brings_what_a_step_brought(ranks, expected, programs):
    run("apart", ranks, programs)
    before = [batches[0].received() for batches in ranks]
    for batches in ranks:
        batches[0].poison()
    assert not torch.equal(ranks[0][0].received()[3], before[0][3]), "poison is seen"
    plan = plans.PLANS["exchange"](1)
    layers.run_in_turn(plan, ranks)
    for batches, want in zip(ranks, before, strict=True):
        assert all(map(torch.equal, batches[0].received(), want))


@pytest.mark.parametrize("programs", [3, 0])
def test_beside_changes_neither_half(ranks, expected, programs):
    run("apart", ranks, programs)
    received = [batches[0].received() for batches in ranks]
    rows = [batches[1].home_rows().clone() for batches in ranks]
    layers.run_in_turn(plans.PLANS["compute"](LAYERS), ranks)
    alone = [[batches[1].outputs()] for batches in ranks]
    assert not equal(alone, [of_rank[1:] for of_rank in expected]), "rows of other ranks are old ones"
    for batches, old in zip(ranks, rows, strict=True):
        batches[0].poison()
        batches[1].poison_outputs()
        batches[1].home_rows().copy_(old)
    layers.run_in_turn(plans.PLANS["beside"](LAYERS), ranks)
    assert equal([[batches[1].outputs()] for batches in ranks], alone)
    for batches, want in zip(ranks, received, strict=True):
        assert all(map(torch.equal, batches[0].received(), want))


@pytest.mark.parametrize("missing", ["send", "dispatch"])
def test_control_a_part_left_out_is_seen(ranks, expected, missing):
    for batches in ranks:
        for batch in batches:
            batch.programs = 2
            batch.poison()
    plan = [e for e in plans.PLANS["pipeline"](LAYERS) if (e.part, e.batch, e.layer) != (missing, 0, 1)]
    layers.run_in_turn(plan, ranks)
    found = outputs(ranks)
    assert not equal(found, expected)
    assert equal([batches[1:] for batches in found], [batches[1:] for batches in expected])


def test_bytes_that_leave_are_those_of_rows_with_experts_elsewhere(ranks, expected):
    run("apart", ranks)
    num_tokens, num_topk, row_bytes = SEQS * SEQ_LEN, CONFIG.num_experts_per_tok, 2 * CONFIG.hidden_size
    first = [batches[0] for batches in ranks]
    ids = [batch.exchange.own_rows(batch.shape)[1] for batch in first]
    half = CONFIG.num_experts // 2
    sent = int((ids[0] >= half).any(1).sum()) + int((ids[1] < half).sum())
    assert first[0].bytes_out() == sent * row_bytes + num_tokens * num_topk * 8
    for batch in first:
        batch.programs = 0
    assert first[0].bytes_out() == num_tokens * ((1 + num_topk) * row_bytes + num_topk * 8)
    assert sum(batch.share() for batch in first) == pytest.approx(SIZE)


def test_more_tokens_than_one_slice_of_the_table_are_refused():
    stack = layers.LayerStack.draw(CONFIG, 1, 0, 1, torch.device(DEVICE))
    sizes = layers.MicroBatch.sizes_of(CONFIG, 1, 16385, 1)
    with pytest.raises(ValueError, match="1 ranks of 16385 tokens must fit one slice"):
        layers.MicroBatch(stack, None, sizes, 1, 16385, 0)


COMPILE = """
import re, runpy, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

module = runpy.run_path(sys.argv[1])
for name, rows, warps in (("_send_table", 8, 16), ("_send_rows", 16, 16), ("_send_rows", 4, 4)):
    kernel = module[name]
    types = dict.fromkeys(["x", "table_x", "staged", "rows"], "*bf16")
    types |= dict.fromkeys(["weights", "table_weights"], "*fp32") | dict.fromkeys(["num_rows", "num_pairs"], "i32")
    types |= dict.fromkeys(["ids", "table_ids", "first_expert"], "*i32")
    types |= dict.fromkeys(["x_offsets", "ids_offsets", "weights_offsets", "home_offsets"], "*i64")
    types |= dict.fromkeys(["capacity", "low", "high"], "i32")
    constants = dict(RANK=0, SIZE=2, K=8, KP=8, H=2048, BLOCK=2048, ROWS=rows)
    place = {argument: (i,) for i, argument in enumerate(kernel.arg_names)}
    source = ASTSource(
        fn=kernel,
        signature={n: types.get(n, "constexpr") for n in kernel.arg_names},
        constexprs={place[n]: value for n, value in constants.items() if n in place},
        attrs={place[n]: [["tt.divisibility", 16]] for n in types if n in place and types[n][0] == "*"},
    )
    options = dict(num_warps=warps, num_stages=1, enable_fp_fusion=False)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print(name, *re.findall(r"\\b((?:ld|st)\\.global[.\\w]*|ld\\.local|st\\.local)", compiled.asm["ptx"]))
"""


def test_compiled_for_hopper_rows_travel_in_vectors():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-c", COMPILE, kernels.__file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 3
    for (name, *found), (rows, warps) in zip(lines, ((8, 16), (16, 16), (4, 4)), strict=True):
        vectors = rows * 2048 // (32 * warps) // 8
        assert found.count("ld.global.v4.b32") >= vectors, (name, found)
        assert found.count("st.global.v4.b32") >= vectors, (name, found)
        assert not any(f.endswith(".local") for f in found), (name, found)
