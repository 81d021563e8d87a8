"""Mixed load for a long time: bits of fixed requests never change, nothing is left behind, and memory is flat.

    python tools/soak.py --minutes 30 --output benchmarks/results/soak_cpu.json

Starts the server at two ranks with the built-in model. Workers send completions, chats, streams, several choices, long
prompts, bad requests and tokenizations, and leave in all phases of a request; beside them each fixed request of
``benchmarks/load_probes.py`` is sent again and again and must keep its digest. Resident memory of every process is
sampled.

Verdict on memory, per process, over the time after the warm-up (a sixth of the whole): a line is fitted to the samples;
the memory is flat if the line grows by less than ``MAX_GROWTH_MIB``, and the highest sample of the last third is less
than that above the highest of the first third.

Exit code: 0 all of it holds, 1 something does not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from load_client import LoadClient, Reply
from load_probes import PROBES, metrics_of, run_probe, wait_until_idle
from load_server import LoadServer, load_server, resident_mib

MAX_GROWTH_MIB = 4.0
# Few places and blocks, so that queues fill, calls are refused and sequences are preempted.
FLAGS = ("--max-num-seqs", "8", "--max-queued-seqs", "6", "--kv-cache-blocks", "24")
WORDS = ("my", "lord", "what", "news", "from", "the", "north", "of", "love", "and", "war", "tonight", "moon")

BAD = (
    ("/v1/completions", b"{", 400),
    ("/v1/completions", b'{"model": "builtin", "prompt": ""}', 400),
    ("/v1/completions", b'{"model": "other", "prompt": "a"}', 404),
    ("/v1/completions", b'{"model": "builtin", "prompt": "a", "temperature": -1}', 400),
    ("/v1/completions", b'{"model": "builtin", "prompt": [999999]}', 400),
    ("/v1/completions", b'{"model": "builtin", "prompt": "a", "n": 1000000}', 400),
    ("/v1/chat/completions", b'{"model": "builtin", "messages": []}', 400),
    ("/v1/completions", b"[" * 50_000, 400),
    ("/nowhere", b"{}", 404),
)


class Soak:
    """One run against one server."""

    def __init__(self, url: str, seed: int) -> None:
        self.client = LoadClient(url)
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.num_probes = 0

    async def work(self, end_s: float) -> None:
        """Send one thing after the other."""
        actions = (self._whole, self._stream, self._chat, self._leave, self._bad, self._tokens, self._long)
        while time.monotonic() < end_s:
            action = self.random.choices(actions, (3, 4, 3, 4, 2, 2, 1))[0]
            try:
                await action()
            except Exception as error:  # whatever it is, it is a fault of the server or of this tool
                self._fault(f"{action.__name__}: {error!r}")

    async def probe(self, expected: list[str], end_s: float) -> None:
        """Send the fixed requests in turn."""
        while time.monotonic() < end_s:
            for index, digest in enumerate(expected):
                found = await run_probe(self.client, index)
                self.num_probes += 1
                if found != digest:
                    self._fault(f"probe {index} has digest {found}, had {digest}")
            await asyncio.sleep(0.5)

    async def _whole(self) -> None:
        body = self._body(n=self.random.choice((1, 1, 1, 4)), logprobs=self.random.choice((None, None, 3)))
        reply = await self.client.post("/v1/completions", body)
        if self._is_taken("whole", reply):
            num_tokens = reply.document["usage"]["completion_tokens"]
            self._check(num_tokens == body["n"] * body["max_tokens"], f"{num_tokens} tokens for {body}")

    async def _stream(self) -> None:
        await self._streamed("stream", "/v1/completions", self._body())

    async def _chat(self) -> None:
        body = self._body()
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        await self._streamed("chat", "/v1/chat/completions", body)

    async def _long(self) -> None:
        await self._streamed("long", "/v1/completions", {**self._body(), "prompt": self._text(300)})

    async def _streamed(self, name: str, path: str, body: dict[str, Any]) -> None:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        reply = await self.client.post(path, body)
        if self._is_taken(name, reply):
            self._check(reply.is_complete, f"{name}: the stream has no end")
            usage = reply.chunks[-1]["usage"]
            self._check(usage["completion_tokens"] == body["max_tokens"], f"{name}: usage {usage}")

    async def _leave(self) -> None:
        body = {**self._body(), "max_tokens": 200, "stream": True}
        match self.random.randrange(4):
            case 0:
                await self.client.post_half("/v1/completions", body)
            case 1:
                seconds = self.random.choice((0.005, 0.05, 0.2))
                await self.client.post("/v1/completions", body, leave_after_s=seconds)
            case 2:
                plain = {**body, "stream": False}
                await self.client.post("/v1/completions", plain, leave_after_s=0.1)
            case _:
                num_events = self.random.choice((1, 1, 10))
                await self.client.post("/v1/completions", body, leave_after_events=num_events)
        self.counts["left"] += 1

    async def _bad(self) -> None:
        path, data, status = self.random.choice(BAD)
        reply = await self.client.post(path, data)
        self.counts["bad"] += 1
        # A full queue answers before values are checked.
        self._check(reply.status in (status, 429), f"{data[:60]!r}: {reply.status}, not {status}")
        self._check("error" in reply.document, f"{data[:60]!r}: {reply.body[:100]!r}")

    async def _tokens(self) -> None:
        text = self._text(60)
        there = await self.client.post("/tokenize", {"prompt": text})
        back = await self.client.post("/detokenize", {"tokens": there.document["tokens"]})
        self.counts["tokens"] += 1
        self._check(back.document["prompt"] == text, "the text did not come back")

    def _body(self, **fields: Any) -> dict[str, Any]:
        body = {"model": "builtin", "prompt": self._text(self.random.randint(1, 40)), "ignore_eos": True}
        body |= {"max_tokens": self.random.randint(1, 48), "seed": self.random.randrange(2**31)}
        return body | fields

    def _text(self, num_words: int) -> str:
        return " ".join(self.random.choices(WORDS, k=num_words))

    def _is_taken(self, name: str, reply: Reply) -> bool:
        self.counts[f"{name} {reply.status}"] += 1
        self._check(reply.status in (200, 429), f"{name}: {reply.status} {reply.body[:200]!r}")
        return reply.status == 200

    def _check(self, holds: bool, fault: str) -> None:
        if not holds:
            self._fault(fault)

    def _fault(self, fault: str) -> None:
        self.faults.append(fault)
        print("FAULT", fault[:500], flush=True)


def growth(samples: list[tuple[float, float]]) -> dict[str, float]:
    """Of (second, MiB): the fitted line's growth, the rise of the highest third to the highest third, and the range."""
    times, values = zip(*samples, strict=True)
    mean_s, mean = sum(times) / len(times), sum(values) / len(values)
    spread = sum((t - mean_s) ** 2 for t in times)
    slope = sum((t - mean_s) * (v - mean) for t, v in samples) / spread
    third = len(values) // 3
    return {
        "first_mib": round(values[0], 1),
        "last_mib": round(values[-1], 1),
        "fitted_growth_mib": round(slope * (times[-1] - times[0]), 2),
        "rise_of_highest_mib": round(max(values[-third:]) - max(values[:third]), 2),
    }


async def sample(server: LoadServer, end_s: float, every_s: float) -> dict[str, list[tuple[float, float]]]:
    """Resident MiB of every process over time."""
    start_s = time.monotonic()
    pids = server.pids()
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in pids}
    while time.monotonic() < end_s:
        for name, pid in pids.items():
            samples[name].append((round(time.monotonic() - start_s, 1), round(resident_mib(pid), 2)))
        await asyncio.sleep(every_s)
    return samples


async def run(server: LoadServer, minutes: float, num_workers: int, seed: int) -> dict[str, Any]:
    """The whole run."""
    soak = Soak(server.url, seed)
    expected = [await run_probe(soak.client, index) for index in range(len(PROBES))]
    num_tasks = (await metrics_of(soak.client))["front_end_tasks"]
    end_s = time.monotonic() + minutes * 60
    sampling = asyncio.create_task(sample(server, end_s, max(1.0, minutes * 60 / 180)))
    async with asyncio.TaskGroup() as group:
        group.create_task(soak.probe(expected, end_s))
        for _ in range(num_workers):
            group.create_task(soak.work(end_s))
    samples = await sampling
    left = await wait_until_idle(soak.client, num_tasks)
    after = [await run_probe(soak.client, index) for index in range(len(PROBES))]
    if after != expected:
        soak.faults.append(f"digests after the load: {after}, before: {expected}")
    metrics = await metrics_of(soak.client)
    memory = {}
    for name, values in samples.items():
        memory[name] = growth([pair for pair in values if pair[0] >= minutes * 60 / 6])
        is_flat = max(memory[name]["fitted_growth_mib"], memory[name]["rise_of_highest_mib"])
        if is_flat >= MAX_GROWTH_MIB:
            soak.faults.append(f"memory of {name} is not flat: {memory[name]}")
    kept = ("steps_total", "generation_tokens_total", "prompt_tokens_total", "num_preemptions_total")
    return {
        "minutes": minutes,
        "cores": os.cpu_count(),
        "flags": FLAGS,
        "digests": expected,
        "num_probes": soak.num_probes,
        "calls": dict(sorted(soak.counts.items())),
        "metrics": {name: metrics[name] for name in kept},
        "refused": {name: value for name, value in metrics.items() if "refused_total" in name},
        "left_behind": left,
        "rule": f"after a sixth of the time, line and rise below {MAX_GROWTH_MIB} MiB",
        "memory": memory,
        "faults": soak.faults,
        "samples_s_mib": {name: values[::6] for name, values in samples.items()},
    }


def _pretty(result: dict[str, Any]) -> str:
    """JSON, the samples of a process in one line."""
    rest = {name: value for name, value in result.items() if name != "samples_s_mib"}
    lines = [f"  {json.dumps(name)}: {json.dumps(v)}" for name, v in result["samples_s_mib"].items()]
    samples = ' "samples_s_mib": {\n' + ",\n".join(lines) + "\n }\n}\n"
    return json.dumps(rest, indent=1).removesuffix("\n}") + ",\n" + samples


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with load_server(options.ranks, *FLAGS) as server:
        result = asyncio.run(run(server, options.minutes, options.workers, options.seed))
    shown = {name: value for name, value in result.items() if name != "samples_s_mib"}
    print(json.dumps(shown, indent=1))
    for name, values in result["samples_s_mib"].items():
        print(f"{name:10}", " ".join(f"{mib:.0f}" for _, mib in values))
    if options.output is not None:
        options.output.write_text(_pretty(result))
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
