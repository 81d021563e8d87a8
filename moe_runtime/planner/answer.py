"""Everything that one call of ``plan`` finds out, and its JSON form; tables and plots are made of this alone."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moe_runtime.planner.config import PlanConfig
from moe_runtime.planner.cpu_cost import cost_model
from moe_runtime.planner.fleet import EP_SIZES, Candidate, FleetSearch, candidates, cheapest, nearest, pareto
from moe_runtime.planner.invariance_price import (
    SETTINGS,
    CombineTraffic,
    Price,
    RedundancyPrice,
    combine_traffic,
    price,
    redundancy_price,
)
from moe_runtime.planner.routing_load import BalanceRow, balance_rows, skewed_counts
from moe_runtime.planner.serving_point import MAX_LOAD

__all__ = ["Answer", "answer", "candidate_row", "launch_line"]

EXAMPLE_SKEW = 0.4
"""Exponent of the skew that copies are shown for where no expert load is given."""
LARGEST_SHOWN_EP = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was found.

    Attributes:
        config, search: What was asked.
        found: Every layout that fits the memory.
        front: Of these, the Pareto front of tokens per second and GPU against tokens per second and user.
        best: The smallest fleet that meets everything; else the nearest, or None.
        fits: Whether the best one meets everything within the GPUs asked for.
        nearest: In words, where it does not.
        price, traffic, redundancy, balance: Of the best one; None and empty without one.
    """

    config: PlanConfig
    search: FleetSearch
    found: Sequence[Candidate]
    front: Sequence[Candidate]
    best: Candidate | None
    fits: bool
    nearest: str
    price: Price | None
    traffic: Sequence[CombineTraffic]
    redundancy: Sequence[RedundancyPrice]
    balance: Sequence[BalanceRow]

    @property
    def sources(self) -> dict[str, str]:
        """Where each kind of figure is from."""
        hardware = self.search.hardware
        found = {name: figure.source for name, figure in hardware.figures.items()}
        if self.best is not None:
            model = cost_model(self.search.shape, hardware, self.best.topology, greedy=self.search.greedy)
            found |= model.sources()
        return found | {
            "memory": "modelled: the engine's own arithmetic; 600 MiB for the driver",
            "TTFT, TPOT, tokens/s, requests/s": f"modelled: steady state of Poisson arrivals, at {MAX_LOAD:.0%} of the "
            "greatest rate; no queue before admission",
            "balancedness": "modelled: eplb's planner"
            + (
                f" on Zipf loads of {EXAMPLE_SKEW}"
                if self.search.expert_load is None
                else " on the expert load given"
            ),
        }

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        shape, hardware = self.search.shape, self.search.hardware
        return {
            "fits": self.fits,
            "nearest": self.nearest,
            "model": {
                "architecture": shape.architecture,
                "num_parameters": shape.num_parameters,
                "num_active_parameters": shape.num_active_parameters,
                "weight_bytes": shape.weight_bytes(),
                "kv_bytes_per_token": shape.kv_token_bytes(),
                "runs_here": shape.runs_here,
                "not_run_reason": shape.not_run_reason,
            },
            "gpu": {
                "name": hardware.name,
                "title": hardware.title,
                "not_run_reason": hardware.not_run_reason,
            },
            "workload": asdict(self.search.workload),
            "best": None if self.best is None else candidate_row(self, self.best),
            "pareto": [candidate_row(self, c) for c in self.front],
            "num_layouts": len(self.found),
            "price_of_invariance": None
            if self.price is None
            else asdict(self.price) | {"share": self.price.total},
            "combine_traffic": [asdict(row) for row in self.traffic],
            "redundancy": [asdict(row) for row in self.redundancy],
            "settings": [dict(zip(("setting", "topology", "batch"), row, strict=True)) for row in SETTINGS],
            "sources": self.sources,
        }


def answer(config: PlanConfig) -> Answer:
    """Search, choose, and price what was chosen.

    Raises:
        ValueError: model, device or expert load cannot be read or do not go together.
    """
    search = config.search()
    found = candidates(search)
    best, words = cheapest(found), ""
    fits = best is not None
    if best is None:
        words, best = nearest(search, found)
    found_price, traffic, redundancy, balance = None, [], [], []
    if best is not None:
        node = search.hardware.gpus_per_node
        sizes = [n for n in EP_SIZES if 1 < n <= LARGEST_SHOWN_EP and (n % node == 0 or node % n == 0)]
        sizes = [n for n in sizes if n <= search.shape.num_experts]
        traffic = combine_traffic(search, sizes) if search.hardware.kind == "gpu" else []
        found_price = price(search, best)
        balance = _balance(search, best)
        redundancy = redundancy_price(search, best, balance)
    return Answer(
        config=config,
        search=search,
        found=found,
        front=pareto(found),
        best=best,
        fits=fits,
        nearest=words,
        price=found_price,
        traffic=traffic,
        redundancy=redundancy,
        balance=balance,
    )


def candidate_row(whole: Answer, candidate: Candidate) -> dict[str, Any]:
    """One layout as plain data."""
    memory, topology = candidate.memory, candidate.topology
    return {
        "gpus": candidate.gpus,
        "ep_size": topology.ep_size,
        "tp": topology.tp,
        "replicas": candidate.replicas,
        "num_redundant_experts": topology.num_redundant_experts,
        "batch_per_group": candidate.batch,
        "max_num_batched_tokens": candidate.max_num_batched_tokens,
        "ttft_s": candidate.ttft_s,
        "tpot_s": candidate.tpot_s,
        "tokens_per_s_per_gpu": candidate.tokens_per_s_per_gpu,
        "tokens_per_s_per_user": candidate.tokens_per_s_per_user,
        "requests_per_s": candidate.requests_per_s,
        "max_concurrency": candidate.max_concurrency,
        "balancedness": candidate.balancedness,
        "meets": candidate.meets,
        "runs_here": whole.search.shape.runs_here and not whole.search.hardware.not_run_reason,
        "memory_bytes": {
            "weights": memory.weight_bytes,
            "spare": memory.spare_bytes,
            "activations": memory.buffers.activations,
            "exchange": memory.buffers.exchange,
            "workspace": memory.buffers.workspace,
            "graph pools and kernels": memory.reserve_bytes,
            "kv_used": _kv_used(whole.search, candidate),
            "kv_room": max(0, memory.num_kv_blocks) * memory.block_bytes,
            "usable": memory.usable_bytes,
            "total": memory.total_bytes,
        },
        "launch": launch_line(whole, candidate),
    }


def _kv_used(search: FleetSearch, candidate: Candidate) -> int:
    """Bytes that the batch's sequences take at full length."""
    memory = candidate.memory
    return candidate.batch * -(-search.workload.num_tokens // 64) * memory.block_bytes


def launch_line(
    whole: Answer, candidate: Candidate, *, max_model_len: int | None = None, max_num_seqs: int | None = None
) -> str:
    """How to start one replica.

    Args:
        whole: The answer.
        candidate: The layout.
        max_model_len: Longest request; by default the workload's.
        max_num_seqs: Of a group; by default the layout's batch.
    """
    topology, search, config = candidate.topology, whole.search, whole.config
    node = search.hardware.gpus_per_node
    nodes = max(1, topology.ep_size // node)
    torchrun = f"torchrun --nproc-per-node {topology.ep_size // nodes}"
    if nodes > 1:
        torchrun += f" --nnodes {nodes} --node-rank RANK --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    model = config.model.removesuffix("/config.json")
    flags = [
        f"-m moe_runtime.serve --model {shlex.quote(model)} "
        f"--max-model-len {max_model_len or search.workload.num_tokens}",
        f"--max-num-seqs {max_num_seqs or candidate.batch} --max-num-batched-tokens {candidate.max_num_batched_tokens}",
    ]
    if topology.tp > 1:
        flags.append(f"--tp {topology.tp}")
    if topology.num_redundant_experts:
        flags.append(f"--num-redundant-experts {topology.num_redundant_experts}")
    if topology.level != "topology":
        flags.append(f"--invariance {topology.level}")
    if nodes > 1 and search.hardware.kind == "gpu":
        flags.append("--dispatcher deepep")
    if search.hardware.kind == "cpu":
        flags.append("--device cpu")
    if config.gpu_memory_utilization != 0.9:
        flags.append(f"--gpu-memory-utilization {config.gpu_memory_utilization:g}")
    return " ".join([torchrun, *flags])


def _balance(search: FleetSearch, best: Candidate) -> list[BalanceRow]:
    size, experts = best.topology.ep_size, search.shape.num_experts
    counts = search.expert_load
    if counts is None:
        counts = skewed_counts(experts, EXAMPLE_SKEW)
    if size == 1:
        return balance_rows(counts, 1, (0,))
    first = -experts % size or size
    extras = [0, first, first + size, first + 2 * size, first + 3 * size]
    return balance_rows(counts, size, tuple(n for n in extras if n <= experts * (size - 1)))
