"""Two nodes of four ranks serve the bits of one; see tests/nodes.py for what a node is here."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from moe_runtime import LLM, SamplingParams
from moe_runtime.kernels.schedules import Control, control
from tests.nodes import ADDRESSES, Node, two_nodes

pytestmark = pytest.mark.xdist_group("servers")

PROMPTS = ("HAMLET\nWhat a piece of work is", "JULIET\n", "O " * 40, "PUCK\nLord what fools")
PARAMS = {"max_tokens": 16, "seed": 7, "logprobs": 5, "temperature": 0.9, "top_p": 0.95}


class TwoNodeServer:
    """A server over two nodes.

    Attributes:
        nodes: The nodes; the front end is on the first.
        processes: torchrun on each.
        log: What both have written.
    """

    def __init__(self, nodes: tuple[Node, Node], *flags: str) -> None:
        self.nodes = nodes
        self.log: list[str] = []
        self.port = 0
        arguments = ("-m", "moe_runtime.serve", "--device", "cpu", "--port", "0", *flags)
        self.processes = [node.torchrun(4, *arguments) for node in nodes]
        self._readers = [threading.Thread(target=self._read, args=(process,)) for process in self.processes]
        for reader in self._readers:
            reader.start()

    @property
    def text(self) -> str:
        """The log so far."""
        return "".join(self.log)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """From a client on the first node."""
        url = f"http://127.0.0.1:{self.port}{path}"
        return self.nodes[0].call(lambda: httpx.request(method, url, timeout=120, **options))

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Block until requests are taken."""
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            ended = [process.returncode for process in self.processes if process.poll() is not None]
            assert not ended, f"a node ended with {ended}:\n{self.text}"
            if self.port:
                with contextlib.suppress(httpx.HTTPError):
                    if self.request("GET", "/health/ready").status_code == 200:
                        return
            time.sleep(0.1)
        raise AssertionError(f"not ready after {timeout_s} s:\n{self.text}")

    def close(self) -> None:
        """End both nodes' processes."""
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        for process, node in zip(self.processes, self.nodes, strict=True):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            node.kill()
            process.wait()
        for reader in self._readers:
            reader.join(10)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None, "stdout is a pipe"
        with process.stdout:
            for line in process.stdout:
                self.log.append(line)
                if match := re.search(r"serving on http://127.0.0.1:(\d+)", line):
                    self.port = int(match.group(1))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodeServer]:
    with two_nodes(tmp_path_factory.mktemp("nodes")) as nodes:
        running = TwoNodeServer(nodes)
        try:
            running.wait_ready()
            yield running
        finally:
            running.close()


def _served(server: TwoNodeServer) -> list[tuple[list[int], list[float]]]:
    body = {"model": "builtin", "prompt": PROMPTS, "return_token_ids": True, **PARAMS}
    response = server.request("POST", "/v1/completions", json=body)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    return [(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in choices]


def _offline(llm: LLM) -> list[tuple[list[int], list[float]]]:
    outputs = [result.outputs[0] for result in llm.generate(list(PROMPTS), SamplingParams(**PARAMS))]
    return [(list(out.token_ids), [entry.logprob for entry in out.logprobs or ()]) for out in outputs]


def test_two_nodes_give_the_bits_of_one_rank(server: TwoNodeServer) -> None:
    served, llm = _served(server), LLM()
    assert served == _offline(llm)
    assert _served(server) == served  # by other ranks
    with control(Control.SPLIT_K_GEMM):
        assert served != _offline(llm)


def test_the_transport_between_hosts_is_named_with_the_reason(server: TwoNodeServer) -> None:
    info = server.request("GET", "/server_info").json()
    assert (info["dispatcher"], info["dispatcher_reason"]) == ("collective", "the ranks are on several hosts")
    assert (info["world_size"], len(info["ranks"])) == (8, 8)
    of_node = [{rank["pid"] for rank in info["ranks"][4 * node.idx :][:4]} for node in server.nodes]
    assert all(of_node[node.idx] <= set(node.pids()) for node in server.nodes)


def test_sockets_are_bound_to_loopback_or_to_the_interface_between_the_nodes(server: TwoNodeServer) -> None:
    for node, process in zip(server.nodes, server.processes, strict=True):
        own = bytes(map(int, reversed(node.address.split(".")))).hex().upper()
        listeners = node.listeners()
        listeners.pop(process.pid, None)  # torchrun's own store
        assert set().union(*listeners.values()) <= {own, "0100007F"}
        assert sum(own in addresses for addresses in listeners.values()) >= 4, "gloo listens on the wire"


def test_a_node_that_dies_ends_the_other_and_its_requests(server: TwoNodeServer) -> None:
    first, second = server.nodes
    body = {"model": "builtin", "prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}
    url = f"http://127.0.0.1:{server.port}/v1/completions"

    def stream() -> list[str]:
        lines = []
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.stream("POST", url, json=body, timeout=60) as response,
        ):
            for line in response.iter_lines():
                lines.append(line)
                if len(lines) == 1:
                    second.kill()
        return lines

    start_s = time.monotonic()
    lines = first.call(stream)
    assert lines
    assert "data: [DONE]" not in lines
    assert server.processes[0].wait(30) != 0
    took_s = time.monotonic() - start_s
    assert took_s < 20, f"{took_s:.1f} s"
    assert first.pids() == []


def _wait_until_idle(server: TwoNodeServer) -> None:
    """Until every rank has told the watch that it sleeps; before that it may be silent for longer."""
    end_s = time.monotonic() + 30
    phases: list[str] = []
    while time.monotonic() < end_s:
        phases = [str(rank["phase"]) for rank in server.request("GET", "/server_info").json()["ranks"]]
        if all(phase.startswith("idle") for phase in phases):
            return
        time.sleep(0.1)
    raise AssertionError(f"not idle: {phases}")


@pytest.mark.slow
@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
def test_a_cut_wire_ends_both_nodes(is_busy: bool, tmp_path: Path) -> None:
    """No socket closes and no packet comes back: both sides notice the silence, in the middle of a step too."""
    with two_nodes(tmp_path) as nodes:
        server = TwoNodeServer(nodes)
        try:
            server.wait_ready()
            body = {"model": "builtin", "prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}
            url = f"http://127.0.0.1:{server.port}/v1/completions"
            lines: list[str] = []

            def stream() -> None:
                options = {"json": body, "timeout": 60}
                with contextlib.suppress(httpx.HTTPError), httpx.stream("POST", url, **options) as response:
                    for line in response.iter_lines():
                        lines.append(line)
                        if len(lines) == 1:
                            nodes[1].cut()

            start_s = time.monotonic()
            if is_busy:
                nodes[0].call(stream)
                assert lines
                assert "data: [DONE]" not in lines
            else:
                _wait_until_idle(server)
                nodes[1].cut()
            for process in server.processes:
                assert process.wait(60) != 0
            assert time.monotonic() - start_s < 20
            assert [node.pids() for node in nodes] == [[], []]
        finally:
            server.close()


def _srun(node: Node) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "4242", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(node.idx), "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": "0", "SLURM_NODEID": str(node.idx), "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": "198.18.0.[1-2]",
    }  # fmt: skip


def _leader_worker_set(node: Node) -> dict[str, str]:
    return {"LWS_LEADER_ADDRESS": ADDRESSES[0], "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": str(node.idx)}


@pytest.mark.parametrize("variables", [_srun, pytest.param(_leader_worker_set, marks=pytest.mark.slow)])
def test_ranks_of_srun_and_of_a_leader_worker_set_meet_across_nodes(
    variables: Callable[[Node], dict[str, str]], tmp_path: Path
) -> None:
    lines = [json.dumps({"prompt": prompt, **PARAMS}) for prompt in PROMPTS]
    (tmp_path / "prompts").write_text("\n".join(lines))
    command = [sys.executable, "-m", "moe_runtime.generate", "--device", "cpu"]
    command += ["--input", str(tmp_path / "prompts"), "--output", str(tmp_path / "results")]
    with two_nodes(tmp_path) as nodes:
        processes = [node.start(*command, **variables(node)) for node in nodes]
        texts = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(texts)
    results = [json.loads(line)["choices"][0] for line in (tmp_path / "results").read_text().splitlines()]
    found = [(choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]]) for choice in results]
    assert found == _offline(LLM())


@pytest.mark.slow
def test_the_check_has_one_digest_on_two_nodes_and_on_one(tmp_path: Path) -> None:
    arguments = ("--device", "cpu", "--num-prompts", "8", "--max-tokens", "8", "--axes", "again")
    alone, spread = tmp_path / "alone.json", tmp_path / "spread.json"
    command = [sys.executable, "-m", "moe_runtime.check", *arguments, "--json", str(alone)]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    with two_nodes(tmp_path) as nodes:
        module = ("-m", "moe_runtime.check", *arguments, "--json", str(spread))
        processes = [node.torchrun(4, *module) for node in nodes]
        texts = [process.communicate(timeout=250)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], "\n".join(texts)
    assert json.loads(spread.read_text())["digest"] == json.loads(alone.read_text())["digest"]
