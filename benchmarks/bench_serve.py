"""The server as ``make serve`` starts it: seconds to ready, resident memory, single-stream tokens per second.

    python benchmarks/bench_serve.py --ranks 8 --output benchmarks/results/serve_cpu.json

Starts torchrun on loopback with the built-in model, measures, and ends it. Memory is the sum over torchrun, all ranks
and the front end: RSS counts shared pages once per process, PSS shares them out.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from rank_processes import RANK_ENVIRONMENT, descendants, torchrun

PROMPT = "KING RICHARD\nNow is the winter"


def main() -> None:
    """Measure once and print; write JSON where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--port", type=int, default=8017)
    parser.add_argument("--num-tokens", type=int, default=200)
    parser.add_argument("--dispatcher", default="auto")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    url = f"http://127.0.0.1:{options.port}"
    flags = ["--port", str(options.port), "--dispatcher", options.dispatcher]
    start_s = time.monotonic()
    server = subprocess.Popen(
        torchrun(options.ranks, "-m", "moe_runtime.serve", *flags),
        env=os.environ | RANK_ENVIRONMENT,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_ready(url)
        ready_s = time.monotonic() - start_s
        _complete(url, 8)
        rates = [options.num_tokens / _complete(url, options.num_tokens) for _ in range(3)]
        pids = list(descendants(server.pid))
        result = {
            "ranks": options.ranks,
            "cores": os.cpu_count(),
            "load_average_1_min": os.getloadavg()[0],
            "ready_s": round(ready_s, 1),
            "single_stream_tokens_per_s": round(statistics.median(rates), 1),
            "rss_gib": round(sum(_memory_kib(pid, "Rss") for pid in pids) / 2**20, 2),
            "pss_gib": round(sum(_memory_kib(pid, "Pss") for pid in pids) / 2**20, 2),
            "num_processes": len(pids),
        }
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    print(json.dumps(result, indent=1))
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


def _wait_ready(url: str, timeout_s: float = 180.0) -> None:
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        try:
            with urllib.request.urlopen(f"{url}/health/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise SystemExit(f"not ready after {timeout_s:.0f} s")


def _complete(url: str, num_tokens: int) -> float:
    """Seconds that one greedy completion takes."""
    body: dict[str, Any] = {"model": "builtin", "prompt": PROMPT, "max_tokens": num_tokens}
    body |= {"temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    start_s = time.monotonic()
    with urllib.request.urlopen(request, timeout=300) as response:
        answer = json.loads(response.read())
    assert answer["usage"]["completion_tokens"] == num_tokens, "the server generated another number of tokens"
    return time.monotonic() - start_s


def _memory_kib(pid: int, what: str) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1])
    return 0


if __name__ == "__main__":
    main()
