"""The server under requests of every kind: rates, times to tokens, and bits of some of them against those alone.

    python benchmarks/bench_mixed.py --ranks 8 --requests 1000 --output benchmarks/results/mixed_cpu.json
    python benchmarks/bench_mixed.py --ranks 8 --device cuda --model DIR --requests 1000 --output FILE

The requests are those of ``mixed_load.py``, ``--streams`` of them open at once: as one ends the next begins. Then the
server is left idle but for ``--repeated`` of them, one at a time: their answers must have the digests that they had in
company. Without ``--model`` it serves the built-in one; a folder gets dummy weights. Times are the client's, a process
on the same machine. TTFT: from the request to the first event of a stream; ITL: between its events. Exit code: 0 all
answers are complete and equal, 1 not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_server import percentiles_ms
from load_client import LoadClient, Reply
from load_server import LoadServer, cpu_s, load_server
from mixed_load import MixedRequest, answer_digest, mixed_request, usage_of

SERVED_NAME = "mixed"
GPU_FLAGS = ("--max-model-len", "4096", "--max-num-seqs", "256", "--max-num-batched-tokens", "8192")


def main() -> int:
    """Measure, print and write. Returns the exit code."""
    options = parse_options()
    requests = [
        mixed_request(number, SERVED_NAME, options.longest_prompt, options.longest_output)
        for number in range(options.requests)
    ]
    flags = ["--served-model-name", SERVED_NAME]
    if options.model is not None:
        flags += ["--model", str(options.model), "--load-format", "dummy"]
    if options.device == "cuda" and options.model is not None:
        flags += GPU_FLAGS
    start_s = time.monotonic()
    with load_server(options.ranks, *flags, device=options.device, ready_s=options.ready_s) as server:
        ready_s = time.monotonic() - start_s
        result = asyncio.run(measure(server, requests, options.streams, options.repeated))
    result = {
        "ranks": options.ranks,
        "device": options.device,
        "model": "built-in" if options.model is None else f"{options.model.name}, dummy weights",
        "cores": os.cpu_count(),
        "ready_s": round(ready_s, 1),
        **result,
    }
    print(json.dumps(result, indent=1))
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["incomplete"] == 0 and result["repeated"] == result["repeated_equal"] else 1


async def measure(
    server: LoadServer, requests: list[MixedRequest], num_streams: int, num_repeated: int
) -> dict[str, Any]:
    """All of them in company, then some alone.

    Args:
        server: Ready.
        requests: In the order in which they are sent.
        num_streams: Most that are open at once.
        num_repeated: How many are sent again.
    """
    client = LoadClient(server.url)
    front_end = server.pids()["front end"]
    replies: dict[int, Reply] = {}
    waiting = iter(range(len(requests)))

    async def send() -> None:
        for number in waiting:
            replies[number] = await client.post(requests[number].path, requests[number].body)

    await client.post(requests[0].path, requests[0].body)  # warm-up
    start_s, start_cpu_s = time.monotonic(), cpu_s(front_end)
    await asyncio.gather(*(send() for _ in range(num_streams)))
    wall_s, front_end_s = time.monotonic() - start_s, cpu_s(front_end) - start_cpu_s
    complete = {number: reply for number, reply in replies.items() if is_complete(reply)}
    faults = [f"{r.status}: {r.body[:200]!r}" for number, r in replies.items() if number not in complete]
    step = max(1, len(complete) // max(1, num_repeated))
    repeated = sorted(complete)[::step][:num_repeated]
    num_equal = 0
    for number in repeated:
        alone = await client.post(requests[number].path, requests[number].body)
        num_equal += is_complete(alone) and answer_digest(alone) == answer_digest(complete[number])
    usages = [usage_of(reply) for reply in complete.values()]
    num_prompt, num_output = (
        sum(usage[name] for usage in usages) for name in ("prompt_tokens", "completion_tokens")
    )
    streamed = [reply for reply in complete.values() if reply.events]
    first_s = sorted(reply.first_s for reply in streamed)
    gaps_s = sorted(gap_s for reply in streamed for gap_s in reply.gaps_s)
    return {
        "requests": len(requests),
        "streams": num_streams,
        "kinds": dict(sorted(Counter(request.kind for request in requests).items())),
        "incomplete": len(requests) - len(complete),
        "faults": faults[:3],
        "wall_s": round(wall_s, 2),
        "requests_per_s": round(len(complete) / wall_s, 2),
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
        "output_tokens_per_s": round(num_output / wall_s, 1),
        "ttft_ms": percentiles_ms(first_s) if first_s else {},
        "itl_ms": percentiles_ms(gaps_s) if gaps_s else {},
        "front_end_share_of_a_core": round(front_end_s / wall_s, 3),
        "repeated": len(repeated),
        "repeated_equal": num_equal,
    }


def is_complete(reply: Reply) -> bool:
    """A whole answer, or a stream with its end and its usage."""
    return reply.status == 200 and reply.is_complete


def parse_options(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", type=Path, help="folder with config.json and a tokenizer")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--repeated", type=int, default=24)
    parser.add_argument("--longest-prompt", type=int, help="by default 2048, and 512 of the built-in model")
    parser.add_argument("--longest-output", type=int, default=256)
    parser.add_argument("--ready-s", type=float, default=120.0, help="most seconds to start")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(args)
    if options.longest_prompt is None:
        options.longest_prompt = 512 if options.model is None else 2048
    return options


if __name__ == "__main__":
    sys.exit(main())
