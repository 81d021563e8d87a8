"""What the results of ``ep8.py`` say: digests, and what is not as it should be. Pure functions of its JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["check_reports", "digests", "faults", "results_of", "unfinished"]

Document = dict[str, Any]


def results_of(document: Document, part: str) -> Iterator[tuple[Document, Any]]:
    """Each program of a part that has a result, perhaps half of it: its entry and the result."""
    for step in document["steps"]:
        for command in step["commands"] if step["part"] == part else ():
            if command["result"] is not None:
                yield command, command["result"]


def check_reports(document: Document) -> list[tuple[str, Any]]:
    """Name and report of every check, as far as it came."""
    return [(command["name"], report) for command, report in results_of(document, "check")]


def digests(document: Document) -> dict[str, dict[str, list[str]]]:
    """By model, each digest of the reference batch and the checks that have it; there must be one."""
    found: dict[str, dict[str, list[str]]] = {}
    for name, report in check_reports(document):
        by_digest = found.setdefault(report["facts"]["model"], {})
        by_digest.setdefault(report["digest"], []).append(name)
    return found


def faults(document: Document) -> list[str]:
    """One sentence for each thing that is wrong; what was left out for want of time is none."""
    found = [
        f"{step['name']}: {step['state']}, {step['reason']}"
        for step in document["steps"]
        if step["state"] in ("failed", "cut off")
    ]
    for by_digest in digests(document).values():
        if len(by_digest) > 1:
            groups = "; ".join(f"{', '.join(names)}: {digest[:16]}" for digest, names in by_digest.items())
            found.append(f"the digests differ: {groups}")
    for command, result in results_of(document, "dispatch"):
        found += [f"{command['name']}: {fault}" for fault in _dispatch_faults(result)]
    for _, result in results_of(document, "server"):
        if result["repeated_equal"] != result["repeated"]:
            num_other = result["repeated"] - result["repeated_equal"]
            found.append(f"{num_other} of {result['repeated']} answers differ from those in company")
        if result["incomplete"]:
            found.append(f"{result['incomplete']} of {result['requests']} answers are not complete")
    return found


def unfinished(document: Document) -> list[str]:
    """What was left out for want of time, by the script or by a benchmark itself."""
    found = [f"{step['name']}: {step['reason']}" for step in document["steps"] if step["state"] == "left out"]
    for command, result in results_of(document, "dispatch"):
        rows = result["results"]
        found += [f"{command['name']}: {row['what']}" for row in rows if row.get("kind") == "left out"]
    return found


def _dispatch_faults(result: Document) -> list[str]:
    found = []
    for row in result["results"]:
        if "error" in row:
            found.append(f"{row['kind']} of {row['tokens_per_rank']} tokens: {row['error']}")
        if row.get("bits", "bits equal") != "bits equal":
            found.append(f"{row['kind']} of {row['tokens_per_rank']} tokens: {row['bits']}")
    for row in [*result["results"], *result.get("all_reduce", ())]:
        wrong = [form["form"] for form in row.get("ours", ()) if form["bits"] != "equal"]
        if wrong:
            found.append(f"all-reduce of {row['parts']} {row['shape']}: other bits by {', '.join(wrong)}")
    return found
