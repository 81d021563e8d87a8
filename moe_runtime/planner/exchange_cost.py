"""Time of moving rows between ranks, to the experts and home; NCCL's all-to-all. numpy only.

Where rows go: to each of the distinct ranks that a token's experts are on, once; home, one row per (token, slot)
unreduced, or one per (token, rank) where ranks pre-sum. Inside a node the runtime's own exchange, by times of it alone
between two GPUs; across nodes by DeepEP's published figures, which this runtime has not measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal

import numpy as np

from moe_runtime.planner.hardware import Hardware, public_tables
from moe_runtime.planner.roofline import Curve, FloatArray
from moe_runtime.planner.routing_load import distinct_ranks
from moe_runtime.planner.shapes import ModelShape

__all__ = ["PEER_FLAG_US", "ExchangeCost", "Transport", "all_to_all_us", "exchange_bytes", "transport_of"]

Transport = Literal["none", "symmetric", "collective", "deepep"]

LOW_LATENCY_ROWS = 256
"""Most tokens of a rank in DeepEP's low-latency mode."""
PEER_FLAG_US = 0.35
"""Modelled: what each doubling of the ranks beyond two adds to two waits for flags."""
PUBLIC_LINK_GBPS = 450.0
"""Of the H200s that NCCL was timed on, one direction."""
PUBLIC_TOKENS, PUBLIC_HIDDEN, PUBLIC_TOPK, PUBLIC_NETWORK_GBPS = 128, 7168, 8, 50.0
ACROSS_LATENCY_US = 30.0
"""Modelled: of a normal-mode call across nodes; 26 us is what one takes inside a node at one token."""


def transport_of(hardware: Hardware, ep_size: int) -> Transport:
    """What ``--dispatcher auto`` takes, and across the nodes of GPUs DeepEP, which has to be asked for."""
    if ep_size == 1:
        return "none"
    if ep_size <= hardware.gpus_per_node:
        return "symmetric"
    return "deepep" if hardware.kind == "gpu" else "collective"


def exchange_bytes(shape: ModelShape, ep_size: int, *, presums: bool) -> tuple[float, float]:
    """Bytes that leave a rank per token of its own: with dispatch, and with rows home (its share of all tokens')."""
    away = (ep_size - 1) / ep_size
    row = shape.hidden * shape.activation_bytes
    ranks = distinct_ranks(shape.num_experts, shape.num_topk, ep_size)
    return ranks * away * (row + 8 * shape.num_topk), (ranks if presums else shape.num_topk) * away * row


class ExchangeCost:
    """Dispatch and combine of one layer.

    Args:
        shape: Model.
        hardware: Device.
        ep_size: Ranks.
        transport: What moves rows.
        presums: Ranks add the slots they hold of a token before these travel.
        small_kernel_us: A launch that moves next to nothing.
        dispatch_item_bytes: Of an element on the way to the experts; that of activations by default.
        max_nodes: Most nodes that a token's experts are on, where the model limits them.
    """

    def __init__(
        self,
        shape: ModelShape,
        hardware: Hardware,
        ep_size: int,
        transport: Transport,
        *,
        presums: bool,
        small_kernel_us: float,
        dispatch_item_bytes: float | None = None,
        max_nodes: int | None = None,
    ) -> None:
        self.shape, self.hardware, self.ep_size, self.transport = shape, hardware, ep_size, transport
        self.presums, self.small_kernel_us = presums, small_kernel_us
        self.item_bytes = dispatch_item_bytes or float(shape.activation_bytes)
        self.num_nodes = max(1, ep_size // hardware.gpus_per_node)
        self.max_nodes = max_nodes or self.num_nodes
        self.bytes_out, self.bytes_home = exchange_bytes(shape, ep_size, presums=presums)
        self._curve = _link_curve(hardware) if transport == "symmetric" else None
        self.source = self._source()

    def us(self, rows: FloatArray) -> FloatArray:
        """Microseconds of a layer in which the busiest rank has so many tokens of its own."""
        if self.transport == "none":
            return np.zeros_like(rows)
        if self.transport == "deepep":
            return np.where(rows <= LOW_LATENCY_ROWS, self._low_latency_us(rows), self._across_nodes_us(rows))
        if self.hardware.kind == "cpu" or self.transport == "collective":
            return self._measured_us(rows)
        assert self._curve is not None, "symmetric exchanges have a curve"
        num_bytes = rows * (self.bytes_out + self.bytes_home)
        floor_us = num_bytes / self.hardware.node_link_bytes_per_us(self.ep_size)
        us = self._curve.us(num_bytes, floor_us) + 2 * self.small_kernel_us
        us += PEER_FLAG_US * np.log2(self.ep_size / 2)
        if self.presums:  # a kernel of its own reads the slots that the rank holds and adds them
            slots = rows * self.shape.num_topk * self.shape.hidden * self.shape.activation_bytes
            us += self.small_kernel_us + slots / self.hardware.bytes_per_us
        return us

    def _low_latency_us(self, rows: FloatArray) -> FloatArray:
        """Every (token, slot) by itself, unreduced, both ways."""
        table = public_tables()["deepep_by_ep_size"]["rows"]
        sizes = np.log([row["ep_size"] for row in table])
        width = self.shape.hidden / PUBLIC_HIDDEN * self.shape.num_topk / PUBLIC_TOPK
        scale = rows / PUBLIC_TOKENS * width * PUBLIC_NETWORK_GBPS / self.hardware["network_gbps"]
        us = np.zeros_like(rows, dtype=np.float64)
        for column, item in (
            ("dispatch_us", self.item_bytes),
            ("combine_us", self.shape.activation_bytes / 2),
        ):
            at_128 = np.interp(np.log(self.ep_size), sizes, [row[column] for row in table])
            latency = 12.0  # measured: DeepEP at one token inside a node
            us = us + latency + (at_128 - latency) * scale * item
        return us

    def _across_nodes_us(self, rows: FloatArray) -> FloatArray:
        """One row per (token, node) out, and home as many where they are pre-summed, else every slot."""
        table = public_tables()["deepep_across_nodes_gbps"]["rows"]
        sizes = np.log([row["ep_size"] for row in table])
        nodes = min(
            distinct_ranks(self.shape.num_experts, self.shape.num_topk, self.num_nodes), self.max_nodes
        )
        slots = self.shape.num_topk * (self.num_nodes - 1) / self.num_nodes
        us = np.full_like(rows, 2 * ACROSS_LATENCY_US, dtype=np.float64)
        for column, num, item in (
            ("dispatch_gbps", nodes, self.item_bytes),
            ("combine_gbps", nodes if self.presums else slots, self.shape.activation_bytes),
        ):
            gbps = np.interp(np.log(self.ep_size), sizes, [row[column] for row in table])
            gbps *= self.hardware["network_gbps"] / PUBLIC_NETWORK_GBPS
            us = us + rows * num * self.shape.hidden * item / (gbps * 1e3)
        return us

    def _measured_us(self, rows: FloatArray) -> FloatArray:
        """Between measured tokens of a rank linearly, between measured numbers of ranks by the nearest one above."""
        table = [row for row in self.hardware.exchange if row["transport"] == self.transport]
        if not table:
            raise ValueError(
                f"exchange of transport {self.transport!r} was not measured on {self.hardware.name}"
            )
        sizes = sorted({row["ep_size"] for row in table})
        size = next((size for size in sizes if size >= self.ep_size), sizes[-1])
        points = sorted((row["tokens"], row["us"]) for row in table if row["ep_size"] == size)
        tokens, us = np.array(points, dtype=np.float64).T
        if len(points) == 1:
            return np.full_like(rows, us[0], dtype=np.float64)
        slope = (us[-1] - us[-2]) / (tokens[-1] - tokens[-2])
        beyond = np.maximum(rows - tokens[-1], 0) * max(0.0, slope)
        found: FloatArray = np.interp(rows, tokens, us) + beyond
        return found

    def _source(self) -> str:
        if self.transport == "none":
            return "modelled: one rank, nothing travels"
        if self.transport == "deepep":
            return f"{public_tables()['deepep_by_ep_size']['source']}; not measured with this runtime"
        return self.hardware.sources.get("exchange", "modelled: the link's datasheet rate")


def all_to_all_us(num_bytes: FloatArray, num_ranks: int, hardware: Hardware) -> FloatArray:
    """NCCL's all-to-all between the ranks of a node; public figures of an H200.

    Args:
        num_bytes: That a rank sends, its own share included.
        num_ranks: Taken as the next of 2, 4 and 8.
        hardware: Its link's rate scales what lies beyond the latency.
    """
    if num_ranks == 1:
        return np.zeros_like(num_bytes)
    keys, us = _nccl_points(next((n for n in (2, 4, 8) if n >= num_ranks), 8))
    found = np.interp(np.log(np.maximum(num_bytes, 1.0)), keys, us)
    found = np.maximum(found, us[-1] * num_bytes / np.exp(keys[-1]))
    latency_us = float(us[0])
    here = hardware["node_link_gbps"] * hardware.node_link_share(num_ranks)
    us_here: FloatArray = latency_us + np.maximum(found - latency_us, 0) * (PUBLIC_LINK_GBPS / here)
    return us_here


@cache
def _nccl_points(num_ranks: int) -> tuple[FloatArray, FloatArray]:
    """Logarithms of bytes, and microseconds, both ascending: a larger message is taken to take no less time."""
    rows = [row for row in public_tables()["nccl"] if row["op"] == "alltoall" and row["ranks"] == num_ranks]
    points = np.array(sorted((row["bytes"], row["us"]) for row in rows), dtype=np.float64)
    smallest_first: FloatArray = np.minimum.accumulate(points[::-1, 1])[::-1]
    return np.log(points[:, 0]), smallest_first


@cache
def _link_curve(hardware: Hardware) -> Curve:
    """What an exchange costs beyond the kernels that it shares with one GPU, by bytes."""
    rows: Sequence[Mapping[str, Any]] = sorted(
        (row for row in hardware.exchange if row["transport"] == "symmetric" and "bytes_out" in row),
        key=lambda row: float(row["bytes_out"]),
    )
    if not rows:
        return Curve(np.zeros(1), np.ones(1), 5.0, "modelled: the link's datasheet rate, 5 us an exchange")
    num_bytes = np.array([row["bytes_out"] for row in rows], dtype=np.float64)
    us = np.array([row["exposed_us"] for row in rows], dtype=np.float64)
    floor_us = num_bytes / [hardware.node_link_bytes_per_us(row["ep_size"]) for row in rows]
    latency_us = float(us[0] - floor_us[0])
    efficiency = floor_us / np.maximum(us - latency_us, 1e-3)
    return Curve(np.log(num_bytes), efficiency, latency_us, hardware.sources["exchange"])
