"""An answer as one HTML file that needs nothing else: plotly's script is inside."""

from __future__ import annotations

import html
from pathlib import Path
from typing import TYPE_CHECKING

from moe_runtime.planner.answer import Answer, launch_line
from moe_runtime.planner.panels import panels

if TYPE_CHECKING:  # a replay loads the engine, and with it torch
    from moe_runtime.planner.simulation import Simulation

__all__ = ["check_plotly", "write_html"]

STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;margin:1.5rem auto;max-width:1240px;padding:0 1rem;color:#222}"
    "main{display:grid;grid-template-columns:repeat(auto-fill,minmax(540px,1fr));gap:1rem}"
    "code{background:#f3f3f3;padding:.2rem .4rem;overflow-wrap:anywhere}"
    "table{border-collapse:collapse}td,th{border-bottom:1px solid #ddd;padding:.2rem .6rem;text-align:left}"
)


def check_plotly() -> None:
    """Refuse before anything is computed.

    Raises:
        ValueError: plotly is not installed.
    """
    try:
        import plotly  # noqa: F401
    except ModuleNotFoundError:
        raise ValueError("html needs plotly: install moe-runtime[plan]") from None


def write_html(answer: Answer, path: Path, simulation: Simulation | None = None) -> None:
    """Write the file, with a replay of a trace where there is one; what was there is replaced."""
    import plotly.graph_objects as go

    shape, hardware = answer.search.shape, answer.search.hardware
    parts: list[str] = []
    drawn_panels = panels(answer)
    if simulation is not None:
        from moe_runtime.planner.simulation_view import simulation_panels, verdict_of

        drawn_panels = simulation_panels(simulation) | drawn_panels
    for name, figure in drawn_panels.items():
        drawn = go.Figure(data=figure["data"], layout=figure["layout"])
        script: bool | str = "inline" if not parts else False
        parts.append(
            drawn.to_html(
                full_html=False, include_plotlyjs=script, div_id=name, config={"displayModeBar": False}
            )
        )
    verdict = "fits" if answer.fits else f"does not fit: {answer.nearest}"
    if simulation is not None:
        verdict = verdict_of(simulation, answer.config.goodput)[1]
    lines = [f"<p id='verdict'><b>{html.escape(verdict)}</b></p>"]
    if simulation is not None:
        launch = html.escape(simulation.launch)
        lines.append(f"<p>{simulation.candidate.replicas} times <code>{launch}</code></p>")
    elif answer.best is not None:
        lines.append(
            f"<p>{answer.best.replicas} times <code>{html.escape(launch_line(answer, answer.best))}</code></p>"
        )
    for reason in (shape.not_run_reason, hardware.not_run_reason):
        if reason:
            lines.append(f"<p>Not run by this version: {html.escape(reason)}</p>")
    sources = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(text)}</td></tr>"
        for name, text in answer.sources.items()
    )
    title = html.escape(f"{shape.architecture} on {hardware.title}")
    path.write_text(
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{title}</title>"
        f"<style>{STYLE}</style></head>"
        f"<body><h1>{title}</h1>{''.join(lines)}<main>{''.join(f'<section>{part}</section>' for part in parts)}</main>"
        f"<h2>Where the figures are from</h2><table>{sources}</table></body></html>",
        encoding="utf-8",
    )
