"""The engine on several GPUs, as its users start it: one digest whatever the ranks, the transport and the group, and an
end within seconds when a rank goes.

Ranks share a GPU where there are fewer (tests/shared_gpu.py), but for NCCL, which refuses that; without any GPU nothing
of this runs. ``DEVICE`` set to "cpu" shows that the tests themselves work.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_runtime.verify.axes import AXES
from tests.checkpoints import write_checkpoint
from tests.gpu_engine import gpu_config
from tests.gpu_ranks import NUM_GPUS, needs_gpus
from tests.rank_programs import program_of, run_to_end
from tests.servers import running_server

DEVICE = "cuda"
SHARES_GPU = DEVICE == "cuda" and NUM_GPUS < 2
FLAGS = ["--num-prompts", "12", "--max-tokens", "12"]
END_S = 10.0

pytestmark = [
    pytest.mark.multigpu,
    needs_gpus(1 if DEVICE == "cuda" else 0),
    pytest.mark.timeout(300),
]


def by_nccl(num_ranks: int) -> pytest.MarkDecorator:
    """Mark of what moves some of its tensors with NCCL: groups of several ranks do for long steps."""
    return needs_gpus(num_ranks if DEVICE == "cuda" else 0)


def check(num_ranks: int, *flags: str, json_file: Path) -> dict:
    """Run ``moe_runtime.check``; every axis must pass."""
    program = ["-m", "moe_runtime.check", "--device", DEVICE, "--json", str(json_file)]
    done = run_to_end(num_ranks, *program, *flags, timeout_s=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found: dict = json.loads(json_file.read_text())
    return found


@pytest.fixture(scope="module", params=["builtin", "heavy_tailed", "cancelling"])
def model(request, tmp_path_factory) -> str:
    if request.param == "builtin":
        return "builtin"
    folder = tmp_path_factory.mktemp(request.param)
    config = gpu_config(num_hidden_layers=2, num_experts=9, num_experts_per_tok=4)
    return str(write_checkpoint(folder, config, kind=request.param))


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory) -> str:
    """Digest on one GPU."""
    json_file = tmp_path_factory.mktemp("alone") / "1.json"
    digest: str = check(1, "--model", model, *FLAGS, "--axes", "again", json_file=json_file)["digest"]
    return digest


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        (2, ["--dispatcher", "symmetric"]),
        (4, ["--dispatcher", "symmetric"]),
        (8, ["--dispatcher", "symmetric"]),
        pytest.param(2, ["--dispatcher", "collective"], marks=by_nccl(2)),
        pytest.param(2, ["--tp", "2", "--dispatcher", "symmetric"], marks=by_nccl(2)),
        pytest.param(4, ["--tp", "2", "--dispatcher", "symmetric"], marks=by_nccl(4)),
        pytest.param(2, ["--tp", "2", "--dispatcher", "collective"], marks=by_nccl(2)),
    ],
    ids=str,
)
def test_several_ranks_have_the_digest_of_one(model, alone, size, flags, tmp_path):
    axes = ["alone", "chunks", *(["graph"] if DEVICE == "cuda" else [])]
    found = check(size, "--model", model, *FLAGS, *flags, "--axes", *axes, json_file=tmp_path / "ranks.json")
    assert found["digest"] == alone
    assert found["facts"]["ranks"] == size


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_one_rank_that_plays_several_has_the_digest_too(model, alone, size, tmp_path):
    flags = ["--dispatcher", "loopback", "--loopback-ranks", str(size)]
    found = check(1, "--model", model, *FLAGS, *flags, "--axes", "alone", json_file=tmp_path / "w.json")
    assert found["digest"] == alone


def test_two_ranks_pass_every_axis(tmp_path):
    axes = [axis for axis in AXES if axis != "topology" or not SHARES_GPU]  # that one has NCCL
    found = check(2, *FLAGS, "--axes", *axes, json_file=tmp_path / "all.json")
    assert {axis["name"] for axis in found["axes"]} >= {"again", "alone", "preempt", "buckets"}


@pytest.mark.parametrize(
    ("signum", "text"), [(signal.SIGKILL, "rank 1 has gone"), (signal.SIGSTOP, "rank 1 has stalled")]
)
def test_a_rank_that_goes_or_stops_is_named_and_ends_the_others_within_seconds(signum, text, tmp_path):
    rank, other = run_forever(tmp_path)
    try:
        wait_for(tmp_path / "0.running")
        wait_for(tmp_path / "1.running")
        time.sleep(1.0)
        start_s = time.monotonic()
        other.send_signal(signum)
        _, errors = rank.communicate(timeout=END_S)
        assert rank.returncode not in (0, None)
        assert text in errors, errors[-2000:]
        assert time.monotonic() - start_s < END_S
    finally:
        for process in (rank, other):
            process.kill()
            process.communicate()


RANK = """
import os, sys, pathlib
from moe_runtime.engine.llm import LLM
from moe_runtime.engine.request import SamplingParams
from moe_runtime.launch.distributed import init_ranks
group = init_ranks("{device}")
llm = LLM("builtin", device="{device}", group=group)
params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
try:
    while True:
        llm.generate([[5, 6, 7]] * 4, params)
        pathlib.Path("{folder}", f"{{group.rank}}.running").touch()
except RuntimeError as error:
    print(error, file=sys.stderr, flush=True)
    os._exit(3)  # a kernel may still wait for the rank that has gone
"""


def run_forever(folder: Path) -> list[subprocess.Popen[str]]:
    """Two ranks of an engine that never ends, without torchrun, which would end them together."""
    script = folder / "rank.py"
    script.write_text(RANK.format(device=DEVICE, folder=folder))
    port = free_port()
    ranks = []
    for rank in range(2):
        environment = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        ranks.append(
            subprocess.Popen(
                [sys.executable, *program_of(2, str(script))],
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return ranks


def free_port() -> int:
    """A port that nobody listens on just now."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(path: Path, timeout_s: float = 120.0) -> None:
    """Wait until a file is there."""
    end_s = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < end_s, f"{path.name} did not come in {timeout_s:g} s"
        time.sleep(0.1)


def test_the_server_on_two_ranks_answers_as_on_one():
    import httpx

    body = {
        "model": "builtin",
        "prompt": "Once upon a time",
        "max_tokens": 20,
        "temperature": 0,
        "logprobs": 3,
        "seed": 5,  # else each answer names the one it drew
    }
    answers = []
    for size, tp in ((1, 1), (2, 1), *([] if SHARES_GPU else [(2, 2)])):
        with running_server(size, "--device", DEVICE, "--tp", str(tp)) as server:
            answers.append(
                [
                    httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"]
                    for _ in range(4)
                ]
            )
            if size == 2:
                info = server.info()
                assert info["dispatcher"] == "symmetric"
                assert info["tp_transport"] == ("symmetric" if tp == 2 else "collective")
                assert all(rank["info"]["exchange_buffer_bytes"] > 0 for rank in info["ranks"])
    assert all(found == [answers[0][0]] * 4 for found in answers)
