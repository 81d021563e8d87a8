"""Fixed requests whose answers must never change, and what a server must be like when nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from load_client import LoadClient, digest

__all__ = ["PROBES", "metrics_of", "run_probe", "wait_until_idle"]

# Path and body. Prompts of one token, of several chunks, chat, several choices, scoring.
PROBES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "HAMLET\n", "max_tokens": 24, "seed": 7, "logprobs": 5}),
    ("/v1/completions", {"prompt": "O ", "max_tokens": 40, "temperature": 0, "seed": 2, "ignore_eos": True}),
    ("/v1/completions", {"prompt": "My lord, " * 120, "max_tokens": 8, "seed": 1, "logprobs": 2}),
    ("/v1/completions", {"prompt": ["ROMEO\n", "JULIET\n"], "n": 2, "max_tokens": 12, "seed": 3}),
    (
        "/v1/completions",
        {"prompt": "To be or not to be", "max_tokens": 0, "seed": 4, "echo": True, "logprobs": 1},
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "Speak of love"}],
            "max_tokens": 20,
            "seed": 5,
            "logprobs": True,
            "top_logprobs": 3,
        },
    ),
)


async def run_probe(client: LoadClient, index: int) -> str:
    """Digest of the answer to a probe. A full queue is waited out."""
    path, body = PROBES[index]
    while True:
        reply = await client.post(path, {"model": "builtin", **body})
        if reply.status != 429:
            assert reply.status == 200, (reply.status, reply.body[:300])
            return digest(reply.document)
        await asyncio.sleep(int(reply.headers["retry-after"]))


async def metrics_of(client: LoadClient) -> dict[str, float]:
    """``/metrics`` by name with labels, without the prefix; series of ranks are added up."""
    values: dict[str, float] = {}
    for line in (await client.get("/metrics")).body.decode().splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            name = name.removeprefix("moe_runtime_").split('{rank="')[0]
            values[name] = values.get(name, 0.0) + float(value)
    return values


async def wait_until_idle(client: LoadClient, num_tasks: float, timeout_s: float = 30.0) -> dict[str, Any]:
    """Wait until no request, block or task is left.

    Args:
        client: Of the server.
        num_tasks: Tasks of the front end when it did nothing.
        timeout_s: How long that may take.

    Returns:
        What was found. Raises ``SystemExit`` where something stays.
    """
    end_s = time.monotonic() + timeout_s
    while True:
        metrics = await metrics_of(client)
        stats = [rank["stats"] for rank in (await client.get("/server_info")).document["ranks"]]
        found = {
            "open_sequences": metrics["num_requests_open"],
            "tasks_more": metrics["front_end_tasks"] - num_tasks,
            "running": sum(s["num_running"] for s in stats),
            "waiting": sum(s["num_waiting"] for s in stats),
            "kv_blocks_in_use": sum(s["num_kv_blocks"] - s["num_free_kv_blocks"] for s in stats),
        }
        if not any(found.values()):
            return found
        if time.monotonic() > end_s:
            raise SystemExit(f"something is left behind: {json.dumps(found)}")
        await asyncio.sleep(0.2)
