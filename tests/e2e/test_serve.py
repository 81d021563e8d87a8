"""The server as users start it: torchrun, HTTP, eight ranks."""

from __future__ import annotations

import concurrent.futures
import json
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest

from moe_runtime.engine.llm import LLM
from moe_runtime.engine.request import SamplingParams
from tests.rank_programs import run_to_end
from tests.servers import RunningServer, running_server

pytestmark = pytest.mark.xdist_group("servers")

PROMPT = "HAMLET\nWhat a piece of work is"
BODY = {"prompt": PROMPT, "max_tokens": 24, "seed": 7, "logprobs": 5, "temperature": 0.9}


def _answer(response: dict[str, object]) -> str:
    """Everything of a completion that must not depend on company."""
    return json.dumps([response["choices"], response["usage"]])


def test_http_and_offline_give_the_same_bits(server: RunningServer) -> None:
    choice = server.complete(**BODY, return_token_ids=True)["choices"][0]
    params = SamplingParams(max_tokens=24, seed=7, logprobs=5, temperature=0.9, top_p=0.95)
    [offline] = LLM().generate([PROMPT], params)
    assert tuple(choice["token_ids"]) == offline.outputs[0].token_ids
    assert choice["text"] == offline.outputs[0].text
    entries = offline.outputs[0].logprobs
    assert entries is not None
    assert choice["logprobs"]["token_logprobs"] == [entry.logprob for entry in entries]


def test_rules_give_the_same_bits_over_http_and_offline_and_beside_other_requests(
    server: RunningServer,
) -> None:
    rules = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25, "min_tokens": 20}
    words = {"bad_words": ["love", "what"], "stop_token_ids": [5, 6, 7]}
    body = {**BODY, **rules, **words, "logit_bias": {"40": 2.5, "41": -100}, "return_token_ids": True}
    alone = server.complete(**body)
    params = SamplingParams(
        max_tokens=24, seed=7, logprobs=5, temperature=0.9, top_p=0.95, **rules,
        bad_words=("love", "what"), stop_token_ids=(5, 6, 7), logit_bias={40: 2.5, 41: -100.0},
    )  # fmt: skip
    [offline] = LLM().generate([PROMPT], params)
    [choice] = alone["choices"]
    assert tuple(choice["token_ids"]) == offline.outputs[0].token_ids
    assert choice["logprobs"]["token_logprobs"] == [e.logprob for e in offline.outputs[0].logprobs or ()]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        others = [pool.submit(server.complete, **{**BODY, "seed": i}) for i in range(6)]
        assert _answer(server.complete(**body)) == _answer(alone)
        plain = server.complete(**BODY, return_token_ids=True)["choices"][0]
        assert all(other.result() for other in others)
    assert plain["token_ids"] != choice["token_ids"]


def test_http_and_offline_share_the_checkpoint_s_defaults(server: RunningServer) -> None:
    choice = server.complete(prompt=PROMPT, max_tokens=40, seed=9, return_token_ids=True)["choices"][0]
    llm = LLM()
    params = replace(llm.default_sampling_params(), max_tokens=40, seed=9)
    assert tuple(choice["token_ids"]) == llm.generate([PROMPT], params)[0].outputs[0].token_ids


def test_an_answer_does_not_depend_on_the_load(server: RunningServer) -> None:
    alone = _answer(server.complete(**BODY))
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        others = [
            pool.submit(server.complete, prompt="O " * (3 * i + 1), max_tokens=5 + i, ignore_eos=True)
            for i in range(16)
        ]
        targets = [pool.submit(server.complete, **BODY) for _ in range(8)]
        assert {_answer(target.result()) for target in targets} == {alone}
        for i, other in enumerate(others):
            assert other.result()["usage"]["completion_tokens"] == 5 + i


def test_the_openai_client_works_unmodified(server: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "Speak of love"}]
    whole = client.chat.completions.create(
        model="builtin", messages=messages, seed=3, max_tokens=16, temperature=0.5
    )
    stream = client.chat.completions.create(
        model="builtin", messages=messages, seed=3, max_tokens=16, temperature=0.5, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [model.id for model in client.models.list()] == ["builtin"]


def test_server_info_names_the_transport_and_why(server: RunningServer) -> None:
    info = server.info()
    alone = info["world_size"] == 1
    assert info["dispatcher"] == ("collective" if alone else "symmetric")
    assert info["dispatcher_reason"] == (
        "one rank: nothing travels" if alone else "all ranks share a host's memory"
    )
    assert (info["tp_transport"], info["tp_transport_reason"]) == ("collective", "one rank: nothing travels")


def test_server_info_says_whether_steps_overlap_and_why(server: RunningServer) -> None:
    info = httpx.get(f"{server.url}/server_info").json()
    assert (info["overlap"], info["overlap_reason"]) == (False, "on the CPU host and step share the cores")


def test_multiple_reduction_is_off_at_level_topology_and_on_at_level_batch(server: RunningServer) -> None:
    info = server.info()
    off = "level topology adds every slot at the home rank"
    assert (info["multiple_reduction"], info["multiple_reduction_reason"]) == (False, off)
    assert server.text.count(f"multiple_reduction off: {off}") == 1
    on = f"level batch with one fixed placement on {info['world_size']} EP ranks"
    with running_server(info["world_size"], "--invariance", "batch") as batch:
        found = batch.info()
        assert (found["multiple_reduction"], found["multiple_reduction_reason"]) == (True, on)
        assert batch.text.count(f"multiple_reduction on: {on}") == 1
        assert found["system_fingerprint"] != info["system_fingerprint"]
        alone = _answer(batch.complete(**BODY))
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            answers = pool.map(lambda _: _answer(batch.complete(**BODY)), range(8))
            assert set(answers) == {alone}


def test_a_client_that_leaves_frees_its_request(server: RunningServer) -> None:
    body = {"model": "builtin", "prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        next(response.iter_lines())
    _wait_until_idle(server)


def _wait_until_idle(server: RunningServer) -> None:
    for _ in range(100):
        stats = [rank["stats"] for rank in server.info()["ranks"]]
        if all(s["num_running"] == s["num_waiting"] == 0 for s in stats):
            break
        time.sleep(0.1)
    assert all(s["num_free_kv_blocks"] == s["num_kv_blocks"] for s in stats)


def test_idle_ranks_do_not_step(server: RunningServer) -> None:
    server.complete(prompt="x", max_tokens=2)
    time.sleep(1.5)
    before = [rank["stats"]["num_steps"] for rank in server.info()["ranks"]]
    time.sleep(1.5)
    assert [rank["stats"]["num_steps"] for rank in server.info()["ranks"]] == before


def test_groups_of_two_serve_the_same_bits_free_what_is_left_and_drain(server: RunningServer) -> None:
    expected = _answer(server.complete(**BODY))
    with running_server(4, "--tp", "2") as grouped, concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(grouped.complete, **BODY) for _ in range(8)]
        assert {_answer(answer.result()) for answer in answers} == {expected}
        info = grouped.info()
        assert (info["tp"], info["ep_size"], info["world_size"]) == (2, 4, 4)
        assert info["system_fingerprint"] == server.info()["system_fingerprint"]
        assert [rank["info"]["tp_rank"] for rank in info["ranks"]] == [0, 1, 0, 1]
        served = [rank["stats"]["num_generation_tokens"] for rank in info["ranks"]]
        assert served == [4 * 24, 0, 4 * 24, 0]
        body = {"model": "builtin", "prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{grouped.url}/v1/completions", json=body, timeout=60) as response:
            next(response.iter_lines())
        _wait_until_idle(grouped)
        time.sleep(1.5)
        before = [rank["stats"]["num_steps"] for rank in grouped.info()["ranks"]]
        time.sleep(2.5)
        after = grouped.info()["ranks"]
        assert [rank["stats"]["num_steps"] for rank in after] == before, "idle ranks do not step"
        assert all(rank["last_seen_s"] < 2 for rank in after), "followers send heartbeats too"
        running = pool.submit(grouped.complete, prompt="x", max_tokens=100, ignore_eos=True)
        while not any(rank["stats"]["num_running"] for rank in grouped.info()["ranks"]):
            time.sleep(0.05)
        grouped.signal_rank(0, signal.SIGTERM)
        assert running.result()["usage"]["completion_tokens"] == 100
        assert grouped.wait_exit() == 0


@pytest.mark.slow
def test_a_killed_follower_ends_the_gang() -> None:
    with running_server(2, "--tp", "2") as server:
        server.signal_rank(1, signal.SIGKILL)
        assert server.wait_exit(30) != 0


def test_sigterm_to_rank_0_drains_and_all_exit_0() -> None:
    with running_server(2) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.complete, prompt="x", max_tokens=100, ignore_eos=True)
        while not any(rank["stats"]["num_running"] for rank in server.info()["ranks"]):
            time.sleep(0.05)
        server.signal_rank(0, signal.SIGTERM)
        assert running.result()["usage"]["completion_tokens"] == 100
        assert server.wait_exit() == 0


def test_one_process_drains_and_exits_0() -> None:
    with running_server(1) as server:
        server.complete(prompt="x", max_tokens=1)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0


def test_ranks_do_not_outlive_the_process_that_started_them() -> None:
    with running_server(2) as server:
        pids = [rank["pid"] for rank in server.info()["ranks"]]
        server.process.kill()
        end_s = time.monotonic() + 10
        while any(_is_running(pid) for pid in pids) and time.monotonic() < end_s:
            time.sleep(0.1)
        assert not any(_is_running(pid) for pid in pids)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_port_in_use_is_told_before_anything_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "moe_runtime.serve", "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in done.stderr
    assert "self-check" not in done.stderr


def test_more_kv_blocks_than_memory_are_told_before_anything_is_loaded() -> None:
    command = [sys.executable, "-m", "moe_runtime.serve", "--port", "0", "--device", "cpu"]
    command += ["--kv-cache-blocks", str(10**9)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3, done.stderr
    assert "the model does not fit: the ranks of this host need" in done.stderr
    assert "lower kv_cache_blocks" in done.stderr
    assert "self-check" not in done.stderr


def _two_ranks(folder: Path, on_rank_1: str) -> subprocess.CompletedProcess[str]:
    """Two ranks to their end, one variable set on rank 1 alone."""
    script = folder / "rank.sh"
    script.write_text(
        f'#!/bin/sh\nif [ "$RANK" = 1 ]; then export {on_rank_1}; fi\n'
        f"exec {sys.executable} -m moe_runtime.serve --port 0 --device cpu\n"
    )
    script.chmod(0o755)
    return run_to_end(2, "--no-python", str(script), timeout_s=120)


def test_ranks_with_other_flags_do_not_start(tmp_path: Path) -> None:
    done = _two_ranks(tmp_path, "MOE_RUNTIME_MAX_NUM_SEQS=9")
    assert done.returncode != 0
    assert done.stderr.count("started with other flags or another checkpoint") == 1
    assert "rank 1 was started with other flags or another checkpoint than rank 0" in done.stderr
    assert "max_num_seqs=9" in done.stderr
    assert "self-check" not in done.stderr


def test_a_fault_of_rank_1_alone_is_told(tmp_path: Path) -> None:
    done = _two_ranks(tmp_path, "MOE_RUNTIME_PORT=100000")
    assert done.returncode != 0
    assert "[rank 1] error: port (100000) must be in [0, 65535]\n" in done.stderr


def test_the_readme_command_serves_the_same_bits_on_eight_ranks(server: RunningServer) -> None:
    expected = _answer(server.complete(**BODY))
    with running_server(8) as eight:
        assert {_answer(eight.complete(**BODY)) for _ in range(3)} == {expected}
        assert len(eight.info()["ranks"]) == 8
