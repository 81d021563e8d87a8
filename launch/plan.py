"""Runs the planner: flags, tables, files, exit code.

Exit codes: 0 a fleet meets everything, 3 none within the GPUs does, 2 usage. Loads torch to replay a trace alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from moe_runtime.exit_codes import EXIT_NO_FIT, EXIT_OK
from moe_runtime.launch.cli import parse_config, usage_error
from moe_runtime.planner.answer import answer
from moe_runtime.planner.config import PlanConfig
from moe_runtime.planner.html_report import check_plotly, write_html
from moe_runtime.planner.tables import print_answer

__all__ = ["main"]

NARROWEST_TABLE = 150
STANDARD_OUTPUT = Path("-")


def main(args: Sequence[str] | None = None) -> int:
    """Plan. Returns the exit code."""
    config = parse_config(PlanConfig, args, prog="moe_runtime.plan")
    try:
        if config.html is not None:
            check_plotly()
        simulation, fits = None, False
        if config.trace is None:
            found = answer(config)
            fits = found.fits
        else:
            from moe_runtime.launch.plan_trace import replay
            from moe_runtime.planner.simulation_view import print_simulation, verdict_of

            found, simulation = replay(config, config.trace)
            fits = verdict_of(simulation, config.goodput)[0]
        if config.html is not None:
            write_html(found, config.html, simulation)
        if config.json is not None:
            whole = found.to_json()
            if simulation is not None:
                whole |= {"fits": fits, "simulation": simulation.to_json()}
            text = json.dumps(whole, indent=1, allow_nan=False) + "\n"
            if config.json == STANDARD_OUTPUT:
                print(text, end="")
            else:
                config.json.write_text(text, encoding="utf-8")
    except (ValueError, OSError) as error:
        usage_error(str(error))
    if config.json != STANDARD_OUTPUT:
        console = Console()
        if not console.is_terminal:
            console = Console(width=NARROWEST_TABLE)
        print_answer(found, console)
        if simulation is not None:
            print_simulation(simulation, console, config.goodput)
    return EXIT_OK if fits else EXIT_NO_FIT
