"""A device file from measured times: what was timed here over what another file says. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_runtime.planner.hardware import FOLDER, hardware_names, read_hardware

__all__ = ["base_of", "device_file", "write_device"]

_Row = Mapping[str, Any]


def base_of(like: str) -> dict[str, Any]:
    """The content of the file that a calibration starts from.

    Raises:
        ValueError: there is no such device or file.
    """
    path = FOLDER / f"{like}.json" if like in hardware_names() else Path(like)
    if path.suffix != ".json" or not path.is_file():
        raise ValueError(
            f"like ({like!r}) must be one of {', '.join(hardware_names())}, or a file written before"
        )
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def device_file(
    base: _Row,
    *,
    name: str,
    title: str,
    software: str,
    memory_bytes: int,
    num_multiprocessors: int,
    kernels: Sequence[_Row] = (),
    exchange: Sequence[_Row] = (),
    all_reduce: Sequence[_Row] = (),
    attained: Mapping[str, float] | None = None,
    exchange_from: str = "moe-runtime calibrate",
) -> dict[str, Any]:
    """What to write.

    Args:
        base: A file's content: datasheet, node size, and what was not timed here.
        name, title: Of the machine.
        software: Versions, for the sources.
        memory_bytes, num_multiprocessors: As the machine reports them.
        kernels: Times of kernels; empty keeps the base's.
        exchange: Times of exchanges; those of the base with another transport or number of ranks stay.
        all_reduce: Times of a group's sums; those of the base with other numbers of ranks stay.
        attained: Measured rates by figure, such as ``attained_memory_gbps``.
        exchange_from: What timed the exchanges.
    """
    figures = {key: dict(value) for key, value in base["figures"].items()}
    figures["memory_bytes"] = _measured(memory_bytes, "bytes", f"what the system reports; {software}")
    for key, value in (attained or {}).items():
        figures[key] = _measured(value, figures[key]["unit"], f"moe-runtime calibrate; {software}")
        plain = key.removeprefix("attained_")
        if figures[plain]["value"] < value:  # a datasheet that is another machine's
            figures[plain] = figures[key]
    made = {
        **base,
        "name": name,
        "title": title,
        "num_multiprocessors": num_multiprocessors,
        "num_multiprocessors_source": f"measured: what the system reports; {software}",
        "figures": figures,
    }
    made.pop("not_run_reason", None)
    where = f"{title}, {software}"
    source = f"measured: moe-runtime calibrate; {where}"
    if kernels:
        made |= {"kernels": list(kernels), "kernels_source": source}
    if exchange:
        timed = {(row["transport"], row["ep_size"]) for row in exchange}
        kept = [row for row in base.get("exchange", ()) if (row["transport"], row["ep_size"]) not in timed]
        made |= {"exchange": [*kept, *exchange], "exchange_source": f"measured: {exchange_from}; {where}"}
    if all_reduce:
        sizes = {row["ranks"] for row in all_reduce}
        kept = [row for row in base.get("all_reduce", ()) if row["ranks"] not in sizes]
        made |= {"all_reduce": [*kept, *all_reduce], "all_reduce_source": source}
    if kernels and exchange:
        made.pop("efficiency_of", None)
    read_hardware(made)  # what is written can be read
    return made


def write_device(content: _Row, path: Path) -> None:
    """One object a line in lists, so that changes can be read."""
    lines = []
    for key, value in content.items():
        if isinstance(value, list) and value:
            rows = ",\n".join(f"  {json.dumps(row)}" for row in value)
            lines.append(f" {json.dumps(key)}: [\n{rows}\n ]")
        elif isinstance(value, dict) and value:
            rows = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            lines.append(f" {json.dumps(key)}: {{\n{rows}\n }}")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _measured(value: float, unit: str, words: str) -> dict[str, Any]:
    return {"value": value, "unit": unit, "source": f"measured: {words}"}
