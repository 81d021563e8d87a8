"""An answer on a terminal: tables and a plot, by rich."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from moe_runtime.planner.answer import Answer, candidate_row, launch_line
from moe_runtime.planner.fleet import Candidate
from moe_runtime.planner.invariance_price import DECODE_EXCHANGE_ROWS, LEVELS, SETTINGS

__all__ = ["plot", "print_answer"]

GIB = 2**30
PLOT_WIDTH, PLOT_HEIGHT = 64, 14
NUM_ROWS = 12


def print_answer(answer: Answer, console: Console) -> None:
    """All of it."""
    shape, hardware, workload = answer.search.shape, answer.search.hardware, answer.search.workload
    say = _Printer(console)
    say(f"[bold]{shape.architecture}[/], {_count(shape.num_parameters)} parameters ({_active(answer)} per token), "
        f"{shape.weight_bytes() / GIB:.1f} GiB of weights, {shape.kv_token_bytes() / 1024:.1f} KiB of KV a token; "
        f"{hardware.title}")  # fmt: skip
    if not shape.runs_here:
        say(f"[yellow]dimensions only, not run by this version:[/] {shape.not_run_reason}")
    if hardware.not_run_reason:
        say(f"[yellow]this device is not run on by this version:[/] {hardware.not_run_reason}")
    wanted = [f"{workload.input_tokens} tokens in, {workload.output_tokens} out"]
    wanted += [f"TTFT {workload.ttft_s:g} s"] if workload.ttft_s else []
    wanted += [f"TPOT {workload.tpot_s:g} s"] if workload.tpot_s else []
    wanted += [f"{workload.request_rate:g} requests/s"] if workload.request_rate else []
    wanted += [f"{workload.concurrency} at once"] if workload.concurrency else []
    say(f"asked for: {', '.join(wanted)}; {answer.config.gpus} GPUs, level {answer.config.invariance}")
    if answer.front:
        console.print(_layouts(answer, _some(answer.front, NUM_ROWS), "Pareto front"))
        say(plot(answer.front, answer.best if answer.fits else None))
    if answer.fits:
        say("\n[bold green]fits.[/] The smallest fleet that meets all of it:")
    else:
        say(f"\n[bold red]does not fit.[/] {answer.nearest}")
    if answer.best is None:
        return
    console.print(_layouts(answer, [answer.best], "smallest fleet" if answer.fits else "nearest"))
    console.print(_memory(answer, answer.best))
    say(f"start each of {answer.best.replicas} replicas: [bold]{launch_line(answer, answer.best)}[/]")
    _price(answer, say, console)
    sources = Table("figure", "source", title="where the figures are from", title_justify="left")
    for name, source in answer.sources.items():
        sources.add_row(name, source)
    console.print(sources)


def plot(front: Sequence[Candidate], best: Candidate | None = None) -> str:
    """Tokens per second and GPU (up) over tokens per second and user (right); ``@`` is the best one."""
    points = [(c.tokens_per_s_per_user, c.tokens_per_s_per_gpu, c is best) for c in front]
    if best is not None and not any(is_best for *_, is_best in points):
        points.append((best.tokens_per_s_per_user, best.tokens_per_s_per_gpu, True))
    most_x, most_y = max(x for x, *_ in points), max(y for _, y, _ in points)
    grid = [[" "] * PLOT_WIDTH for _ in range(PLOT_HEIGHT)]
    for x, y, is_best in sorted(points, key=lambda p: p[2]):
        row = PLOT_HEIGHT - 1 - round((PLOT_HEIGHT - 1) * y / most_y)
        grid[row][round((PLOT_WIDTH - 1) * x / most_x)] = "@" if is_best else "*"
    lines = [f"{most_y:9,.0f} |" + "".join(grid[0])]
    lines += ["          |" + "".join(row) for row in grid[1:]]
    lines.append("        0 +" + "-" * PLOT_WIDTH)
    right = f"{most_x:,.0f} tokens/s per user"
    lines.append("tokens/s   0" + right.rjust(PLOT_WIDTH - 1))
    return "\n".join([*lines, "per GPU"])


class _Printer:
    """Prints lines as they are."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def __call__(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)


def _active(answer: Answer) -> str:
    return _count(answer.search.shape.num_active_parameters)


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 10**9 else f"{number / 1e6:.2f} M"


def _some(front: Sequence[Candidate], number: int) -> list[Candidate]:
    """Evenly, both ends included."""
    if len(front) <= number:
        return list(front)
    return [front[round(i * (len(front) - 1) / (number - 1))] for i in range(number)]


def _layouts(answer: Answer, rows: Sequence[Candidate], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in (
        "GPUs", "EP", "TP", "replicas", "redundant", "batch", "TTFT s", "TPOT ms", "tok/s/GPU", "tok/s/user",
        "requests/s", "most at once", "GiB/GPU", "runs here", "meets",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for candidate in rows:
        row = candidate_row(answer, candidate)
        used = candidate.memory.fixed_bytes + row["memory_bytes"]["kv_used"]
        table.add_row(
            str(row["gpus"]), str(row["ep_size"]), str(row["tp"]), str(row["replicas"]),
            str(row["num_redundant_experts"]), str(row["batch_per_group"]), f"{row['ttft_s']:.3f}",
            f"{1e3 * row['tpot_s']:.2f}", f"{row['tokens_per_s_per_gpu']:,.0f}", f"{row['tokens_per_s_per_user']:,.1f}",
            f"{row['requests_per_s']:,.2f}", f"{row['max_concurrency']:,}", f"{used / GIB:.1f}",
            "yes" if row["runs_here"] else "no", "yes" if row["meets"] else "no",
        )  # fmt: skip
    return table


def _memory(answer: Answer, candidate: Candidate) -> Table:
    parts = candidate_row(answer, candidate)["memory_bytes"]
    table = Table("part", "GiB", title="memory of the fullest rank", title_justify="left")
    table.columns[1].justify = "right"
    for name, num_bytes in parts.items():
        table.add_row(name.replace("_", " "), f"{num_bytes / GIB:.2f}")
    return table


def _price(answer: Answer, say: _Printer, console: Console) -> None:
    found = answer.price
    if found is None:
        return
    table = Table("decode step, us", *LEVELS, title="price of invariance", title_justify="left")
    for name, by_level in found.component_us.items():
        table.add_row(name, *(f"{by_level[level]:,.0f}" for level in LEVELS))
    table.add_row("output tokens/s", *(f"{found.tokens_per_s[level]:,.0f}" for level in LEVELS), style="bold")
    table.add_row("GPUs for that rate", *(f"{found.gpus[level]:,}" for level in LEVELS))
    table.add_row("memory but KV, GiB", *(f"{found.memory_bytes[level] / GIB:.2f}" for level in LEVELS))
    table.add_row(
        "bytes a token and layer sends",
        *(f"{found.exchange_bytes_per_token[level]:,.0f}" for level in LEVELS),
    )
    console.print(table)
    say(f"level topology costs {found.total:.1%} of the tokens that unpinned kernels and sums would give")
    if answer.traffic:
        table = Table(
            "EP", "unreduced KiB", "pre-summed KiB", "ratio", "us", "us, pre-summed",
            title=f"rows home, a token and layer; exchange of {DECODE_EXCHANGE_ROWS} tokens a rank",
            title_justify="left",
        )  # fmt: skip
        for row in answer.traffic:
            table.add_row(
                str(row.ep_size), f"{row.unreduced_bytes / 1024:.1f}", f"{row.presummed_bytes / 1024:.1f}",
                f"{row.unreduced_bytes / row.presummed_bytes:.2f}", f"{row.unreduced_us:.1f}",
                f"{row.presummed_us:.1f}",
            )  # fmt: skip
        console.print(table)
    table = Table(
        "redundant experts", "balancedness", "GiB a rank", "decode step, us", title="copies against exchanged places",
        title_justify="left",
    )  # fmt: skip
    if answer.balance and answer.best is not None and answer.best.topology.ep_size > 1:
        table.add_row("none, as numbered", f"{answer.balance[0].contiguous:.3f}", "0.00", "")
    for copies in answer.redundancy:
        name = str(copies.num_redundant_experts) if copies.num_redundant_experts else "none, places exchanged"
        table.add_row(
            name, f"{copies.balancedness:.3f}", f"{copies.memory_bytes / GIB:.2f}", f"{copies.decode_us:,.0f}"
        )
    console.print(table)
    table = Table("setting", "level topology", "level batch", title="what moves bits", title_justify="left")
    for setting in SETTINGS:
        table.add_row(*setting)
    console.print(table)
