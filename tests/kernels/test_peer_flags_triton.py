"""Flags between peers: what can be seen without a second GPU. Ranks that really wait: tests/e2e/test_multi_gpu.py."""

from __future__ import annotations

from tests.kernels.triton_interpreter import DEVICE  # isort: skip

import os
import subprocess
import sys

import pytest
import torch

from moe_runtime.kernels.peer_flags_triton import BarrierControl, PeerFlags, count_step, peer_barrier


def test_steps_are_counted_while_peers_take_part():
    step = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    live = torch.ones(1, dtype=torch.int32, device=DEVICE)
    seen = []
    for switch in (1, 1, 0, 0, 1):
        live.fill_(switch)
        count_step(step, live)
        seen.append(int(step[0]))
    assert seen == [1, 2, 0, 0, 3]


def test_nothing_is_raised_and_nobody_waits_in_a_step_without_peers():
    words = torch.full((3, 4), 7, dtype=torch.int32, device=DEVICE)
    flags = PeerFlags(
        words=words,
        offsets=torch.zeros(4, dtype=torch.int64, device=DEVICE),
        step=torch.zeros(1, dtype=torch.int32, device=DEVICE),
        rank=2,
        size=4,
    )
    peer_barrier(flags, 1)
    peer_barrier(flags, 1, control=BarrierControl.RAISES_ONLY)
    assert bool((words == 7).all())


COMPILE = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from moe_runtime.kernels.peer_flags_triton import _barrier

types = {"words": "*i32", "offsets": "*i64", "step": "*i32", "channel": "i32"}
for waits in (True, False):
    constants = dict(RANK=1, SIZE=2, WAITS=waits, SPIN=True, PDL=False)
    place = {argument: (i,) for i, argument in enumerate(_barrier.arg_names)}
    source = ASTSource(
        fn=_barrier,
        signature={n: types.get(n, "constexpr") for n in _barrier.arg_names},
        constexprs={place[n]: value for n, value in constants.items()},
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=1)).asm["ptx"]
    print(len(re.findall("st.release.sys", ptx)), len(re.findall("ld.acquire.sys", ptx)))
"""


def test_compiled_for_hopper_the_control_raises_and_does_not_wait():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-c", COMPILE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["1", "1", "1", "0"], done.stderr


def test_more_ranks_than_threads_that_wait_are_refused():
    nothing = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"size \(33\) must be in \[1, 32\]"):
        PeerFlags(words=nothing, offsets=nothing, step=nothing, rank=0, size=33)


def test_the_number_of_a_step_wraps_and_is_never_0_with_peers():
    step = torch.tensor([0, 2**31 - 2], dtype=torch.int32, device=DEVICE)
    live = torch.ones(1, dtype=torch.int32, device=DEVICE)
    seen = []
    for _ in range(2):
        count_step(step, live)
        seen.append(int(step[0]))
    step[1] = -2
    for _ in range(3):
        count_step(step, live)
        seen.append(int(step[0]))
    assert seen == [2**31 - 1, -(2**31), -1, 1, 2]
