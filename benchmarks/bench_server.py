"""The server under load: requests per second, times to tokens, and what a streamed token costs the front end.

    python benchmarks/bench_server.py --ranks 2 8 --output benchmarks/results/server_cpu.json

Starts the server with the built-in model, and for each number of streams keeps so many open at once: as one ends the
next begins. Times are the client's, on the machine whose cores all processes share; compare numbers of one run only.
TTFT: from the request to its first event. ITL: between events of a stream. Front-end CPU is that of its process over
the streamed tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

from load_client import LoadClient, Reply
from load_server import LoadServer, cpu_s, load_server

PROMPT = "KING RICHARD\nNow is the winter of our discontent, my lord of "
NUM_TOKENS = 48


async def measure(server: LoadServer, num_streams: int, num_requests: int) -> dict[str, Any]:
    """One load."""
    client = LoadClient(server.url)
    front_end = server.pids()["front end"]
    waiting = iter(range(num_requests))
    replies: list[Reply] = []

    async def stream() -> None:
        for index in waiting:
            body = {"model": "builtin", "prompt": f"{PROMPT}{index}", "max_tokens": NUM_TOKENS, "seed": index}
            body |= {"stream": True, "ignore_eos": True}
            replies.append(await client.post("/v1/completions", body))

    start_s, start_cpu_s = time.monotonic(), cpu_s(front_end)
    await asyncio.gather(*(stream() for _ in range(num_streams)))
    wall_s, front_end_s = time.monotonic() - start_s, cpu_s(front_end) - start_cpu_s
    assert all(reply.is_complete for reply in replies), "a stream has no end"
    first_s = sorted(reply.first_s for reply in replies)
    gaps_s = sorted(gap_s for reply in replies for gap_s in reply.gaps_s)
    num_tokens = num_requests * NUM_TOKENS
    return {
        "streams": num_streams,
        "requests": num_requests,
        "requests_per_s": round(num_requests / wall_s, 2),
        "tokens_per_s": round(num_tokens / wall_s, 1),
        "ttft_ms": percentiles_ms(first_s),
        "itl_ms": percentiles_ms(gaps_s),
        "front_end_us_per_token": round(1e6 * front_end_s / num_tokens, 1),
        "front_end_share_of_a_core": round(front_end_s / wall_s, 3),
        "events_per_token": round(sum(len(reply.events) - 1 for reply in replies) / num_tokens, 3),
    }


def percentiles_ms(ordered_s: list[float]) -> dict[str, float]:
    """Of sorted seconds."""
    last = len(ordered_s) - 1
    return {f"p{p}": round(1e3 * ordered_s[round(p / 100 * last)], 1) for p in (50, 90, 99)}


def main() -> None:
    """Measure, print a table, write JSON where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 128])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results = []
    for ranks in options.ranks:
        with load_server(ranks) as server:
            asyncio.run(measure(server, 4, 8))  # warm-up
            for num_streams in options.streams:
                num_requests = max(6, min(2 * num_streams, 192))
                result = asyncio.run(measure(server, num_streams, num_requests))
                results.append({"ranks": ranks, **result})
    rows = [
        ("ranks", "streams", "requests/s", "tokens/s", "TTFT p50, p90, p99", "ITL p50, p90, p99", "us/token")
    ]
    rows += [
        (
            str(r["ranks"]),
            str(r["streams"]),
            str(r["requests_per_s"]),
            str(r["tokens_per_s"]),
            ", ".join(f"{v:.0f}" for v in r["ttft_ms"].values()),
            ", ".join(f"{v:.0f}" for v in r["itl_ms"].values()),
            str(r["front_end_us_per_token"]),
        )
        for r in results
    ]
    for row in rows:
        print("| " + " | ".join(row) + " |")
    document = {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "load_average_1_min": os.getloadavg()[0],
        "tokens_per_request": NUM_TOKENS,
        "results": results,
    }
    if options.output is not None:
        options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
