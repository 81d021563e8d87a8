"""A replay on a terminal and as plots."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from moe_runtime.planner.panels import figure
from moe_runtime.planner.replay_metrics import PERCENTILES
from moe_runtime.planner.simulation import Simulation

__all__ = ["print_simulation", "simulation_panels", "verdict_of"]

NAMES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "end_to_end_s": "end to end"}
MOST_POINTS = 200


def verdict_of(simulation: Simulation, goodput: float) -> tuple[bool, str]:
    """Whether a fleet carries the trace, and why.

    Args:
        simulation: Of the fleet.
        goodput: Share of all requests that must end within the SLO.
    """
    metrics = simulation.metrics
    share = metrics.num_good / max(1, metrics.num_arrived)
    fits = share >= goodput
    lost = [f"{metrics.num_rejected:,} too long"] if metrics.num_rejected else []
    lost += [f"{metrics.num_failed:,} failed"] if metrics.num_failed else []
    text = (
        f"{share:.1%} of {metrics.num_arrived:,} requests ended within the SLO, {goodput:.1%} asked for"
        + (f" ({', '.join(lost)})" if lost else "")
    )
    return fits, f"{'fits' if fits else 'does not fit'}: {text}"


def print_simulation(simulation: Simulation, console: Console, goodput: float) -> None:
    """Tables of what was observed."""
    found = simulation.to_json()
    layout, requests, cache = found["layout"], found["requests"], found["prefix_cache"]
    console.print(
        f"\n[bold]replay[/] of {simulation.trace.path.name}: {requests['arrived']:,} requests on "
        f"{layout['gpus']} GPUs, {layout['replicas']} replicas of EP {layout['ep_size']}, TP {layout['tp']}",
        highlight=False,
        soft_wrap=True,
    )
    table = Table("seconds", "mean", *(f"p{p}" for p in PERCENTILES), title="latency", title_justify="left")
    for key, name in NAMES.items():
        values = found["latency"][key]
        if values:
            table.add_row(name, *(f"{values[c]:.4g}" for c in ("mean", *(f"p{p}" for p in PERCENTILES))))
    console.print(table)
    table = Table("figure", "value", title="what happened", title_justify="left")
    for name, value in (
        ("finished", f"{requests['finished']:,}"),
        ("rejected as too long", f"{requests['rejected_as_too_long']:,}"),
        ("failed", f"{requests['failed']:,}"),
        ("goodput, requests/s", f"{found['goodput']['requests_per_s']:.3f}"),
        ("output tokens/s", f"{found['output_tokens_per_s']:,.0f}"),
        ("prompt tokens/s", f"{found['prompt_tokens_per_s']:,.0f}"),
        ("prefix cache hit rate", f"{cache['hit_rate']:.1%}"),
        ("preemptions", f"{found['num_preemptions']:,}"),
        (
            "most KV blocks held",
            f"{max(found['timeline']['kv_blocks'], default=0) / found['num_kv_blocks']:.1%}",
        ),
        ("most requests waiting", f"{max(found['timeline']['waiting'], default=0):,.0f}"),
        ("steps", f"{found['num_steps']:,}"),
        ("seconds", f"{found['duration_s']:,.1f}"),
    ):
        table.add_row(name, value)
    console.print(table)
    console.print(f"start each replica: {simulation.launch}", highlight=False, soft_wrap=True)
    for restart in found["restarts"]:
        then = (
            f"EP {restart['ep_size']} after {restart['down_s']:.0f} s"
            if restart["ep_size"]
            else "no smaller replica has room: it stays away"
        )
        console.print(
            f"failure at {restart['at_s']:g} s: {restart['failed_requests']} open requests; {then}",
            highlight=False,
        )
    console.print(verdict_of(simulation, goodput)[1], style="bold", highlight=False, soft_wrap=True)


def simulation_panels(simulation: Simulation) -> dict[str, dict[str, Any]]:
    """Figures by the id of their panel, as ``panels.panels`` gives them."""
    metrics, times = simulation.metrics, simulation.timeline.to_json()
    curves = []
    for key, values in (
        ("ttft_s", metrics.ttft),
        ("tpot_s", metrics.tpot),
        ("end_to_end_s", metrics.end_to_end),
    ):
        if values:
            shares = np.linspace(0, 1, min(MOST_POINTS, max(2, len(values))))
            x = np.quantile(np.frombuffer(values, dtype=np.float64), shares)
            curves.append(_curve(NAMES[key], x.tolist(), shares.tolist()))
    if metrics.itl.count:
        curves.append(_curve(NAMES["itl_s"], *metrics.itl.points()))
    latency = figure(curves, "Latency distributions", "seconds", "share of requests (ITL: of tokens)")
    latency["layout"]["xaxis"]["type"] = "log"
    share = [100 * used / simulation.num_kv_blocks for used in times["kv_blocks"]]
    kv = figure(
        [_curve("held by sequences", times["time_s"], share)], "KV cache over time", "seconds", "% of blocks"
    )
    queue = figure(
        [_curve(name, times["time_s"], times[name]) for name in ("running", "waiting")],
        "Requests over time",
        "seconds",
        "requests",
    )
    found = {"replay_latency": latency, "replay_kv": kv, "replay_queue": queue}
    return {name: drawn for name, drawn in found.items() if drawn["data"] and drawn["data"][0]["x"]}


def _curve(name: str, x: list[float], y: list[float]) -> dict[str, Any]:
    return {"type": "scatter", "mode": "lines", "name": name, "x": x, "y": y}
