"""Runs the check on the ranks: flags, process group, progress, table, exit code.

Exit codes: 0 all equal, 2 usage or configuration, 3 does not fit in memory, 4 a difference (or the start-up self-check
failed), 5 a control was not noticed. All ranks exit with the same one; torchrun itself turns any of them but 0 into 1
and names it in its summary.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

import torch
from rich.console import Console

from moe_runtime.engine.llm import LLM
from moe_runtime.errors import CapacityError, CheckpointError, InvarianceError, PeerError
from moe_runtime.exit_codes import EXIT_NO_FIT, EXIT_SELF_CHECK
from moe_runtime.launch.cli import parse_config, print_error, usage_error
from moe_runtime.launch.distributed import close_ranks, init_ranks
from moe_runtime.launch.leave import leave_at_once, meet_processes
from moe_runtime.launch.logs import setup_logging
from moe_runtime.launch.progress import progress_bar
from moe_runtime.server.processes import ProcessId
from moe_runtime.verify.checker import check
from moe_runtime.verify.config import CheckConfig
from moe_runtime.verify.report import CheckReport

__all__ = ["main"]

NARROWEST_TABLE = 140


def main(args: Sequence[str] | None = None) -> int:
    """Check, and print the table on rank 0. Returns the exit code."""
    config = parse_config(CheckConfig, args, prog="moe_runtime.check")
    processes: list[ProcessId] = []
    try:
        group = init_ranks(config.engine.device)
        setup_logging(group.rank)
        processes = meet_processes(group)
        with progress_bar("loading weights", shown=group.rank == 0) as on_progress:
            llm = LLM.from_config(config.engine_in_force, group=group, on_progress=on_progress)

        def write(report: CheckReport) -> None:
            if group.rank == 0 and config.json is not None:
                config.json.write_text(report.to_json(), encoding="utf-8")

        report = check(llm, config, lambda what: progress_bar(what, shown=group.rank == 0), write)
        write(report)
        if group.rank == 0:
            console = Console()
            if not console.is_terminal:
                console = Console(width=NARROWEST_TABLE)
            report.print_to(console)
        if report.exit_code and group.size > 1:
            # torchrun ends the others when it sees the first leave with an error; they are leaving with the same one.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        llm.stop_engine()  # captured graphs hold on to the communicators that end next
        close_ranks(llm.group, llm.model.tensor_parallel)
    except PeerError as error:
        leave_at_once(error, processes)
    except InvarianceError as error:
        print_error(str(error))
        return EXIT_SELF_CHECK
    except (CapacityError, MemoryError, torch.OutOfMemoryError) as error:
        print_error(f"the model does not fit: {error}")
        return EXIT_NO_FIT
    except (CheckpointError, ValueError, OSError) as error:
        usage_error(str(error))
    return int(report.exit_code)
