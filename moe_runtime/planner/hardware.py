"""What the planner knows of a device: one JSON file per GPU, every figure with its unit and its source.

A source begins with ``measured``, ``datasheet`` or ``modelled``. Files are in ``hardware/``, or written by
``moe-runtime calibrate``. ``attained_*`` are the rates that floors are counted by; efficiencies come from times of this
runtime's own kernels, each alone. A file without such times names another whose efficiencies it takes over.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

__all__ = ["Figure", "Hardware", "hardware_names", "load_hardware", "public_tables", "read_hardware"]

FOLDER = Path(__file__).with_name("hardware")
SOURCES = ("measured", "datasheet", "modelled")
_FIGURES = {
    "memory_bytes": "bytes",
    "memory_gbps": "GB/s",
    "attained_memory_gbps": "GB/s",
    "bf16_tflops": "TFLOP/s",
    "attained_bf16_tflops": "TFLOP/s",
    "fp8_tflops": "TFLOP/s",
    "attained_fp8_tflops": "TFLOP/s",
    "node_link_gbps": "GB/s",
    "attained_node_link_gbps": "GB/s",
    "network_gbps": "GB/s",
}
UNCALIBRATED_LAUNCH_US = 2.0
"""Of a kernel, where nothing was measured: between an empty one in a graph (0.4 to 1.3) and a small real one."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, its unit, and where it is from: ``measured``, ``datasheet`` or ``modelled``, then words."""

    value: float
    unit: str
    source: str

    @property
    def kind(self) -> str:
        """The source's first word."""
        return self.source.split(":")[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hardware:
    """One device.

    Attributes:
        name, title: How flags and people call it.
        kind: ``gpu``, or ``cpu``: one rank a core or more, all in one memory, and no graph hides the host.
        gpus_per_node: Ranks that reach each other's memory.
        num_multiprocessors: Of a GPU; cores of a CPU machine.
        figures: By name, as in ``_FIGURES``.
        kernels: Times of kernels alone: objects with ``component``, ``us``, ``bytes``, ``flops`` and ``rows``; experts
            with ``rows_per_expert``.
        exchange: Times of an exchange of rows alone, by transport, EP size and tokens of a rank.
        all_reduce: Times of a tensor-parallel group's sum alone, by form (tp_cost.py), ranks and bytes of a part.
        host: Host time of a step by rows, and by ``tp`` where a group's first rank plans for others; empty where it is
            not known.
        link_peers: Peers over whose direct links ``node_link_gbps`` is spread, where no switch lets one have it all.
        sources: Of ``num_multiprocessors``, ``kernels``, ``exchange``, ``all_reduce`` and ``host``.
        not_run_reason: Why this version of the runtime does not run there; empty where it does.
    """

    name: str
    title: str
    kind: Literal["gpu", "cpu"]
    gpus_per_node: int
    num_multiprocessors: int
    figures: Mapping[str, Figure]
    kernels: tuple[Mapping[str, Any], ...] = ()
    exchange: tuple[Mapping[str, Any], ...] = ()
    all_reduce: tuple[Mapping[str, Any], ...] = ()
    host: tuple[Mapping[str, Any], ...] = ()
    sources: Mapping[str, str]
    link_peers: int | None = None
    not_run_reason: str = ""

    def __getitem__(self, name: str) -> float:
        return self.figures[name].value

    @property
    def bytes_per_us(self) -> float:
        """Attained rate of memory."""
        return self["attained_memory_gbps"] * 1e3

    def flops_per_us(self, item_bytes: float) -> float:
        """Attained rate of products of weights of that width."""
        return (
            self["attained_fp8_tflops" if item_bytes < 1.5 and item_bytes > 0.9 else "attained_bf16_tflops"]
            * 1e6
        )

    def node_link_share(self, num_ranks: int) -> float:
        """Of the rate between GPUs of a node, what a group of so many ranks has."""
        return _link_share(self.link_peers, num_ranks)

    def node_link_bytes_per_us(self, num_ranks: int) -> float:
        """Attained rate out of a GPU, one direction, in a group of so many ranks of a node."""
        return self["attained_node_link_gbps"] * 1e3 * self.node_link_share(num_ranks)

    def uncalibrated(self) -> Hardware:
        """The same device by its datasheet alone: no times of kernels, no attained rates."""
        figures = dict(self.figures)
        for name in list(figures):
            if name.startswith("attained_"):
                figures[name] = figures[name.removeprefix("attained_")]
        sources = dict.fromkeys(self.sources, "modelled: the datasheet's rates, 2 us a launch")
        return replace(
            self, figures=figures, kernels=(), exchange=(), all_reduce=(), host=(), sources=sources
        )


def hardware_names() -> list[str]:
    """Devices known by name."""
    return sorted(path.stem for path in FOLDER.glob("*.json") if not path.stem.startswith("public_"))


@cache
def load_hardware(name: str) -> Hardware:
    """A device by name, or by the path of a file that ``moe-runtime calibrate`` wrote.

    Raises:
        ValueError: neither, or a file that breaks a rule.
    """
    path = FOLDER / f"{name}.json"
    if name not in hardware_names():
        path = Path(name)
        if path.suffix != ".json" or not path.is_file():
            known = ", ".join(hardware_names())
            raise ValueError(
                f"gpu ({name!r}) must be one of {known}, or a file that moe-runtime calibrate wrote"
            )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: cannot be read as JSON: {error}") from None
    try:
        return read_hardware(raw)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_hardware(raw: Any) -> Hardware:
    """A device from the content of its file.

    Raises:
        ValueError: with field, value and rule.
    """
    if not isinstance(raw, dict):
        raise ValueError(f"must hold a JSON object, not {type(raw).__name__}")
    if raw.get("kind") not in ("gpu", "cpu"):
        raise ValueError(f"kind ({raw.get('kind')!r}) must be gpu or cpu")
    for name in ("gpus_per_node", "num_multiprocessors"):
        if not isinstance(raw.get(name), int) or raw[name] < 1:
            raise ValueError(f"{name} ({raw.get(name)!r}) must be an integer of at least 1")
    link_peers = raw.get("link_peers")
    if link_peers is not None and (type(link_peers) is not int or link_peers < 1):
        raise ValueError(f"link_peers ({link_peers!r}) must be an integer of at least 1")
    figures = {name: _figure(raw, name, unit) for name, unit in _FIGURES.items()}
    parts = {name: tuple(raw.get(name, ())) for name in ("kernels", "exchange", "all_reduce", "host")}
    parts["exchange"] += tuple(raw.get("collective", ()))
    for name, rows in parts.items():
        for row in rows:
            _check_times(name, row)
    for row in parts["all_reduce"]:
        _check_sum(row)
    with_source = ["num_multiprocessors", *(name for name in parts if parts[name])]
    sources = {name: str(raw.get(f"{name}_source", "")) for name in with_source}
    for name, source in sources.items():
        if source.split(":")[0] not in SOURCES:
            raise ValueError(f"{name}_source ({source!r}) must begin with one of {', '.join(SOURCES)}")
    if "efficiency_of" in raw:
        other = load_hardware(str(raw["efficiency_of"]))
        for name in parts:
            if not parts[name] and getattr(other, name):
                parts[name] = _scaled(getattr(other, name), other, figures, link_peers)
                sources[name] = (
                    f"modelled: {other.name}'s efficiency at this device's rates ({other.sources[name]})"
                )
    return Hardware(
        name=str(raw.get("name", "")),
        title=str(raw.get("title", "")),
        kind=raw["kind"],
        gpus_per_node=raw["gpus_per_node"],
        num_multiprocessors=raw["num_multiprocessors"],
        figures=figures,
        sources=sources,
        link_peers=link_peers,
        not_run_reason=str(raw.get("not_run_reason", "")),
        **parts,
    )


@cache
def public_tables() -> Mapping[str, Any]:
    """Figures of others on H200 and H800, where there are none of our own; the file names their source."""
    tables: dict[str, Any] = json.loads((FOLDER / "public_h200.json").read_text(encoding="utf-8"))
    return tables


def _figure(raw: Mapping[str, Any], name: str, unit: str) -> Figure:
    entry = raw.get("figures", {}).get(name)
    if not isinstance(entry, dict):
        raise ValueError(f"figures.{name} ({entry!r}) must be an object with value, unit and source")
    value, source = entry.get("value"), entry.get("source", "")
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or value <= 0
    ):
        raise ValueError(f"figures.{name}.value ({value!r}) must be a finite positive number")
    if entry.get("unit") != unit:
        raise ValueError(f"figures.{name}.unit ({entry.get('unit')!r}) must be {unit!r}")
    if not isinstance(source, str) or source.split(":")[0] not in SOURCES:
        raise ValueError(f"figures.{name}.source ({source!r}) must begin with one of {', '.join(SOURCES)}")
    return Figure(value, unit, source)


def _check_times(part: str, row: Any) -> None:
    if not isinstance(row, dict):
        raise ValueError(f"{part} must hold objects, not {row!r}")
    for name, value in row.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and (not math.isfinite(value) or value < 0):
            raise ValueError(f"{part}: {name} ({value!r}) must be finite and not negative")
    if not row.get("us"):
        raise ValueError(f"{part}: us ({row.get('us')!r}) must be positive, in {row!r}")


def _check_sum(row: Mapping[str, Any]) -> None:
    if row.get("form") not in ("one_shot", "exchange", "collective"):
        raise ValueError(f"all_reduce: form ({row.get('form')!r}) must be one_shot, exchange or collective")
    for name, least in (("ranks", 2), ("part_bytes", 1)):
        value = row.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
            raise ValueError(f"all_reduce: {name} ({value!r}) must be a number of at least {least}")


def _link_share(link_peers: int | None, num_ranks: int) -> float:
    return min(1.0, (num_ranks - 1) / link_peers) if link_peers else 1.0


def _scaled(
    rows: tuple[Mapping[str, Any], ...],
    other: Hardware,
    figures: Mapping[str, Figure],
    link_peers: int | None,
) -> tuple[Mapping[str, Any], ...]:
    """Times of another device with the bytes and products that this one would do in them."""
    memory = figures["attained_memory_gbps"].value / other["attained_memory_gbps"]
    products = figures["attained_bf16_tflops"].value / other["attained_bf16_tflops"]

    def scaled(row: Mapping[str, Any]) -> Mapping[str, Any]:
        num_ranks = row.get("ranks", row.get("ep_size", 2))
        link = figures["attained_node_link_gbps"].value * _link_share(link_peers, num_ranks) * 1e3
        link /= other.node_link_bytes_per_us(num_ranks)
        scale = {"bytes": memory, "flops": products}
        scale |= dict.fromkeys(("bytes_out", "presum_bytes_out", "part_bytes"), link)
        return {key: value * scale[key] if key in scale else value for key, value in row.items()}

    return tuple(scaled(row) for row in rows)
