"""All-reduce over symmetric memory by virtual ranks: both forms, every size, the tree's bits.

Ranks that really wait for each other: tests/e2e/test_multi_gpu.py.
"""

from __future__ import annotations

from tests.kernels.triton_interpreter import DEVICE  # isort: skip

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from moe_runtime.comm import all_reduce as all_reduce_module
from moe_runtime.comm.symmetric_memory import SymmetricSpace, carved_bytes
from moe_runtime.kernels import all_reduce_triton
from moe_runtime.kernels.all_reduce_triton import (
    AllReduceSchedule,
    all_reduce_exchange,
    all_reduce_one_shot,
    all_reduce_reference,
    schedule_for,
)
from moe_runtime.kernels.peer_flags_triton import PeerFlags
from moe_runtime.kernels.trees import tree_sum
from tests.bits import HOSTILE_KINDS, assert_bits_equal, hostile

SIZES = [1, 2, 3, 4, 6, 8]
FORMS = ["one_shot", "exchange"]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def parts_of(kind, length, size, dtype, seed=0):
    """Hostile along the ranks, the dimension that is summed."""
    return list(hostile(kind, (length, size), seed=seed + size).to(dtype).to(DEVICE).unbind(1))


def reduce_all(form, parts, out_dtype, *, residual=None, in_place=False, schedule=None, ranks=None):
    """Every virtual rank's result; ``ranks`` says in which order they are launched."""
    size, shape = len(parts), parts[0].shape
    num_bytes = carved_bytes(shape, torch.float32) * 2 + 4096
    spaces = SymmetricSpace.virtual(size, num_bytes, DEVICE)
    outs = []
    for space, part in zip(spaces, parts, strict=True):
        space.carve("part", shape, part.dtype).local.copy_(part)
        out = space.carve("result", shape, out_dtype)
        out.local.fill_(float("nan"))
        if in_place:
            out.local.copy_(residual)
        space.carve("words", (2, size), torch.int32)
        outs.append(out)
    for rank in ranks or range(size):
        buffers = spaces[rank].buffers
        flags = PeerFlags(
            words=buffers["words"].local,
            offsets=buffers["words"].offsets,
            step=torch.zeros(1, dtype=torch.int32, device=DEVICE),
            rank=rank,
            size=size,
        )
        before = outs[rank].local if in_place else residual
        where = (buffers["part"].local, buffers["part"].offsets, flags, 0, outs[rank].local)
        if form == "one_shot":
            all_reduce_one_shot(*where, residual=before, schedule=schedule)
        else:
            all_reduce_exchange(*where, outs[rank].offsets, residual=before, schedule=schedule)
    return [out.local for out in outs]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", SIZES)
def test_every_rank_gets_the_tree_of_the_parts(size, form):
    for kind in HOSTILE_KINDS:
        for part_dtype, out_dtype in [("bf16", "bf16"), ("fp32", "bf16"), ("fp32", "fp32"), ("bf16", "fp32")]:
            for length in (1, 77, 1344):
                parts = parts_of(kind, length, size, DTYPES[part_dtype])
                expected = tree_sum([part.float() for part in parts]).to(DTYPES[out_dtype])
                label = f"{kind}, {part_dtype} to {out_dtype}, {length} elements"
                assert_bits_equal(all_reduce_reference(parts, DTYPES[out_dtype]), expected, label)
                for rank, actual in enumerate(reduce_all(form, parts, DTYPES[out_dtype])):
                    assert_bits_equal(actual, expected, f"{label}, rank {rank}")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_residual_is_added_to_the_rounded_sum(size, form):
    for kind in HOSTILE_KINDS:
        for part_dtype, out_dtype in [("bf16", "bf16"), ("fp32", "bf16"), ("fp32", "fp32")]:
            parts = parts_of(kind, 640, size, DTYPES[part_dtype])
            residual = hostile(kind, (640,), seed=9).to(DTYPES[out_dtype]).to(DEVICE)
            expected = all_reduce_reference(parts, DTYPES[out_dtype], residual)
            for in_place in (False, True):
                for actual in reduce_all(
                    form, parts, DTYPES[out_dtype], residual=residual, in_place=in_place
                ):
                    assert_bits_equal(actual, expected, f"{kind}, {part_dtype} to {out_dtype}, {in_place}")


@pytest.mark.parametrize("form", FORMS)
def test_schedules_are_free(form):
    parts = parts_of("cancelling", 3001, 6, torch.float32)
    expected = all_reduce_reference(parts, torch.float32)
    for block, max_programs in ((64, 3), (512, 64), (1024, 1), (4096, 8)):
        schedule = AllReduceSchedule(block=block, num_warps=4, max_programs=max_programs)
        for actual in reduce_all(form, parts, torch.float32, schedule=schedule):
            assert_bits_equal(actual, expected, f"{schedule}")


@pytest.mark.parametrize("form", FORMS)
def test_arrival_order_changes_nothing(form):
    parts = parts_of("cancelling", 500, 4, torch.float32)
    expected = all_reduce_reference(parts, torch.float32)
    for ranks in ([3, 2, 1, 0], [1, 3, 0, 2]):
        for actual in reduce_all(form, parts, torch.float32, ranks=ranks):
            assert_bits_equal(actual, expected, f"launched in the order {ranks}")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [3, 4, 6, 8])
def test_control_parts_of_ranks_in_another_order_show(size, form):
    parts = parts_of("cancelling", 999, size, torch.float32)
    expected = all_reduce_reference(parts, torch.float32)
    turned = parts[1:] + parts[:1]
    for actual in reduce_all(form, turned, torch.float32):
        assert not torch.equal(actual, expected)


@pytest.mark.parametrize("form", FORMS)
def test_no_elements_are_no_error(form):
    empty = [torch.empty(0, dtype=torch.bfloat16, device=DEVICE)] * 3
    assert [out.numel() for out in reduce_all(form, empty, torch.bfloat16)] == [0, 0, 0]


def test_bits_are_those_of_the_collective_form():
    parts = parts_of("heavy_tailed", 257, 6, torch.bfloat16)
    collective = all_reduce_module._fold(torch.stack(parts), torch.bfloat16)
    for form in FORMS:
        assert_bits_equal(reduce_all(form, parts, torch.bfloat16)[5], collective, form)


@pytest.mark.parametrize("num_elements", [0, 1, 2048, 128 * 2048, 4096 * 2048])
def test_blocks_are_powers_of_two(num_elements):
    block = schedule_for(num_elements).block
    assert block & (block - 1) == 0


def test_more_ranks_than_the_tree_is_written_for_are_refused():
    part = torch.zeros(16, device=DEVICE)
    offsets = torch.zeros(17, dtype=torch.int64, device=DEVICE)
    step = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    flags = PeerFlags(words=step, offsets=offsets, step=step, rank=0, size=17)
    with pytest.raises(ValueError, match=r"size \(17\) must be at most 16"):
        all_reduce_one_shot(part, offsets, flags, 0, torch.zeros_like(part))


COMPILE = """
import re, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from moe_runtime.kernels import all_reduce_triton

for name, size, dtype in [("_one_shot", 2, "fp32"), ("_one_shot", 8, "bf16"), ("_fold_slice", 8, "bf16")]:
    kernel = getattr(all_reduce_triton, name)
    types = dict.fromkeys(["part", "out", "residual"], "*" + dtype)
    types |= dict.fromkeys(["part_offsets", "out_offsets", "word_offsets"], "*i64")
    types |= dict.fromkeys(["words", "step", "pause_ns"], "*i32")
    types |= dict.fromkeys(["channel", "num_pauses", "first", "end"], "i32")
    constants = dict(RANK=1, SIZE=size, RESIDUAL=True, PAUSE=True, BLOCK=2048, SPIN=True, PDL=True)
    place = {argument: (i,) for i, argument in enumerate(kernel.arg_names)}
    aligned = [n for n, type_ in types.items() if type_[0] == "*" or n in ("first", "end")]
    source = ASTSource(
        fn=kernel,
        signature={n: types.get(n, "constexpr") for n in kernel.arg_names},
        constexprs={place[n]: value for n, value in constants.items()},
        attrs={place[n]: [["tt.divisibility", 16]] for n in aligned},
    )
    options = dict(num_warps=4, num_stages=1, enable_fp_fusion=False, launch_pdl=True)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    accesses = re.findall(r"\\b((?:ld|st)\\.(?:global|release|acquire)[.\\w]*)", ptx)
    print(name, size, dtype, *accesses)
"""


def test_compiled_for_hopper_elements_travel_in_vectors_and_flags_with_order():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMPILE], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 3
    for name, size, dtype, *accesses in lines:
        per_copy = 2048 // 128 * DTYPES[dtype].itemsize // 16  # vectors of a thread
        num_stores = int(size) if name == "_fold_slice" else 1
        assert accesses.count("ld.global.v4.b32") == (int(size) + 1) * per_copy, (name, accesses)
        assert accesses.count("st.global.v4.b32") == num_stores * per_copy, (name, accesses)
        assert accesses.count("st.release.sys.global.b32") == 1, "one fence for all peers"
        assert accesses.count("ld.acquire.sys.global.b32") == 1
        elements = [a for a in accesses if a in ("ld.global.b16", "st.global.b16", "st.global.b32")]
        assert elements == []


def test_metadata_counts_parts_and_stores():
    args = {
        "part": torch.empty(640, dtype=torch.float32),
        "out": torch.empty(640, dtype=torch.bfloat16),
        "first": 0, "end": 640, "SIZE": 4, "RESIDUAL": True,
    }  # fmt: skip
    one_shot = all_reduce_triton._cost((1,), SimpleNamespace(name="_one_shot"), args)
    assert one_shot == {"name": "_one_shot_4x640", "flops32": 640 * 4, "bytes": 640 * (4 * 4 + 2 + 2)}
    args |= {"first": 160, "end": 320, "RESIDUAL": False}
    exchange = all_reduce_triton._cost((1,), SimpleNamespace(name="_fold_slice"), args)
    assert exchange == {"name": "_fold_slice_4x160", "flops32": 160 * 3, "bytes": 160 * (4 * 4 + 4 * 2)}
