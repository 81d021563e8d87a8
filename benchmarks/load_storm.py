"""Storms: many clients that leave in every phase of a request, and many streams at once that must all be right."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

from load_client import LoadClient, Reply, own_usage
from load_probes import PROBES, metrics_of, run_probe, wait_until_idle

__all__ = ["disconnect_storm", "many_streams"]

LONG_PROMPT = "what news from the north, my lord? " * 60


async def disconnect_storm(client: LoadClient, num_clients: int, seed: int = 0) -> dict[str, Any]:
    """Clients that all come at once and leave; fixed requests beside them, before and after.

    The server should have fewer places than there are clients, so that most of them queue.

    Returns:
        What happened. Raises ``SystemExit`` where a request, a block or a task is left behind.
    """
    expected = [await run_probe(client, index) for index in range(len(PROBES))]
    num_tasks = (await metrics_of(client))["front_end_tasks"]
    kinds: Counter[str] = Counter()
    peaks: Counter[str] = Counter()
    during: list[str] = []
    storm = asyncio.create_task(_leave_all(client, num_clients, random.Random(seed), kinds))
    watch = asyncio.create_task(_peaks(client, peaks))
    while not storm.done():
        index = len(during) % len(PROBES)
        found = await run_probe(client, index)
        during.append("equal" if found == expected[index] else f"probe {index}: {found}")
    await storm
    watch.cancel()
    left = await wait_until_idle(client, num_tasks)
    after = [await run_probe(client, index) for index in range(len(PROBES))]
    return {
        "clients": num_clients,
        "left": dict(sorted(kinds.items())),
        "peaks": dict(peaks),
        "left_behind": left,
        "digests": expected,
        "digests_after_are_equal": after == expected,
        "probes_during": dict(Counter(during)),
    }


async def many_streams(client: LoadClient, num_streams: int, num_kinds: int = 20) -> dict[str, Any]:
    """Streams at the same time, each compared with the answer to the same request alone and not streamed."""
    bodies = [
        {
            "model": "builtin",
            "prompt": f"ACT {i + 1}\nThe lord of house number {i} speaks",
            "max_tokens": 16 + i,
            "seed": i,
            "return_token_ids": True,
            "ignore_eos": i % 2 == 0,
        }
        for i in range(num_kinds)
    ]
    references = [(await client.post("/v1/completions", body)).document for body in bodies]
    num_tasks = (await metrics_of(client))["front_end_tasks"]
    peaks: Counter[str] = Counter()
    watch = asyncio.create_task(_peaks(client, peaks))
    options = {"stream": True, "stream_options": {"include_usage": True}}
    streams = [client.post("/v1/completions", bodies[i % num_kinds] | options) for i in range(num_streams)]
    replies = await asyncio.gather(*streams)
    watch.cancel()
    verdicts = Counter(_verdict(reply, references[i % num_kinds]) for i, reply in enumerate(replies))
    return {
        "streams": num_streams,
        "verdicts": dict(verdicts),
        "tokens": sum(references[i % num_kinds]["usage"]["completion_tokens"] for i in range(num_streams)),
        "seconds": round(
            max(reply.events[-1][0] for reply in replies if reply.events) - replies[0].start_s, 1
        ),
        "peaks": dict(peaks),
        "left_behind": await wait_until_idle(client, num_tasks),
    }


def _verdict(reply: Reply, reference: dict[str, Any]) -> str:
    """``right``, or what is wrong with a stream."""
    if reply.status != 200 or not reply.is_complete:
        return f"status {reply.status}, complete: {reply.is_complete}"
    *chunks, last = reply.chunks
    choices = [chunk["choices"][0] for chunk in chunks]
    [expected] = reference["choices"]
    if [token_id for choice in choices for token_id in choice["token_ids"]] != expected["token_ids"]:
        return "other tokens, or in another order"
    if reply.text != expected["text"]:
        return "another text"
    if last["choices"] or own_usage(last) != own_usage(reference):
        return "another usage"
    reasons = [choice["finish_reason"] for choice in choices]
    return "right" if reasons == [None] * (len(choices) - 1) + [expected["finish_reason"]] else "another end"


async def _leave_all(client: LoadClient, num_clients: int, rng: random.Random, kinds: Counter[str]) -> None:
    async with asyncio.TaskGroup() as group:
        for index in range(num_clients):
            group.create_task(_leave(client, index, rng.random(), kinds))


async def _leave(client: LoadClient, index: int, share: float, kinds: Counter[str]) -> None:
    """One client. Which it is depends on its index, so that every kind is there."""
    body: dict[str, Any] = {"model": "builtin", "prompt": f"{index} ", "seed": index, "ignore_eos": True}
    body |= {"max_tokens": 300, "stream": True}
    path = "/v1/completions"
    match index % 6:
        case 0:
            await client.post_half(path, body)
            kinds["in the middle of its body"] += 1
        case 1:  # with more clients than places, mostly in the queue
            reply = await client.post(path, body, leave_after_s=0.02 + share)
            kinds["queued" if not reply.events else "streaming"] += 1
        case 2:  # a long prompt: in the queue, or in one of its chunks
            reply = await client.post(
                path, body | {"prompt": LONG_PROMPT, "cache_prompt": False}, leave_after_s=0.05 + 4 * share
            )
            kinds["queued or in prefill"] += 1
        case 3:
            reply = await client.post(path, body, leave_after_events=1)
            kinds["at its first token"] += 1
        case 4:
            reply = await client.post(path, body, leave_after_events=2 + int(20 * share))
            kinds["streaming"] += 1
        case _:
            await client.post(path, body | {"stream": False, "n": 2}, leave_after_s=0.02 + 4 * share)
            kinds["waiting for a whole answer"] += 1


async def _peaks(client: LoadClient, peaks: Counter[str]) -> None:
    while True:
        metrics = await metrics_of(client)
        for name in ("num_requests_open", "num_requests_running", "num_requests_waiting"):
            peaks[name] = max(peaks[name], int(metrics[name]))
        peaks["front_end_mib"] = max(
            peaks["front_end_mib"], int(metrics["process_resident_memory_bytes"] / 2**20)
        )
        await asyncio.sleep(0.1)
