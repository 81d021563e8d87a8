"""Kills or stops each process of a server under load, again and again, and says what became of everything.

    python tools/kill_server.py                                   # SIGKILL, 20 times each, world 2
    python tools/kill_server.py --rounds 3 --signal stop --target rank0 rank1 front-end

A round: start a server, wait until it is ready, take a probe request's digest, put load on it, send the signal to one
process, and then look: when readiness turns false, what the open requests are told, when all processes have gone, the
exit code, the port, /dev/shm, and torchrun's error file. Every start must give the same digest.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from rank_processes import RANK_ENVIRONMENT, descendants, is_alive, torchrun

TARGETS = ("rank0", "rank1", "front-end", "launcher")
READY_LIMIT_S = 15.0
GONE_LIMIT_S = 10.0
PROBE = {"prompt": "HAMLET\nWhat a piece of work is", "max_tokens": 24, "seed": 7, "logprobs": 5}
NUM_STREAMS, NUM_PLAIN = 4, 4


def main() -> int:
    """Run the rounds, print a table, and write JSON. Returns 1 if anything was not as it must be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--signal", choices=("kill", "stop"), default="kill")
    parser.add_argument(
        "--target", nargs="+", choices=TARGETS, help="by default all that the signal makes sense for"
    )
    parser.add_argument("--output", type=Path, help="JSON file for all rounds")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("flags", nargs="*", help="of moe_runtime.serve, after --")
    args = parser.parse_args()
    # A launcher that is stopped disturbs nobody: ranks serve on without it.
    targets = args.target or [t for t in TARGETS if args.signal == "kill" or t != "launcher"]
    rounds = []
    for target in targets:
        for number in range(args.rounds):
            outcome = run_round(args.world, target, args.signal, ["--device", args.device, *args.flags])
            rounds.append(outcome)
            state = "; ".join(outcome["faults"]) or "as it must be"
            print(
                f"{args.signal} {target} {number + 1}/{args.rounds}: gone in {outcome['gone_s']:.2f} s, {state}",
                flush=True,
            )
    digests = {outcome["digest"] for outcome in rounds}
    print_table(rounds, targets)
    print(f"digests of the probe: {len(digests)} different in {len(rounds)} starts")
    if args.output is not None:
        args.output.write_text(
            json.dumps({"signal": args.signal, "world": args.world, "rounds": rounds}, indent=1)
        )
    return int(any(outcome["faults"] for outcome in rounds) or len(digests) != 1)


def run_round(world: int, target: str, signal_name: str, flags: list[str]) -> dict[str, Any]:
    """One start, one signal."""
    shared_before = shared_files()
    with tempfile.TemporaryDirectory(prefix="kill-server-") as folder:
        server = Server(world, flags, Path(folder))
        try:
            outcome = server.run(target, signal.SIGKILL if signal_name == "kill" else signal.SIGSTOP)
        finally:
            server.end()
    left = sorted(shared_files() - shared_before)
    outcome |= {"target": target, "signal": signal_name, "shared_files_left": left}
    outcome["faults"] += [f"left {', '.join(left)}"] if left else []
    return outcome


class Server:
    """A server process group, its load, and what was seen of both."""

    def __init__(self, world: int, flags: list[str], folder: Path) -> None:
        self.log_file, self.error_file = folder / "log", folder / "error.json"
        command = torchrun(world, "-m", "moe_runtime.serve", "--port", "0", *flags)
        self.world = world
        environment = os.environ | RANK_ENVIRONMENT
        environment["TORCHELASTIC_ERROR_FILE"] = str(self.error_file)
        self.start_s = time.monotonic()
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(command, stderr=log, env=environment, start_new_session=True)
        self.url = ""
        self.processes: dict[int, str] = {}

    def run(self, target: str, signum: signal.Signals) -> dict[str, Any]:
        """Everything from ready to gone."""
        ready_s = self._wait_ready()
        digest = self._digest()
        ranks = [rank["pid"] for rank in httpx.get(f"{self.url}/server_info").json()["ranks"]]
        self.processes = descendants(self.process.pid)
        front_end = next(pid for pid, command in self.processes.items() if "moe_runtime.server" in command)
        pids = {"launcher": self.process.pid, "front-end": front_end}
        pids |= {f"rank{rank}": pid for rank, pid in enumerate(ranks)}
        known = set(pids.values())
        others = {pid: command for pid, command in self.processes.items() if pid not in known}
        load = Load(self.url)
        load.wait_running()
        os.kill(pids[target], signum)
        kill_s = time.monotonic()
        unready_s = wait_for(lambda: not self._is_ready(), kill_s, 40.0)
        answered_s = load.wait_ended(kill_s, 40.0)
        gone_s = wait_for(self._has_gone, kill_s, 60.0)
        code = self.process.poll()
        port_is_free = self._port_is_free()
        error = json.loads(self.error_file.read_text()) if self.error_file.exists() else None
        message = "" if error is None else str(error["message"]["message"])
        faults = load.faults(may_break=target == "front-end")
        checks = {
            f"start took {ready_s:.1f} s": ready_s <= READY_LIMIT_S,
            f"readiness turned false after {unready_s:.1f} s": unready_s <= GONE_LIMIT_S,
            f"all gone after {gone_s:.1f} s": gone_s <= GONE_LIMIT_S,
            f"exit code {code}": code not in (0, None),
            "port not free": port_is_free,
        }
        faults += [name for name, is_well in checks.items() if not is_well]
        if target.startswith("rank") and f"rank {target[4:]} " not in message:
            faults.append(f"torchrun's error file says {message!r}")
        return {
            "ready_s": ready_s,
            "unready_s": unready_s,
            "answered_s": answered_s,
            "gone_s": gone_s,
            "exit_code": code,
            "digest": digest,
            "error_file": message,
            "answers": load.counts(),
            "example": load.example(),
            "other_processes": others,
            "faults": faults,
            "log": self.log_file.read_text(errors="replace")[-4000:] if faults else "",
        }

    def end(self) -> None:
        """Whatever is left."""
        for pid, command in {self.process.pid: "", **self.processes}.items():
            if not command or is_alive(pid, command):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def _wait_ready(self) -> float:
        marker = "serving on "
        while time.monotonic() - self.start_s < 120:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended:\n{self.log_file.read_text()}")
            text = self.log_file.read_text(errors="replace")
            if marker in text:
                self.url = text.partition(marker)[2].split()[0].rstrip('",}')
                if self._is_ready():
                    return time.monotonic() - self.start_s
            time.sleep(0.05)
        raise RuntimeError(f"not ready in 120 s:\n{self.log_file.read_text()}")

    def _has_gone(self) -> bool:
        return self.process.poll() is not None and not any(is_alive(p, c) for p, c in self.processes.items())

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health/ready", timeout=1.0).status_code == 200
        except httpx.HTTPError:
            return False

    def _digest(self) -> str:
        response = httpx.post(f"{self.url}/v1/completions", json={"model": "builtin", **PROBE}, timeout=60)
        answer = response.raise_for_status().json()
        return hashlib.sha256(json.dumps([answer["choices"], answer["usage"]]).encode()).hexdigest()

    def _port_is_free(self) -> bool:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", int(self.url.rpartition(":")[2])))
            except OSError:
                return False
        return True


class Load:
    """Requests that are open when the signal comes, streams and plain ones."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: list[tuple[str, str]] = []
        self.is_streaming = [threading.Event() for _ in range(NUM_STREAMS)]
        self.threads = [
            threading.Thread(target=self._stream, args=(i,), daemon=True) for i in range(NUM_STREAMS)
        ]
        self.threads += [threading.Thread(target=self._plain, daemon=True) for _ in range(NUM_PLAIN)]
        for thread in self.threads:
            thread.start()

    def wait_running(self) -> None:
        """Until every stream has brought something."""
        for event in self.is_streaming:
            if not event.wait(60):
                raise RuntimeError("a stream has not started in 60 s")

    def wait_ended(self, since_s: float, limit_s: float) -> float:
        """Until every request has been answered or broken off."""
        return wait_for(lambda: not any(thread.is_alive() for thread in self.threads), since_s, limit_s)

    def counts(self) -> dict[str, int]:
        """How requests ended."""
        kinds = [kind for kind, _ in self.answers]
        return {kind: kinds.count(kind) for kind in sorted(set(kinds))}

    def example(self) -> str:
        """What one of them was told."""
        return next((text for _, text in self.answers if text), "")

    def faults(self, *, may_break: bool) -> list[str]:
        """Requests that were left without an answer. A front end that has gone can give none."""
        allowed = {"503", "stream error"} | ({"broken"} if may_break else set())
        found = [f"a request ended as {kind} {text}" for kind, text in self.answers if kind not in allowed]
        if len(self.answers) < len(self.threads):
            found.append(f"{len(self.threads) - len(self.answers)} requests hang")
        return found

    def _body(self, **more: Any) -> dict[str, Any]:
        return {"model": "builtin", "prompt": "x", "max_tokens": 900, "ignore_eos": True, **more}

    def _stream(self, number: int) -> None:
        text = ""
        try:
            with httpx.stream(
                "POST", f"{self.url}/v1/completions", json=self._body(stream=True), timeout=90
            ) as response:
                for line in response.iter_lines():
                    self.is_streaming[number].set()
                    text = line or text
        except httpx.HTTPError as error:
            self.answers.append(("broken", repr(error)))
            return
        kind = "stream error" if '"error"' in text else "stream end"
        self.answers.append((kind, text.removeprefix("data: ")))

    def _plain(self) -> None:
        try:
            response = httpx.post(f"{self.url}/v1/completions", json=self._body(), timeout=90)
        except httpx.HTTPError as error:
            self.answers.append(("broken", repr(error)))
            return
        self.answers.append((str(response.status_code), response.text if response.status_code != 200 else ""))


def print_table(rounds: list[dict[str, Any]], targets: list[str]) -> None:
    """A line per target: medians and largest values of the times, in seconds."""
    names = ("ready_s", "unready_s", "answered_s", "gone_s")
    print(
        f"\n{'target':10} {'rounds':>6} {'failed':>6} "
        + " ".join(f"{n + ' med/max':>19}" for n in names)
        + "  exit codes"
    )
    for target in targets:
        of_target = [outcome for outcome in rounds if outcome["target"] == target]
        cells = []
        for name in names:
            values = [outcome[name] for outcome in of_target]
            cells.append(f"{statistics.median(values):.2f} / {max(values):.2f}")
        failed = sum(bool(outcome["faults"]) for outcome in of_target)
        codes = sorted({str(outcome["exit_code"]) for outcome in of_target})
        print(
            f"{target:10} {len(of_target):6} {failed:6} "
            + " ".join(f"{c:>19}" for c in cells)
            + f"  {', '.join(codes)}"
        )


def wait_for(condition: Callable[[], bool], since_s: float, limit_s: float) -> float:
    """Seconds from ``since_s`` until the condition holds, or until the limit."""
    while not condition() and time.monotonic() - since_s < limit_s:
        time.sleep(0.02)
    return time.monotonic() - since_s


def shared_files() -> set[str]:
    """What could be left behind by name."""
    return {str(path) for path in [*Path("/dev/shm").glob("*"), *Path("/tmp").glob("moe-runtime-*")]}


if __name__ == "__main__":
    sys.exit(main())
