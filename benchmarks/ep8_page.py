"""The Markdown page of ``ep8.py``'s results: a pure function of its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ep8_results import check_reports, digests, faults, results_of, unfinished

__all__ = ["make_page"]

PUBLISHED_STEADY = (
    "Published for 8 B200, 256 sequences per GPU, 1,024 output tokens: about 25,100 tokens/s with invariance, 25,400 "
    "without. Other hardware; not measured here."
)
Document = dict[str, Any]


def make_page(document: Document) -> str:
    """The page: what ran where, the verdict, a section for each part that has results, and what went wrong."""
    sections = [
        _head(document),
        _steps(document),
        _check(document),
        _dispatch(document),
        _engine(document),
        _server(document),
        _last_lines(document),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _head(document: Document) -> str:
    found, missing = faults(document), unfinished(document)
    lines = [f"# Expert parallelism over {document['ranks']} ranks: one run", ""]
    if found:
        lines += ["Not as it should be:", "", *(f"- {fault}" for fault in found), ""]
    elif document["is_complete"]:
        lines += ["Everything that ran passed." if missing else "Everything ran and passed.", ""]
    else:
        lines += ["The run was cut off; what is here passed.", ""]
    if missing:
        lines += ["Left out for want of time:", "", *(f"- {what}" for what in missing), ""]
    facts = [
        ("command", f"`{document['command']}`"),
        ("commit", document["commit"]),
        ("started", document["started"]),
        ("devices", document["devices"]),
        ("versions", ", ".join(f"{name} {version}" for name, version in document["versions"].items())),
        ("seconds", f"{document['wall_s']:.0f} of {document['budget_s']:.0f}"),
    ]
    return "\n".join([*lines, _table(("", ""), facts)])


def _steps(document: Document) -> str:
    rows = [
        (
            step["part"],
            step["name"],
            step["state"],
            f"{step['expected_s']:.0f}",
            f"{step['wall_s']:.0f}" if step["state"] != "left out" else "-",
        )
        for step in document["steps"]
    ]
    return _section("Steps", _table(("part", "step", "state", "expected s", "took s"), rows))


def _check(document: Document) -> str:
    reports = check_reports(document)
    if not reports:
        return ""
    rows = []
    for name, report in reports:
        ran = [axis for axis in report["axes"] if not axis["not_applicable"]]
        axes = [f"{axis['name']} ({axis['num_cases']})" for axis in ran if axis["passed"]]
        failed = [f"**{axis['name']}**" for axis in ran if not axis["passed"]]
        rows.append(
            (
                name.removeprefix("check ") + ("" if report["is_complete"] else " (unfinished)"),
                f"{report['facts']['prompts']} x {report['facts']['output tokens']}",
                report["digest"][:16],
                ", ".join(axes) or "-",
                ", ".join(failed) or "-",
                f"{report['wall_s']:.0f}",
            )
        )
    parts = [
        "`moe_runtime.check`: ids, logprobs and top-5 logprobs, bit for bit. In parentheses: outputs compared. "
        "`alone`: batch against single; `graph`: CUDA graphs or none; `placement`: experts moved in the middle.",
        _table(("deployment", "prompts x tokens", "digest", "equal on", "different on", "s"), rows),
    ]
    for by_digest in digests(document).values():
        names = [name.removeprefix("check ") for group in by_digest.values() for name in group]
        verdict = "One digest" if len(by_digest) == 1 else f"**{len(by_digest)} digests**"
        parts.append(f"{verdict}: {', '.join(names)}.")
    for name, report in reports:
        parts += _deployments(name.removeprefix("check "), report)
    return _section("Check", "\n\n".join(parts))


def _deployments(name: str, report: Document) -> list[str]:
    """What the axes ``placement`` and ``topology`` ran beside the check's own deployment, and what they could not."""
    parts = []
    for axis in report["axes"]:
        equal = [which for which, num_differing in axis["deployments"].items() if not num_differing]
        other = [which for which, num_differing in axis["deployments"].items() if num_differing]
        for words, found in ((f"{axis['name']}, equal", equal), (f"{axis['name']}, **different**", other)):
            if found:
                parts.append(f"{name}, {words} on: {', '.join(found)}.")
        if axis["not_run"]:
            reasons = "; ".join(f"{which}: {reason}" for which, reason in axis["not_run"].items())
            parts.append(f"{name}, {axis['name']}, not run: {reasons}.")
    return parts


def _dispatch(document: Document) -> str:
    parts = []
    for _, result in results_of(document, "dispatch"):
        layers = {row["tokens_per_rank"]: row for row in result["results"] if row.get("kind") == "layer"}
        others = {row["tokens_per_rank"]: row for row in result["results"] if row.get("kind") == "collective"}
        if layers or others:
            parts += [_shape_words(result), _layer_table(layers, others)]
        prefill = [row for row in result["results"] if row.get("kind") == "prefill"]
        if prefill:
            rates = ", ".join(f"{row['transfer']} {row['gbps']} GB/s" for row in prefill)
            parts.append(
                f"With one barrier a transfer, {prefill[0]['tokens_per_rank']} tokens per rank: {rates}."
            )
        reduced = [row for row in [*result["results"], *result.get("all_reduce", ())] if "ours" in row]
        if reduced:
            parts += ["All-reduce with the tree, microseconds:", _all_reduce_table(reduced)]
    return _section("Dispatch, combine, all-reduce", "\n\n".join(parts)) if parts else ""


def _shape_words(result: Document) -> str:
    shapes = result["shapes"]
    link = f"; floor: bytes over {result['link_gbps']:.0f} GB/s" if "link_gbps" in result else ""
    return (
        f"Hidden {shapes['hidden']}, {shapes['experts']} experts, top-{shapes['topk']}, {shapes['dtype']}; a layer "
        f"from dispatch to combine, microseconds{link}. The library's pair: two all-to-alls of padded rows."
    )


def _layer_table(layers: dict[int, Document], others: dict[int, Document]) -> str:
    rows = []
    for tokens in sorted({*layers, *others}):
        row, other = layers.get(tokens, {}), others.get(tokens, {})
        pair = other.get("nccl_pair_us", other.get("gloo_pair_us"))
        fraction = row.get("floor_fraction")
        rows.append(
            (
                str(tokens),
                *(_cell(row.get(name)) for name in ("us", "gbps", "floor_us")),
                "-" if fraction is None else f"{fraction:.0%}",
                *(
                    _cell(value)
                    for value in (row.get("exposed_us"), row.get("dispatch_us"), row.get("rows_us"))
                ),
                *(_cell(value) for value in (pair, other.get("nccl_pair_gbps"), other.get("us"))),
                _bits_words(row, other),
            )
        )
    heads = ("tokens per rank", "symmetric", "GB/s", "floor", "of it", "exposed", "to the experts", "home")
    return _table((*heads, "library's pair", "its GB/s", "collective", "bits"), rows)


def _bits_words(row: Document, other: Document) -> str:
    words = {found["bits"].removeprefix("bits ") for found in (row, other) if "bits" in found}
    return ", ".join(sorted(words)) or "-"


def _all_reduce_table(rows: Sequence[Document]) -> str:
    libraries = list(dict.fromkeys(name for row in rows for name in row["libraries_us"]))
    body = []
    for row in rows:
        best = next(form for form in row["ours"] if form["chosen"])
        floor = row.get("floor_us")
        bits = "equal" if all(form["bits"] == "equal" for form in row["ours"]) else "**different**"
        body.append(
            (
                " x ".join(map(str, row["shape"])),
                row["parts"],
                _cell(best["us"]),
                _cell(floor),
                "-" if not floor else f"{floor / best['us']:.0%}",
                *(_cell(row["libraries_us"].get(name)) for name in libraries),
                bits,
            )
        )
    return _table(("elements", "parts", "here", "floor", "of it", *libraries, "bits"), body)


def _engine(document: Document) -> str:
    parts = []
    for _, result in results_of(document, "engine"):
        where = f"{result['num_ranks']} ranks, `{result['dispatcher']}`"
        parts.append(f"{result['model']}, {where}; loaded in {result['load_s']:.0f} s.")
        rows = []
        if "steady" in result:
            steady = result["steady"]
            what = (
                f"decode, {steady['num_seqs']} sequences, {steady['prompt_tokens']} in, "
                f"{steady['output_tokens']} out"
            )
            rows.append(
                (what, f"{steady['ms']:.2f} ms a step, {steady['decode_tokens_per_s']:,.0f} tokens/s")
            )
            rows.append(
                ("the same with its prefill", f"{steady['output_tokens_per_s']:,.0f} output tokens/s")
            )
        if "prefill" in result:
            prefill = result["prefill"]
            what = f"prefill, {prefill['num_prompts']} x {prefill['prompt_tokens']} tokens"
            rows.append((what, f"{prefill['tokens_per_s']:,.0f} tokens/s"))
        for row in result.get("decode", ()):
            what = f"decode, {row['num_seqs']} sequences of all ranks"
            rows.append((what, f"{row['ms']:.2f} ms a step, host {row['host_ms']:.2f}"))
        parts.append(_table(("workload", "result"), rows))
        if document["device"] == "cuda" and "steady" in result:
            parts.append(PUBLISHED_STEADY)
    return _section("Engine", "\n\n".join(parts)) if parts else ""


def _server(document: Document) -> str:
    parts = []
    for _, result in results_of(document, "server"):
        kinds = ", ".join(f"{count} {kind}" for kind, count in result["kinds"].items())
        rows = [
            ("requests", f"{result['requests']}, {result['streams']} open at once ({kinds})"),
            ("not complete", str(result["incomplete"])),
            ("requests/s", _cell(result["requests_per_s"])),
            ("tokens in, out", f"{result['prompt_tokens']:,}, {result['output_tokens']:,}"),
            ("output tokens/s", f"{result['output_tokens_per_s']:,.0f}"),
            ("TTFT ms p50, p90, p99", ", ".join(f"{value:.0f}" for value in result["ttft_ms"].values())),
            ("ITL ms p50, p90, p99", ", ".join(f"{value:.1f}" for value in result["itl_ms"].values())),
            ("front end, share of a core", _cell(result["front_end_share_of_a_core"])),
            ("sent again alone, equal", f"{result['repeated_equal']} of {result['repeated']}"),
            ("seconds to ready", _cell(result["ready_s"])),
        ]
        parts += [f"{result['model']}, {result['ranks']} ranks.", _table(("", ""), rows)]
    return _section("HTTP server", "\n\n".join(parts)) if parts else ""


def _last_lines(document: Document) -> str:
    parts = []
    for step in document["steps"]:
        for command in step["commands"]:
            if command["last_lines"]:
                parts.append(f"{command['name']}, exit code {command['exit_code']}:")
                parts.append("\n".join(["```", *command["last_lines"], "```"]))
    return _section("Last lines of what is not done", "\n\n".join(parts)) if parts else ""


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n{text}"


def _cell(value: float | None) -> str:
    """A number as it is, or a dash."""
    return "-" if value is None else f"{value:,}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
