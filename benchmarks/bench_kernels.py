"""Every kernel that the engine launches, by the schedules that it would choose, beside its floor and other libraries.

    python benchmarks/bench_kernels.py --output kernels.json --markdown kernels.md

Dimensions of Qwen3-30B-A3B, bf16, one GPU, schedules of ``GpuSchedules`` without an audit. A time is the median of
replays of a CUDA graph that holds at least ``MIN_LAUNCHES`` launches, dependent launch where the engine has it, over
copies of the weights or caches that exceed L2 together. Activations are where the kernel before leaves them: in L2 as
far as they fit, so that a kernel of activations alone may beat its floor.

The floor is what must move or be multiplied at all: each input and output once, of experts only those that the random
routing touches, at ``BYTES_PER_S`` and ``FLOPS_PER_S``. Launches have a floor of their own of about two microseconds.
"Experts as fused MoE" is one chain of launches from given top-k to the normed sum: for many rows the counting sort and
tiles, gate_up, down, combine with residual and norm; the public figures have no residual and no norm.

A second table gives the cost of rules of invariance as time with the rule over time without. Kernels without a rule
have other bits, those that do not merge chunks wrong results: such variants exist only here, in processes of their own
with a Triton cache of their own, where device functions are replaced before anything is compiled. ``--smoke`` launches
everything once in Triton's interpreter (``TRITON_INTERPRET=1``), on tiny dimensions, and measures nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from bench_experts import PUBLIC_FUSED_MOE_MS
from shapes import QWEN3_30B_A3B

from moe_runtime.kernels import attention_tree_triton, norm_triton, prefill_attention_triton
from moe_runtime.kernels.attention_tree_triton import TREE, AttentionTree
from moe_runtime.kernels.gemm import PARTS
from moe_runtime.layers.cuda_decoder import MAX_DECODE_ROWS
from moe_runtime.planner.expert_cases import expert_cases
from moe_runtime.planner.graph_timing import graph_us
from moe_runtime.planner.kernel_cases import SMOKE, Case, Cases, Launch, setting_of
from moe_runtime.planner.shape_configs import read_shape

__all__ = ["measure", "measure_rules"]

BYTES_PER_S = 4.5e12
"""Of memory; nominally 4.8e12."""
FLOPS_PER_S = 790e12
"""Dense bf16, as large GEMMs reach it; nominally 989e12."""
MIN_LAUNCHES = 24
REPLAYS = 9

Row = dict[str, Any]


@triton.jit
def _plain_row_sums(p, sums):  # type: ignore[no-untyped-def]
    """In place of ``row_sums``: ``tl.sum``. One column, the first call's 16 being zeros."""
    if sums.shape[1] == 16:
        return tl.sum(p.to(tl.float32), 1)[:, None]
    else:
        return sums + tl.sum(p.to(tl.float32), 1)[:, None]


@triton.jit
def _plain_head_sums(a, b):  # type: ignore[no-untyped-def]
    """In place of ``head_sums_of_squares``."""
    return tl.sum(a * a + b * b, 1)


@triton.jit
def _plain_row_squares(values):  # type: ignore[no-untyped-def]
    """In place of ``row_sum_of_squares``."""
    return tl.sum(values * values, 0)


@triton.jit
def _last_chunk(m_total, l_total, o_total, m, l, o):  # type: ignore[no-untyped-def]  # noqa: E741
    """In place of ``merge_chunk``: no total is kept. Wrong beyond one chunk; the same loads, products and masks."""
    return m, l, o


REPLACED: dict[str, list[tuple[Any, str, Any]]] = {  # in the modules that use them
    "row sums on the tensor core": [
        (prefill_attention_triton, "row_sums", _plain_row_sums),
        (attention_tree_triton, "row_sums", _plain_row_sums),
    ],
    "exact sums of squares": [
        (attention_tree_triton, "head_sums_of_squares", _plain_head_sums),
        (norm_triton, "row_sum_of_squares", _plain_row_squares),
    ],
    "merging of chunks": [(prefill_attention_triton, "merge_chunk", _last_chunk)],
}
PROCESSES = (("row sums on the tensor core",), ("exact sums of squares", "merging of chunks"))
"""Rules that one process replaces together: their kernels differ."""


def measure(cases: Cases) -> list[Row]:
    """A row per case: us, bytes, flops, floor_us, fraction of the floor; beside it, us of others and ours / theirs."""
    rows = []
    public_ms = None if cases.setting is SMOKE else PUBLIC_FUSED_MOE_MS
    for case in chain(cases.layer(), expert_cases(cases, public_ms), cases.head()):
        us = _graph_us(case.launches)
        floor_us = 1e6 * max(case.num_bytes / BYTES_PER_S, case.flops / FLOPS_PER_S)
        beside: dict[str, Row] = {}
        for name, them in case.beside.items():
            their_us = float(them) if isinstance(them, (int, float)) else _graph_us(them)
            beside[name] = {"us": their_us, "ratio": us / their_us}
        row: Row = {"kernel": case.kernel, "rows": case.rows, "us": us}
        row |= {"bytes": case.num_bytes, "flops": case.flops, "floor_us": floor_us}
        rows.append(row | {"fraction_of_floor": floor_us / us, "beside": beside})
    return rows


def rule_cases(cases: Cases, rule: str) -> Iterator[Case]:
    """What is measured with and without a rule of ``REPLACED``."""
    s = cases.setting
    fewest, most, most_decode = s.rows[0], s.rows[-1], max(m for m in s.rows if m <= MAX_DECODE_ROWS)
    if rule == "exact sums of squares":
        yield cases.decode(fewest, s.contexts[0])
        yield cases.rope(most)
        yield from (cases.merge(m) for m in (fewest, most))
        yield cases.combine(most)
    else:
        yield cases.prefill(*s.prefills[-1])
        if rule == "row sums on the tensor core":
            yield cases.decode(fewest, s.contexts[0])
            yield cases.decode(most_decode, s.contexts[-1])


def measure_rules(cases: Cases) -> list[Row]:
    """A row per rule and kernel: us with and without, and their ratio."""
    rows: list[Row] = []
    s = cases.setting

    def add(rule: str, case: Case, without_us: float) -> None:
        with_us = _graph_us(case.launches)
        row = {"rule": rule, "kernel": case.kernel, "rows": case.rows}
        rows.append(row | {"with_us": with_us, "without_us": without_us, "ratio": with_us / without_us})

    for rules in PROCESSES:
        without = _without(rules, s is SMOKE)
        for rule in rules:
            for case, us in zip(rule_cases(cases, rule), without[rule], strict=True):
                add(rule, case, us)
    one_chunk = cases.prefill(*s.prefills[-1], tree=AttentionTree(inner_keys=128, chunk_keys=32768))
    rule = f"chunks of {TREE.chunk_keys} keys against one, which masks every block"
    add(rule, cases.prefill(*s.prefills[-1]), _graph_us(one_chunk.launches))
    for m in (s.rows[0], s.rows[-1]):
        one_chain_us = _graph_us(cases.o_proj(m, 1).launches)
        add(f"{PARTS['row']} parts against one chain", cases.o_proj(m, PARTS["row"]), one_chain_us)
    return rows


def _without(rules: Sequence[str], smoke: bool) -> dict[str, list[float]]:
    """Microseconds of the rules' cases in a fresh process that replaces their device functions first."""
    usual_cache = os.environ.get("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "us.json"
        command = [sys.executable, __file__, "--output", str(output), "--without", *rules]
        environment = os.environ | {"TRITON_CACHE_DIR": str(Path(usual_cache) / "without_rules")}
        subprocess.run(command + ["--smoke"] * smoke, env=environment, check=True, timeout=600)
        result: dict[str, list[float]] = json.loads(output.read_text())
    return result


def _replace(rules: Sequence[str]) -> None:
    for rule in rules:
        for module, name, function in REPLACED[rule]:
            assert hasattr(module, name), f"{module.__name__} has no {name} to replace"
            setattr(module, name, function)


def _graph_us(launches: Sequence[Launch]) -> float:
    """Median microseconds per launch of a graph that holds all, again and again up to ``MIN_LAUNCHES``; 1 on a CPU."""
    if not torch.cuda.is_available():
        for launch in launches:
            launch()
        return 1.0
    launches = list(launches) * -(-MIN_LAUNCHES // len(launches))
    return graph_us(launches, REPLAYS)


def _markdown(result: Row) -> str:
    """Both tables."""
    lines = [
        f"{result['device']}, torch {result['torch']}, Triton {result['triton']}, "
        f"commit {result['commit'] or 'unknown'}; floors at {BYTES_PER_S / 1e12:g} TB/s and "
        f"{FLOPS_PER_S / 1e12:g} TFLOP/s.\n",
        "| kernel | rows | us | MB | GFLOP | floor, us | of the floor | beside it: us (ours / theirs) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["kernels"]:
        beside = "; ".join(f"{name} {v['us']:.1f} ({v['ratio']:.2f})" for name, v in row["beside"].items())
        flops = f"{row['flops'] / 1e9:.2f}" if row["flops"] else ""
        lines.append(
            f"| {row['kernel']} | {row['rows']} | {row['us']:.2f} | {row['bytes'] / 1e6:.2f} | {flops} "
            f"| {row['floor_us']:.2f} | {row['fraction_of_floor']:.0%} | {beside} |"
        )
    lines += ["", "| rule | kernel | rows | us with it | us without | ratio |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {r['rule']} | {r['kernel']} | {r['rows']} | {r['with_us']:.2f} | {r['without_us']:.2f} | {r['ratio']:.2f} |"
        for r in result["rules"]
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> None:
    """Measure, print both tables, write them and the JSON; as a child, measure without some rules."""
    parser = argparse.ArgumentParser(description="Every kernel of the engine on one GPU.")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--markdown", type=Path, help="write the tables here, too")
    parser.add_argument("--commit", default="", help="recorded with the results")
    parser.add_argument(
        "--smoke", action="store_true", help="launch once in the interpreter, TRITON_INTERPRET=1"
    )
    parser.add_argument("--without", nargs="+", choices=REPLACED, default=[], help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    start_s = time.monotonic()
    if options.smoke:
        sys.path.append(str(Path(__file__).parents[1]))
        importlib.import_module("tests.kernels.triton_interpreter")
    device = torch.device("cpu" if options.smoke else "cuda")
    torch.manual_seed(0)
    cases = Cases(SMOKE if options.smoke else setting_of(read_shape(QWEN3_30B_A3B)), device)
    if options.without:
        _replace(options.without)
        times = {rule: [_graph_us(c.launches) for c in rule_cases(cases, rule)] for rule in options.without}
        options.output.write_text(json.dumps(times))
        return
    result = {
        "device": "interpreter" if options.smoke else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": options.commit,
        "command": " ".join(["python", "benchmarks/bench_kernels.py", *argv]),
        "bytes_per_s": BYTES_PER_S,
        "flops_per_s": FLOPS_PER_S,
        "kernels": measure(cases),
        "rules": measure_rules(cases),
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="ascii")
    text = _markdown(result)
    if options.markdown is not None:
        options.markdown.write_text(text, encoding="ascii")
    print(text)
    print(f"{time.monotonic() - start_s:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
