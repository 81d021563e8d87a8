"""JSON form of a placement: what ``--initial-placement FILE`` reads and what goes over HTTP. Checked field by field.

    {
      "format": "moe-runtime-placement",
      "version": 1,
      "num_logical_experts": 4,
      "slots_per_rank": [3, 2],
      "physical_to_logical_map": [[0, 1, 2, 3, 0], [3, 2, 1, 0, 3]],
      "sha256": "..."
    }

``physical_to_logical_map`` has a list per layer: the physical experts of rank 0, then those of rank 1, ...
``sha256`` may be left out; if it is there it must be the placement's.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moe_runtime.eplb.placement import ModelPlacement

__all__ = ["check_fits", "placement_from_json", "placement_to_json", "read_placement", "write_placement"]

FORMAT = "moe-runtime-placement"
VERSION = 1
REQUIRED = ("format", "version", "num_logical_experts", "slots_per_rank", "physical_to_logical_map")


def placement_to_json(placement: ModelPlacement) -> dict[str, Any]:
    """The placement as JSON values, its hash included."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "num_logical_experts": placement.num_logical_experts,
        "slots_per_rank": list(placement.slots_per_rank),
        "physical_to_logical_map": placement.physical_to_logical_map.tolist(),
        "sha256": placement.sha256,
    }


def placement_from_json(value: object) -> ModelPlacement:
    """The placement that JSON values describe; ``ValueError`` names the first field that breaks a rule."""
    if not isinstance(value, Mapping):
        raise ValueError(f"a placement ({_short(value)}) must be a JSON object")
    for name in REQUIRED:
        if name not in value:
            raise ValueError(f"{name} is missing; a placement must have {', '.join(REQUIRED)}")
    unknown = sorted(str(name) for name in value if name not in (*REQUIRED, "sha256"))
    if unknown:
        raise ValueError(f"{unknown[0]} is not a field of a placement ({', '.join(REQUIRED)}, sha256)")
    if value["format"] != FORMAT:
        raise ValueError(f"format ({_short(value['format'])}) must be {FORMAT!r}")
    if _integer(value["version"], "version", 0) != VERSION:
        raise ValueError(f"version ({value['version']}) must be {VERSION}")
    num_logical = _integer(value["num_logical_experts"], "num_logical_experts", 1)
    slots = [
        _integer(s, f"slots_per_rank[{i}]", 0)
        for i, s in enumerate(_list(value["slots_per_rank"], "slots_per_rank"))
    ]
    layers = _list(value["physical_to_logical_map"], "physical_to_logical_map")
    rows = []
    for layer, row in enumerate(layers):
        name = f"physical_to_logical_map[{layer}]"
        experts = [_integer(e, f"{name}[{i}]", 0) for i, e in enumerate(_list(row, name))]
        if len(experts) != sum(slots):
            raise ValueError(
                f"{name} ({len(experts)} physical experts) must have as many as slots_per_rank adds up to "
                f"({sum(slots)})"
            )
        if max(experts) >= num_logical:
            slot = next(i for i, e in enumerate(experts) if e >= num_logical)
            raise ValueError(
                f"{name}[{slot}] ({experts[slot]}) must be a logical expert in [0, {num_logical})"
            )
        rows.append(experts)
    placement = ModelPlacement(
        physical_to_logical_map=np.array(rows, dtype=np.int64),
        first_expert=(0, *itertools.accumulate(slots)),
        num_logical_experts=num_logical,
    )
    stated = value.get("sha256", placement.sha256)
    if stated != placement.sha256:
        raise ValueError(f"sha256 ({_short(stated)}) must be that of the maps ({placement.sha256})")
    return placement


def check_fits(placement: ModelPlacement, num_layers: int, num_logical_experts: int, ep_size: int) -> None:
    """Refuse a placement made for another model or another number of ranks."""
    rules = [
        ("layers", placement.num_layers, "the model's mixture-of-experts layers", num_layers),
        ("num_logical_experts", placement.num_logical_experts, "the model's", num_logical_experts),
        ("ranks (slots_per_rank)", placement.ep_size, "ep_size", ep_size),
    ]
    for name, value, rule, expected in rules:
        if value != expected:
            raise ValueError(f"{name} of the placement ({value}) must equal {rule} ({expected})")


def read_placement(path: Path) -> ModelPlacement:
    """Read a placement file; each error names the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"placement file {path} cannot be read: {error}") from error
    try:
        return placement_from_json(json.loads(text, object_pairs_hook=_without_repeats))
    except json.JSONDecodeError as error:
        raise ValueError(f"placement file {path} is not JSON: {error}") from error
    except ValueError as error:
        raise ValueError(f"placement file {path}: {error}") from error


def write_placement(path: Path, placement: ModelPlacement) -> None:
    """Write a placement file, one line per layer."""
    fields = placement_to_json(placement)
    rows = ",\n".join(f"    {json.dumps(row)}" for row in fields["physical_to_logical_map"])
    lines = [
        f'  "physical_to_logical_map": [\n{rows}\n  ]'
        if name == "physical_to_logical_map"
        else f"  {json.dumps(name)}: {json.dumps(field)}"
        for name, field in fields.items()
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"{name} must not be given twice")
        fields[name] = value
    return fields


def _list(value: object, name: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name} ({_short(value)}) must be a list that is not empty")
    return value


def _integer(value: object, name: str, minimum: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value < 1 << 31:
        raise ValueError(f"{name} ({_short(value)}) must be an integer, at least {minimum}, below 2**31")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
