"""Processes that die or hang while requests are open, and what clients, operators and torchrun are told."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.rank_programs import run_to_end
from tests.servers import RunningServer, running_server

pytestmark = pytest.mark.xdist_group("servers")

KEY = "sk-secret-of-the-test"
PROMPT = "A prompt that no log may hold"
BODY = {"model": "builtin", "prompt": PROMPT, "max_tokens": 12, "seed": 7, "logprobs": 5}
LONG = {"model": "builtin", "prompt": PROMPT, "max_tokens": 900, "ignore_eos": True}
GONE_LIMIT_S = 10.0
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


@contextlib.contextmanager
def open_requests(
    server: RunningServer, **headers: str
) -> Iterator[list[concurrent.futures.Future[tuple[int, str]]]]:
    """A plain request and a stream per rank, all of which run; gives their (status, text)."""

    def plain() -> tuple[int, str]:
        response = httpx.post(f"{server.url}/v1/completions", json=LONG, headers=headers, timeout=60)
        return response.status_code, response.text

    def stream() -> tuple[int, str]:
        body = {**LONG, "stream": True}
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=body, headers=headers, timeout=60
        ) as response:
            return response.status_code, response.read().decode()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(kind) for kind in (plain, stream, plain, stream)]
        while sum(rank["stats"]["num_generation_tokens"] > 2 for rank in _info(server, headers)["ranks"]) < 2:
            time.sleep(0.05)
        yield futures


def _info(server: RunningServer, headers: dict[str, str]) -> dict[str, Any]:
    result: dict[str, Any] = httpx.get(f"{server.url}/server_info", headers=headers).json()
    return result


def _all_were_told(futures: list[concurrent.futures.Future[tuple[int, str]]], reason: str) -> None:
    for future in futures:
        status, text = future.result()
        assert reason in text, text
        assert '"code":"engine_dead"' in text
        assert "[DONE]" not in text
        assert status in (200, 503)
    assert futures[0].result()[0] == futures[2].result()[0] == 503


def _ends(server: RunningServer, pids: list[int], since_s: float) -> None:
    """Everything is gone in time, and not with 0."""
    assert server.wait_exit(30) != 0
    assert not any(_is_running(pid) for pid in pids)
    assert time.monotonic() - since_s < GONE_LIMIT_S


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _pids(server: RunningServer, headers: dict[str, str]) -> list[int]:
    """Ranks, and the front end."""
    ranks = [rank["pid"] for rank in _info(server, headers)["ranks"]]
    children = Path(f"/proc/{ranks[0]}/task/{ranks[0]}/children").read_text().split()
    assert len(children) == 1, "rank 0 has one child, the front end"
    return [*ranks, int(children[0])]


def _probe_in_vain(server: RunningServer, duration_s: float, headers: dict[str, str]) -> None:
    """Five requests a second, from a client that gives each 0.2 s, to a server whose step stands still."""
    end_s = time.monotonic() + duration_s
    while time.monotonic() < end_s:
        with contextlib.suppress(httpx.ReadTimeout):
            answer = httpx.post(f"{server.url}/v1/completions", json=BODY, headers=headers, timeout=0.2)
            raise AssertionError(f"answered: {answer.status_code} {answer.text}")


def _only_these_are_open(server: RunningServer, num_requests: int, headers: dict[str, str]) -> None:
    """Nothing is left of requests whose clients have gone."""
    end_s = time.monotonic() + 30
    while True:
        ranks = [rank["stats"] for rank in _info(server, headers)["ranks"]]
        num_open = sum(stats["num_running"] + stats["num_waiting"] for stats in ranks)
        if num_open == num_requests:
            return
        assert time.monotonic() < end_s, f"{num_open} requests are open, not {num_requests}"
        time.sleep(0.05)


def _listening(pid: int) -> set[str]:
    """Addresses, in the kernel's notation, at which a process listens for TCP."""
    links = (Path(f"/proc/{pid}/fd") / name for name in os.listdir(f"/proc/{pid}/fd"))
    inodes = set()
    for link in links:
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(link).removeprefix("socket:[").rstrip("]"))
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


def test_a_pause_is_no_fault_and_a_kill_is_told_in_json_without_secrets(tmp_path: Path) -> None:
    error_file = tmp_path / "error.json"
    flags = ["--log-format", "json", "--slow-step-s", "0.5", "--api-key", KEY]
    environment = {"TORCHELASTIC_ERROR_FILE": str(error_file)}
    headers = {"Authorization": f"Bearer {KEY}"}
    shared = set(Path("/dev/shm").iterdir())
    with running_server(2, *flags, env=environment) as server:
        before = httpx.post(f"{server.url}/v1/completions", json=BODY, headers=headers, timeout=60).json()
        pids = _pids(server, headers)
        assert set().union(*map(_listening, pids)) <= LOOPBACK
        assert _listening(pids[2]), "the front end listens"
        with open_requests(server, **headers) as futures:
            os.kill(pids[1], signal.SIGSTOP)
            _probe_in_vain(server, 1.8, headers)
            assert httpx.get(f"{server.url}/health/live").status_code == 200
            os.kill(pids[1], signal.SIGCONT)
            _only_these_are_open(server, 4, headers)
            after = httpx.post(f"{server.url}/v1/completions", json=BODY, headers=headers, timeout=60).json()
            assert [before["choices"], before["usage"]] == [after["choices"], after["usage"]]
            metrics = httpx.get(f"{server.url}/metrics", headers=headers).text
            assert "moe_runtime_slow_steps_total 0.0" not in metrics
            os.kill(pids[1], signal.SIGKILL)
            kill_s = time.monotonic()
            _all_were_told(futures, f"rank 1 (pid {pids[1]}) has gone without a word")
        _ends(server, pids, kill_s)
        lines = [json.loads(line) for line in server.log if line.startswith("{")]
        text = server.text
    slow = next(line for line in lines if "has taken longer than 0.5 s" in line["message"])
    assert "rank 0 is " in slow["message"]
    assert "rank 1 is " in slow["message"]
    assert "sequences" in slow["message"]
    assert {line["rank"] for line in lines} == {0, None}
    assert {line["process"] for line in lines} == {"rank", "front-end"}
    assert any(line["logger"] == "uvicorn.error" for line in lines)
    assert KEY not in text
    assert PROMPT not in text
    assert f"rank 1 (pid {pids[1]})" in json.loads(error_file.read_text())["message"]["message"]
    assert set(Path("/dev/shm").iterdir()) <= shared


@pytest.mark.slow  # the ordinary suite has it with a shorter pause
def test_probes_of_a_server_that_stands_still_for_a_minute_leave_nothing_behind() -> None:
    with running_server(2, "--heartbeat-timeout-s", "120", "--step-timeout-s", "120") as server:
        before = server.complete(**BODY)
        rank = server.info()["ranks"][1]["pid"]
        os.kill(rank, signal.SIGSTOP)
        _probe_in_vain(server, 60.0, {})
        os.kill(rank, signal.SIGCONT)
        _only_these_are_open(server, 0, {})
        assert server.complete(**BODY)["choices"] == before["choices"]


def test_a_rank_that_is_stopped_is_ended_and_named(tmp_path: Path) -> None:
    error_file = tmp_path / "error.json"
    environment = {"TORCHELASTIC_ERROR_FILE": str(error_file)}
    with running_server(2, "--heartbeat-timeout-s", "3", env=environment) as server:
        pids = _pids(server, {})
        with open_requests(server) as futures:
            os.kill(pids[1], signal.SIGSTOP)
            stop_s = time.monotonic()
            _all_were_told(futures, f"rank 1 (pid {pids[1]}) hangs: no sign of life in")
        _ends(server, pids, stop_s)
    assert f"rank 1 (pid {pids[1]})" in json.loads(error_file.read_text())["message"]["message"]


def test_an_exception_of_a_rank_reaches_clients_and_its_traceback_the_log() -> None:
    script = str(Path(__file__).with_name("failing_rank.py"))
    environment = {"FAILING_RANK": "1", "FAIL_AFTER_TOKENS": "30", "FAILURE": "raise"}
    with running_server(2, script=script, env=environment) as server:
        pids = _pids(server, {})
        with open_requests(server) as futures:
            start_s = time.monotonic()
            reason = f"rank 1 (pid {pids[1]}) failed: InjectedError: after "
            _all_were_told(futures, reason)
        _ends(server, pids, start_s)
        assert "in fail_in_step" in server.text
        assert "Root Cause (first observed failure):" in server.text
        assert "rank      : 1 " in server.text.rpartition("Root Cause")[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "flags", "reason"),
    [
        ("hold", ["--heartbeat-timeout-s", "3"], "no sign of life in "),
        ("stuck", ["--step-timeout-s", "2"], "over step_timeout_s; it is "),
        ("stuck-thread", ["--step-timeout-s", "2", "--overlap", "on"], "over step_timeout_s; it is "),
    ],
)
def test_a_rank_that_is_stuck_in_native_code_is_ended_and_named(
    failure: str, flags: list[str], reason: str
) -> None:
    script = str(Path(__file__).with_name("failing_rank.py"))
    environment = {"FAILING_RANK": "1", "FAIL_AFTER_TOKENS": "30", "FAILURE": failure}
    with running_server(2, *flags, script=script, env=environment) as server:
        pids = _pids(server, {})
        with open_requests(server) as futures:
            start_s = time.monotonic()
            _all_were_told(futures, f"rank 1 (pid {pids[1]}) hangs: ")
            assert reason in futures[0].result()[1]
        _ends(server, pids, start_s)


@pytest.mark.slow  # the ordinary suite has it in tests/launch/test_rank_watch.py
def test_a_stopped_front_end_is_ended_with_all_ranks() -> None:
    with running_server(2, "--heartbeat-timeout-s", "3") as server:
        pids = _pids(server, {})
        os.kill(pids[2], signal.SIGSTOP)
        stop_s = time.monotonic()
        _ends(server, pids, stop_s)
        assert "the front end hangs: no sign of life in" in server.text


def test_sigterm_to_torchrun_drains() -> None:
    with running_server(2) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.complete, prompt="x", max_tokens=100, ignore_eos=True)
        while not any(rank["stats"]["num_running"] for rank in server.info()["ranks"]):
            time.sleep(0.05)
        server.process.send_signal(signal.SIGTERM)
        assert running.result()["usage"]["completion_tokens"] == 100
        server.wait_exit()  # with torchrun's own code, 1, and its traceback of the signal
        assert "SIGTERM: draining" in server.text
        assert "rank 0 ends" not in server.text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "100000"], "port (100000) must be in [0, 65535]"),
        pytest.param(
            ["--port", "0", "--tp", "3"], "world_size (2) must be divisible by tp (3)", marks=pytest.mark.slow
        ),
        pytest.param(
            ["--port", "0", "--model", "/nonexistent"],
            "model ('/nonexistent') is neither",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_all_ranks_find_wrong_is_said_once(flags: list[str], message: str) -> None:
    done = run_to_end(2, "-m", "moe_runtime.serve", *flags, "--device", "cpu", timeout_s=60)
    before_report = done.stderr.partition("ChildFailedError")[0]
    assert before_report.count(message) == 1, before_report
    assert "exitcode  : 2 " in done.stderr
