"""The plots of an answer as plain data: what plotly draws, without plotly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moe_runtime.planner.answer import Answer, candidate_row

__all__ = ["figure", "panels"]

GIB = 2**30
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5")
LEVEL_NAMES = {"topology": "level topology", "batch": "level batch", "none": "unpinned"}
NUM_BARS = 10


def panels(answer: Answer) -> dict[str, dict[str, Any]]:
    """Figures by the id of their panel, each ``{"data": [traces], "layout": {...}}``; only those with data."""
    found = {"pareto": _pareto(answer), "memory": _memory(answer), "latency": _latency(answer)}
    if answer.price is not None:
        found["price"] = _price(answer)
    if answer.traffic:
        found["traffic"] = _traffic(answer)
    if answer.redundancy:
        found["balance"] = _balance(answer)
        found["heat"] = _heat(answer)
    return {name: drawn for name, drawn in found.items() if drawn["data"]}


def _pareto(answer: Answer) -> dict[str, Any]:
    groups: dict[int, list[Any]] = {}
    for candidate in answer.found:
        groups.setdefault(candidate.topology.ep_size, []).append(candidate)
    traces = [
        {
            "type": "scatter", "mode": "markers", "name": f"EP {size}",
            "x": [c.tokens_per_s_per_user for c in some], "y": [c.tokens_per_s_per_gpu for c in some],
            "text": [f"{c.gpus} GPUs, TP {c.topology.tp}, batch {c.batch}" for c in some],
            "marker": {"size": 4, "opacity": 0.45},
        }
        for size, some in sorted(groups.items())
    ]  # fmt: skip
    if answer.front:
        traces.append(
            {
                "type": "scatter", "mode": "lines+markers", "name": "Pareto front", "line": {"color": "#222"},
                "x": [c.tokens_per_s_per_user for c in answer.front],
                "y": [c.tokens_per_s_per_gpu for c in answer.front],
            }
        )  # fmt: skip
    if answer.best is not None:
        traces.append(
            {
                "type": "scatter", "mode": "markers", "name": "smallest fleet" if answer.fits else "nearest",
                "x": [answer.best.tokens_per_s_per_user], "y": [answer.best.tokens_per_s_per_gpu],
                "marker": {"size": 14, "symbol": "star", "color": "#d62728"},
            }
        )  # fmt: skip
    return figure(
        traces, "Throughput against speed for one user", "tokens/s per user", "output tokens/s per GPU"
    )


def _memory(answer: Answer) -> dict[str, Any]:
    seen: dict[tuple[int, int, int], Any] = {}
    for candidate in [*([answer.best] if answer.best else []), *answer.found]:
        topology = candidate.topology
        key = (topology.ep_size, topology.tp, topology.num_redundant_experts)
        if key not in seen and len(seen) < NUM_BARS and (topology.tp == 1 or candidate is answer.best):
            seen[key] = candidate
    names = [f"EP {e}, TP {t}" + (f", +{r}" if r else "") for e, t, r in seen]
    parts: Sequence[str] = (
        "weights",
        "spare",
        "activations",
        "exchange",
        "workspace",
        "graph pools and kernels",
        "kv_room",
    )
    rows = [candidate_row(answer, candidate)["memory_bytes"] for candidate in seen.values()]
    traces: list[Mapping[str, Any]] = [
        {"type": "bar", "name": part.replace("_", " "), "x": names, "y": [row[part] / GIB for row in rows]}
        for part in parts
        if any(row[part] for row in rows)
    ]
    drawn = figure(traces, "Memory of the fullest rank", "layout", "GiB")
    drawn["layout"]["barmode"] = "stack"
    return drawn


def _latency(answer: Answer) -> dict[str, Any]:
    if answer.best is None:
        return figure([], "", "", "")
    topology = answer.best.topology
    some = [c for c in answer.found if c.topology == topology] or [answer.best]
    x = [c.batch for c in some]
    traces = [
        {"type": "scatter", "mode": "lines+markers", "name": name, "x": x, "y": y}
        for name, y in (
            ("mean TPOT", [1e3 * c.tpot_s for c in some]),
            ("step without prompts", [1e3 * c.decode_s for c in some]),
            ("mean TTFT", [1e3 * c.ttft_s for c in some]),
        )
    ]
    drawn = figure(traces, f"Latency at EP {topology.ep_size}, TP {topology.tp}", "sequences per group", "ms")
    drawn["layout"]["xaxis"]["type"] = drawn["layout"]["yaxis"]["type"] = "log"
    return drawn


def _price(answer: Answer) -> dict[str, Any]:
    assert answer.price is not None, "checked by the caller"
    names = list(answer.price.component_us)
    traces = [
        {
            "type": "bar", "name": LEVEL_NAMES[level], "x": names,
            "y": [answer.price.component_us[name][level] / 1e3 for name in names],
        }
        for level in LEVEL_NAMES
    ]  # fmt: skip
    title = f"Price of invariance: {answer.price.total:.1%} of tokens/s"
    return figure(traces, title, "component", "ms of a decode step")


def _traffic(answer: Answer) -> dict[str, Any]:
    x = [f"EP {row.ep_size}" for row in answer.traffic]
    traces = [
        {
            "type": "bar",
            "name": "unreduced",
            "x": x,
            "y": [row.unreduced_bytes / 1024 for row in answer.traffic],
        },
        {
            "type": "bar",
            "name": "pre-summed",
            "x": x,
            "y": [row.presummed_bytes / 1024 for row in answer.traffic],
        },
    ]
    return figure(traces, "Rows home, per token and layer", "", "KiB")


def _balance(answer: Answer) -> dict[str, Any]:
    x = [row.num_redundant_experts for row in answer.balance]
    traces = [
        {
            "type": "scatter", "mode": "lines+markers", "name": "planned", "x": x,
            "y": [r.planned for r in answer.balance],
        },
        {
            "type": "scatter", "mode": "lines+markers", "name": "as numbered", "x": x,
            "y": [r.contiguous for r in answer.balance],
        },
    ]  # fmt: skip
    drawn = figure(traces, "Balancedness", "redundant experts of a layer", "mean over peak load of the ranks")
    drawn["layout"]["yaxis"]["range"] = [0, 1.05]
    return drawn


def _heat(answer: Answer) -> dict[str, Any]:
    row = answer.balance[0]
    trace = {
        "type": "heatmap", "z": row.numbered_load.tolist(), "colorscale": "Viridis", "name": "load",
        "colorbar": {"title": {"text": "over mean"}},
    }  # fmt: skip
    return figure([trace], "Load of ranks, experts as numbered", "EP rank", "layer")


def figure(traces: Sequence[Mapping[str, Any]], title: str, x: str, y: str) -> dict[str, Any]:
    """A plot with a title and names of its axes."""
    layout = {
        "title": {"text": title}, "xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}},
        "colorway": list(COLOURS), "template": "plotly_white", "height": 420,
        "margin": {"l": 70, "r": 20, "t": 60, "b": 60},
    }  # fmt: skip
    return {"data": list(traces), "layout": layout}
