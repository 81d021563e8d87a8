"""The benchmark's layers of dispatch and combine over virtual ranks: bits, forms, and what its check sees.

Ranks that really wait for each other: tests/e2e/test_multi_gpu_dispatch.py.
"""

from __future__ import annotations

from tests.kernels.triton_interpreter import DEVICE  # isort: skip

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from moe_runtime.comm.collective_exchange import CollectiveExchange
from moe_runtime.comm.gpu_exchange import ExchangeSizes, StepShape, SymmetricExchange
from moe_runtime.comm.symmetric_memory import SymmetricSpace
from moe_runtime.kernels.dispatch_triton import dispatch_rows_reference
from tests.benchmark_modules import load_benchmark_module
from tests.ranks import RankContext

chains = load_benchmark_module("dispatch_chain")
experts = load_benchmark_module("identity_experts")
races = load_benchmark_module("dispatch_race")

HIDDEN, NUM_TOPK, NUM_EXPERTS, NUM_LAYERS = 40, 4, 11, 3
FORMS = {
    "pairs": {},
    "two_slots": {"slots_each": 2},
    "all_slots": {"slots_each": 4},
    "presummed": {"presum": True},
    "apart": {"apart": True, "pause": True},
}


def make_sizes(size: int, num_tokens: int) -> ExchangeSizes:
    return ExchangeSizes(
        size=size,
        max_rows=num_tokens,
        hidden=HIDDEN,
        num_topk=NUM_TOPK,
        num_layers=NUM_LAYERS,
        dtype=torch.bfloat16,
    )


def make_chains(size: int, num_tokens: int, *, num_inputs: int = NUM_LAYERS, presum: bool = False, **form):
    """Of virtual ranks, which do not wait for each other."""
    sizes, first = (
        replace(make_sizes(size, num_tokens), presums=presum),
        chains.first_experts(NUM_EXPERTS, size),
    )
    shape = StepShape.of_bucket(num_tokens, size)
    made = []
    for space in SymmetricSpace.virtual(size, sizes.symmetric_bytes, DEVICE):
        exchange = SymmetricExchange(space, sizes, first, waits=False)
        rows = chains.LayerRows.draw(sizes, num_tokens, range(NUM_EXPERTS), space.rank, DEVICE, num_inputs)
        made.append(chains.DispatchChain(exchange, sizes, shape, rows, first, **form))
    return made


def run(made) -> None:
    """All ranks by turns."""
    for layer in range(NUM_LAYERS):
        for part in ("dispatch", "await_rows", "run_experts", "combine"):
            for chain in made:
                getattr(chain, part)(layer)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("size", "num_tokens"), [(1, 3), (2, 1), (2, 5), (3, 2)])
def test_every_form_gives_its_reference_s_bits(size, num_tokens, form):
    made = make_chains(size, num_tokens, place=True, **FORMS[form])
    for chain in made:
        chain.poison()
    run(made)
    assert [chain.wrong_layers() for chain in made] == [[]] * size
    for chain in made:
        expected = chain.expected_homes()[-1]
        held = torch.ones(expected.shape[:2], dtype=torch.bool, device=DEVICE)
        if chain.exchange.presums:  # ranks that hold no slot of a token send nothing
            source = torch.bucketize(chain.rows.ids[-1], torch.tensor(chain.first_expert[1:]), right=True)
            held = (source[:, :, None] == torch.arange(size)).any(1)
        assert torch.equal(chain.homes()[held], expected[held])


@pytest.mark.slow
def test_more_positions_than_slot_tables_have_take_no_slot_table():
    made = make_chains(2, 130, place=True, slots_each=4)
    run(made)
    assert [chain.wrong_layers() for chain in made] == [[], []]
    assert bool((made[0]._slot_table == 0).all())


def test_without_inputs_of_their_own_all_layers_have_the_first_s():
    made = make_chains(2, 3, num_inputs=1)
    for chain in made:
        chain.fill()
    run(made)
    assert [chain.wrong_layers() for chain in made] == [[], []]


def test_the_table_is_that_of_the_product_s_reference():
    made = make_chains(2, 4, num_inputs=1)
    for chain in made:
        chain.fill()
        chain.dispatch(0)
    rows = [(chain.rows.x[0], chain.rows.ids[0], chain.rows.weights[0]) for chain in made]
    for rank, chain in enumerate(made):
        table = chain.exchange.table(chain.shape)
        expected = dispatch_rows_reference(rows, 4, chain.first_expert, rank)
        for found, want in zip((table.x, table.ids, table.weights), expected, strict=True):
            assert torch.equal(found, want)


def test_inert_rows_are_not_compared_and_send_nothing():
    made = make_chains(2, 4, place=True)
    made[1].num_tokens.fill_(0)
    made[1].poison()
    run(made)
    assert [chain.wrong_layers() for chain in made] == [[], []]
    assert bool((made[0].exchange.table(made[0].shape).ids[4:] == -1).all())


@pytest.mark.parametrize("form", ["pairs", "presummed"])
def test_control_rows_of_the_layer_before_are_seen(form):
    made = make_chains(2, 3, place=True, **FORMS[form])
    run(made)
    stale = made[0].homes().clone()
    for chain in made:
        chain.rows.copy_(chains.LayerRows.draw(chain.sizes, 3, range(NUM_EXPERTS), 77, DEVICE, NUM_LAYERS))
    run(made)
    assert made[0].wrong_layers() == []
    made[0].homes()[1, 0] = stale[1, 0]
    made[0].combine(2)
    assert made[0].wrong_layers() == [2]


@pytest.mark.parametrize("is_early", [False, True])
def test_control_rows_sent_before_a_slow_peer_has_read_its_table_go_wrong(is_early):
    """Rank 1 is slow: it reads its table after rank 0 has gone on to the next layer."""
    quick, slow = made = make_chains(2, 3, place=True, overwrites="table")
    for chain in made:
        chain.dispatch(0)
    for chain in made:
        chain.await_rows(0)
    quick.run_experts(0)
    if is_early:
        quick.dispatch_early(1)
    slow.run_experts(0)
    for chain in made:
        chain.combine(0)
    assert (0 in quick.wrong_layers()) == is_early
    assert 0 not in slow.wrong_layers(), "nobody wrote into the quick rank's table"


@pytest.mark.parametrize("is_early", [False, True])
def test_control_a_flag_raised_before_the_slots_are_read_goes_wrong(is_early):
    """Rank 1 is slow: it adds its rows after rank 0 has sent those of the next layer, as an early flag lets it."""
    options = {"apart": True, "pause": True, "overwrites": "slots"} if is_early else {"apart": True}
    quick, slow = made = make_chains(2, 3, place=True, **options)
    for part in ("dispatch", "await_rows", "run_experts"):
        for chain in made:
            getattr(chain, part)(0)
    read, steps = slow.combine, []

    def read_late(layer: int) -> None:
        """Between the slow rank's wait and its reads."""
        if is_early:
            quick.combine(0)
            quick.await_rows(1)
            quick.run_experts(1)
        steps.append(layer)

    slow._stop = lambda layer, which: read_late(layer)
    read(0)
    assert steps == [0]
    assert (0 in slow.wrong_layers()) == is_early


@pytest.mark.parametrize("overwrites", ["table", "slots"])
def test_the_wrong_orders_are_right_where_nobody_is_slow(overwrites):
    (alone,) = make_chains(1, 3, place=True, apart=True, overwrites=overwrites)
    alone.launch()
    assert alone.wrong_layers() == []


def test_sums_per_rank_are_other_bits_than_slots_in_order():
    sizes = make_sizes(2, 40)
    rows = chains.LayerRows.draw(sizes, 40, range(NUM_EXPERTS), 0, DEVICE)
    pairs, sums = rows.pair_rows().float(), rows.rank_rows((0, 5, 11)).float()
    assert not torch.equal(pairs.sum(2).bfloat16(), sums.sum(2).bfloat16())


def test_bytes_are_those_of_rows_that_leave():
    first, sizes = (0, 5, 11), make_sizes(2, 3)
    rows = [chains.LayerRows.draw(sizes, 3, range(NUM_EXPERTS), rank, DEVICE) for rank in range(2)]
    ids = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 5], [7, 8, 9, 10]], dtype=torch.int32, device=DEVICE)
    rows[0] = replace(rows[0], ids=ids[None])
    away = 3 * NUM_TOPK * 8
    row_bytes = 2 * HIDDEN
    assert chains.bytes_out(rows, first, 0)[0] == 2 * row_bytes + away, "two tokens have experts of rank 1"
    assert chains.bytes_out(rows, first, 1)[1] == 5 * row_bytes, "five pairs of rank 0 are computed at rank 1"
    assert chains.bytes_out(rows, first, 1, presum=True)[1] == 3 * row_bytes


def test_pauses_are_of_one_rank_by_turns_or_of_all():
    paused = {
        replay: [bool(races.draw_pauses(replay, rank, 2, 99).any()) for rank in range(2)]
        for replay in range(3)
    }
    assert paused == {0: [True, False], 1: [False, True], 2: [True, True]}


def run_by_gloo(context: RankContext) -> list[int]:
    sizes, first = make_sizes(2, 3), chains.first_experts(NUM_EXPERTS, 2)
    exchange = CollectiveExchange(context.group, sizes, first, torch.device(DEVICE))
    rows = chains.LayerRows.draw(sizes, 3, range(NUM_EXPERTS), context.rank, DEVICE, NUM_LAYERS)
    shape = StepShape.of_bucket(3, 2)
    chain = chains.DispatchChain(exchange, sizes, shape, rows, first, place=True)
    chain.launch()
    return chain.wrong_layers()


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="gloo moves tensors of the CPU")
def test_a_collective_gives_the_same_bits(ranks):
    assert ranks(2, run_by_gloo) == [[], []]


COMPILE = """
import re, runpy, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

module = runpy.run_path(sys.argv[1])
cases = [("_identity", dict(SLOTS=1, HOMES=True)), ("_identity", dict(SLOTS=4, HOMES=True)),
         ("_identity", dict(SLOTS=8, HOMES=False)), ("_place", dict(KP=8)), ("_stop", {})]
for name, constants in cases:
    kernel = module[name]
    types = dict.fromkeys(["x", "rows", "to_x"], "*bf16") | dict.fromkeys(["weights", "to_weights"], "*fp32")
    types |= dict.fromkeys(["ids", "to_ids", "pause_ns"], "*i32") | {"home_offsets": "*i64"}
    types |= dict.fromkeys(["num_pauses", "capacity", "expert_offset", "num_experts"], "i32")
    constants = dict(SIZE=2, K=8, H=2048, BLOCK=2048, PAUSE=True, SPIN=True, PDL=True) | constants
    place = {argument: (i,) for i, argument in enumerate(kernel.arg_names)}
    source = ASTSource(
        fn=kernel,
        signature={n: types.get(n, "constexpr") for n in kernel.arg_names},
        constexprs={place[n]: value for n, value in constants.items() if n in place},
        attrs={place[n]: [["tt.divisibility", 16]] for n in types if n in place and types[n][0] == "*"},
    )
    options = dict(num_warps=4, num_stages=1, enable_fp_fusion=False, launch_pdl=True)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    print(name, *re.findall(r"\\b((?:ld|st)\\.global[.\\w]*|griddepcontrol[.\\w]*|fma[.\\w]*|globaltimer)", ptx))
"""


def test_compiled_for_hopper_rows_travel_in_vectors_and_products_stay_products():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-c", COMPILE, experts.__file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    row_stores = [1, 4, 8, 1, 0]
    assert len(lines) == len(row_stores)
    for (name, *found), num_rows in zip(lines, row_stores, strict=True):
        vectors = 2048 // 128 * 2 // 16  # of a thread and row
        assert found.count("st.global.v4.b32") == num_rows * vectors, (name, found)
        assert found.count("ld.global.v4.b32") == (vectors if num_rows else 0), (name, found)
        assert [f for f in found if f.startswith("fma")] == []
        assert found.count("griddepcontrol.wait") == 1
        assert found.count("globaltimer") == (0 if name == "_place" else 2), (name, found)
        if num_rows and name != "_place":
            assert found.index("globaltimer") < found.index("ld.global.v4.b32"), (
                "a pause stands before the reads"
            )
