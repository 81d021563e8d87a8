"""Options of a launch: nothing that changes bits is left to the compiler's defaults."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_interpreter import DEVICE

import triton  # isort: skip
import triton.language as tl  # isort: skip

from moe_runtime.kernels import triton_launch  # isort: skip
from moe_runtime.kernels.triton_launch import cdiv, launch_options, next_power_of_2, wait_for_previous  # isort: skip


@triton.jit
def _copy(x, out, N: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    tl.store(out + tl.arange(0, N), tl.load(x + tl.arange(0, N)))


def test_compiled_kernels_never_fuse_a_product_and_a_sum(monkeypatch):
    monkeypatch.setattr(triton_launch, "INTERPRETED", False)
    for pdl in (False, True):
        options = launch_options(num_warps=2, num_stages=3, pdl=pdl)
        assert options == {"num_warps": 2, "num_stages": 3, "enable_fp_fusion": False, "launch_pdl": pdl}


def test_the_interpreter_takes_no_options(monkeypatch):
    monkeypatch.setattr(triton_launch, "INTERPRETED", True)
    assert launch_options(num_warps=2, num_stages=3, pdl=False) == {}


def test_the_interpreter_is_known_by_its_variable():
    assert (DEVICE == "cpu") is triton_launch.INTERPRETED


def test_sizes_on_the_host_are_those_of_triton_s_own_functions():
    for n in range(1, 300):
        assert next_power_of_2(n) == triton.next_power_of_2(n)
        for block in (1, 3, 16, 64):
            assert cdiv(n - 1, block) == triton.cdiv(n - 1, block)


@pytest.mark.parametrize("pdl", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_a_kernel_that_waits_runs(pdl):
    x, out = torch.arange(16.0, device=DEVICE), torch.zeros(16, device=DEVICE)
    _copy[(1,)](x, out, N=16, PDL=pdl, **launch_options(num_warps=1, num_stages=1, pdl=pdl))
    assert torch.equal(x, out)
