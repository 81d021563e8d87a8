"""Rows out of the peers' memory by virtual ranks: every rank gets every row, bit for bit.

Ranks that really wait for each other: tests/e2e/test_multi_gpu_rows.py.
"""

from __future__ import annotations

from tests.kernels.triton_interpreter import DEVICE  # isort: skip

import itertools
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from moe_runtime.comm.symmetric_memory import SymmetricSpace, carved_bytes
from moe_runtime.kernels import row_gather_triton
from moe_runtime.kernels.peer_flags_triton import PeerFlags
from moe_runtime.kernels.row_gather_triton import (
    gather_columns,
    gather_columns_reference,
    gather_home_rows,
    gather_home_rows_reference,
    gather_owned_rows,
    gather_owned_rows_reference,
)
from tests.bits import HOSTILE_KINDS, assert_bits_equal, hostile

SIZES = [1, 2, 3, 4]
BF16, FP32 = torch.bfloat16, torch.float32
HIDDEN = 48


class Virtual:
    """Virtual ranks, each with two tensors of some rows in symmetric memory."""

    def __init__(self, size, num_rows, dtype, kind="heavy_tailed"):
        shape = max(1, num_rows), HIDDEN
        num_bytes = 2 * carved_bytes(shape, dtype) + carved_bytes((1, size), torch.int32)
        self.size, self.dtype = size, dtype
        self.spaces = SymmetricSpace.virtual(size, num_bytes, DEVICE)
        drawn = hostile(kind, (2, size, *shape), seed=size + num_rows).to(dtype)
        drawn[0, :, 0, 0], drawn[1, :, 0, 1] = -0.0, float("nan")
        self.rows = drawn.to(DEVICE)
        for rank, space in enumerate(self.spaces):
            for i in range(2):
                space.carve(f"rows{i}", shape, dtype).local.copy_(self.rows[i, rank])
            space.carve("words", (1, size), torch.int32)

    def flags(self, rank):
        words = self.spaces[rank].buffers["words"]
        step = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        return PeerFlags(words=words.local, offsets=words.offsets, step=step, rank=rank, size=self.size)

    def own(self, rank, i):
        return self.spaces[rank].buffers[f"rows{i}"].local

    def where(self, rank):
        return self.spaces[rank].buffers["rows0"].offsets, self.flags(rank), 0

    def out(self, num_rows):
        return torch.full((num_rows, HIDDEN), float("inf"), dtype=self.dtype, device=DEVICE)


def home_rows(virtual, num_rows, ranks=None):
    found = {}
    for rank in ranks or range(virtual.size):
        outs = virtual.out(num_rows), virtual.out(num_rows)
        gather_home_rows(virtual.own(rank, 0), virtual.own(rank, 1), *virtual.where(rank), *outs)
        found[rank] = outs
    return found


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("size", SIZES)
def test_every_rank_gets_both_rows_of_every_token_from_its_home(size, dtype):
    """Of homes of as many rows, of one more or less, and without any."""
    for num_rows in (0, 1, 2, 3, 4, 7, 300 if size == 2 else 9):
        virtual = Virtual(size, -(-num_rows // size), dtype)
        for rank, outs in home_rows(virtual, num_rows).items():
            for i, out in enumerate(outs):
                expected = gather_home_rows_reference(list(virtual.rows[i]), num_rows)
                label = f"{num_rows} rows, tensor {i}, rank {rank}"
                assert_bits_equal(out.view(torch.int16), expected.view(torch.int16), label)


def test_the_reference_is_that_of_the_module_s_example():
    a, b, c = torch.eye(3).split(1)
    assert torch.equal(gather_home_rows_reference([torch.cat([a, c]), b], 3), torch.eye(3))


def test_who_comes_first_changes_nothing():
    virtual = Virtual(4, 3, BF16)
    expected = home_rows(virtual, 11)
    for ranks in ([3, 2, 1, 0], [1, 3, 0, 2]):
        for rank, outs in home_rows(virtual, 11, ranks).items():
            assert_bits_equal(outs[0], expected[rank][0], f"launched in the order {ranks}")


def test_control_rows_of_other_homes_differ():
    virtual = Virtual(2, 2, FP32)
    turned = gather_home_rows_reference(list(virtual.rows[0].flip(0)), 4)
    assert not torch.equal(home_rows(virtual, 4)[0][0], turned)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("size", SIZES)
def test_rows_of_tokens_come_from_the_rank_that_has_them(size, dtype):
    ends = [10 * (rank + 1) + rank % 2 for rank in range(size)]
    tokens = torch.tensor([-1, 0, ends[0] - 1, ends[0], ends[-1] - 1, ends[-1] + 5, 3], dtype=torch.int32)
    for kind in HOSTILE_KINDS:
        virtual = Virtual(size, len(tokens), dtype, kind)
        expected = gather_owned_rows_reference(list(virtual.rows[0]), tokens, ends)
        for rank in range(size):
            out = virtual.out(len(tokens))
            vocab_ends = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
            gather_owned_rows(virtual.own(rank, 0), *virtual.where(rank), tokens.to(DEVICE), vocab_ends, out)
            assert_bits_equal(out, expected, f"{kind}, rank {rank}")


@pytest.mark.parametrize("width", [4, 37, 48, 9000])
@pytest.mark.parametrize("size", SIZES)
def test_every_rank_gets_all_columns(size, width):
    """Shares of one length or two, and of several blocks."""
    for num_rows in (0, 1, 3):
        whole = hostile("heavy_tailed", (num_rows, width), seed=size + width).to(DEVICE)
        bounds = [width * rank // size for rank in range(size + 1)]
        shares = [whole[:, low:high].contiguous() for low, high in itertools.pairwise(bounds)]
        assert_bits_equal(gather_columns_reference(shares), whole, "reference")
        virtual = Virtual(size, 1, FP32)
        spaces = SymmetricSpace.virtual(size, carved_bytes((3, width), FP32), DEVICE)
        buffers = [space.carve("columns", (3 * -(-width // size),), FP32) for space in spaces]
        own = []
        for buffer, share in zip(buffers, shares, strict=True):
            own.append(buffer.local[: share.numel()].view(share.shape))
            own[-1].copy_(share)
        for rank in reversed(range(size)):
            out = torch.full_like(whole, float("nan"))
            gather_columns(own[rank], buffers[rank].offsets, virtual.flags(rank), 0, out)
            assert_bits_equal(out, whole, f"{num_rows} rows, rank {rank}")


def test_too_few_own_rows_are_a_bug():
    virtual = Virtual(2, 2, BF16)
    with pytest.raises(AssertionError, match="2 rows, 3 are at home here"):
        home_rows(virtual, 5)
    outs = virtual.out(3).float(), virtual.out(3)
    with pytest.raises(AssertionError, match=r"own rows are torch\.bfloat16, out torch\.float32"):
        gather_home_rows(virtual.own(0, 0), virtual.own(0, 1), *virtual.where(0), *outs)


COMPILE = """
import re, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from moe_runtime.kernels import row_gather_triton

cases = [("_home", 2, "bf16"), ("_home", 8, "fp32"), ("_owned", 4, "bf16"), ("_columns", 2, "fp32")]
for name, size, dtype in cases:
    kernel = getattr(row_gather_triton, name)
    types = dict.fromkeys(["rows", "columns", "out", "residual", "normed", "residual_out", "normed_out"], "*" + dtype)
    types |= dict.fromkeys(["offsets", "word_offsets"], "*i64")
    types |= dict.fromkeys(["words", "step", "pause_ns", "token_ids", "vocab_ends"], "*i32")
    types |= dict.fromkeys(["channel", "num_pauses", "num_rows", "width", "blocks"], "i32")
    types = {n: types[n] for n in kernel.arg_names if n in types}
    constants = dict(H=2048, RANK=1, SIZE=size, PAUSE=True, BLOCK=2048, EVEN=True, SPIN=True, PDL=True)
    constants = {n: value for n, value in constants.items() if n in kernel.arg_names}
    place = {argument: (i,) for i, argument in enumerate(kernel.arg_names)}
    source = ASTSource(
        fn=kernel,
        signature={n: types.get(n, "constexpr") for n in kernel.arg_names},
        constexprs={place[n]: value for n, value in constants.items()},
        attrs={place[n]: [["tt.divisibility", 16]] for n, type_ in types.items() if type_[0] == "*"},
    )
    options = dict(num_warps=4, num_stages=1, enable_fp_fusion=False, launch_pdl=True)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    accesses = re.findall(r"\\b((?:ld|st)\\.(?:global|release|acquire)[.\\w]*)", ptx)
    print(name, size, dtype, *accesses)
"""


def test_compiled_for_hopper_rows_travel_in_vectors_behind_one_flag():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMPILE], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 4
    for name, _, dtype, *accesses in lines:
        vectors = 2048 // 128 * (2 if dtype == "bf16" else 4) // 16 * (2 if name == "_home" else 1)
        acquired = accesses.index("ld.acquire.sys.global.b32")
        assert accesses.count("ld.global.v4.b32") == accesses.count("st.global.v4.b32") == vectors
        assert "ld.global.v4.b32" not in accesses[:acquired], "no row is read before the flags"
        assert accesses.count("st.release.sys.global.b32") == 1
        assert not {"ld.global.b16", "st.global.b16", "st.global.b32"} & set(accesses)
        if name == "_home":
            assert accesses[0] == "ld.global.b64", "the way to the home is loaded before the wait"


def test_metadata_counts_rows_read_and_stored():
    rows = torch.empty(5, 64, dtype=BF16)
    both = row_gather_triton._cost(
        (1,), SimpleNamespace(name="_home"), {"residual_out": rows, "normed_out": rows}
    )
    assert both == {"name": "_home_5x64", "bytes": 4 * 5 * 64 * 2}
    one = row_gather_triton._cost((1,), SimpleNamespace(name="_owned"), {"out": rows, "rows": rows})
    assert one == {"name": "_owned_5x64", "bytes": 2 * 5 * 64 * 2}
