"""In which order, and on which stream, parts of layers of two micro-batches are launched. Pure, no torch.

A plan is one list for all ranks. An entry runs on its lane (a stream) behind the entries of the same lane before it,
and behind those named in ``after``. Parts of a layer:

* ``attend``: from normed rows to routed ones; ``dispatch``: rows to peers' tables;
* ``await_table``, ``await_homes``: raise a flag at all peers and wait for theirs, a kernel of one program;
* ``experts_home``: experts whose last GEMM writes rows to their homes, as the engine has it; ``experts_local``: the
  same, rows for peers stay here; ``send``: sends them;
* ``combine``: the sum, residual and norm; ``combine_waiting``: with the wait in the same kernel, as the engine has it.

Why no plan waits in a circle. Only ``await_*`` and ``combine_waiting`` wait for peers, each for the flag of the very
same entry there, which an entry raises before it waits. (1) Order: entries are listed behind all that they depend on,
and all ranks launch the same list. Of the entries that some rank has not ended, take the first: all before it have
ended on every rank, so it can begin on every rank and raise its flag, and so it ends. Whether a device has a queue for
each lane or one for both makes no difference. (2) Room: "can begin" also asks for a free multiprocessor, so nothing
that waits for a peer, and nothing launched early behind it, may fill a GPU while there is another lane. ``await_*`` is
one warp; with two lanes what follows it is launched plainly, not dependent on it. ``combine_waiting`` is a program for
every row, so it stands in plans of one lane alone: with two, a rank's first lane could keep its second one off, for
whose flag the other rank waits, which keeps off its own first. ``stuck`` plays this.

Why one set of buffers for each micro-batch is enough: within one, parts stand in the order that dispatch_triton.py
argues from; rows for peers that stay here are written over by the next ``experts_local``, behind the next
``await_table``, which is behind this ``send`` in its lane.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["PLANS", "WAITING", "Entry", "Lane", "Part", "calls_of", "stuck"]

Lane = Literal["compute", "exchange"]
Part = Literal[
    "attend",
    "dispatch",
    "await_table",
    "experts_home",
    "experts_local",
    "send",
    "await_homes",
    "combine",
    "combine_waiting",
]
WAITING = ("await_table", "await_homes", "combine_waiting")
FILLING = ("combine_waiting",)
"""Of those, the ones whose programs may fill a GPU while they wait."""
BATCHES = (0, 1)
ENGINE: tuple[Part, ...] = ("attend", "dispatch", "await_table", "experts_home", "combine_waiting")
APART: tuple[Part, ...] = (
    "attend",
    "dispatch",
    "await_table",
    "experts_local",
    "send",
    "await_homes",
    "combine",
)
COMPUTE: tuple[Part, ...] = ("attend", "experts_local", "combine")
EXCHANGE: tuple[Part, ...] = ("dispatch", "await_table", "send", "await_homes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A part of a layer of a micro-batch.

    Attributes:
        lane: The stream.
        batch, part, layer: What.
        after: Entries, by their place in the plan, of other lanes.
    """

    lane: Lane
    batch: int
    part: Part
    layer: int
    after: tuple[int, ...] = ()


def serial(num_layers: int) -> list[Entry]:
    """The engine of today: a micro-batch after the other, on one stream."""
    return _in_lane("compute", ENGINE, num_layers, BATCHES)


def apart(num_layers: int) -> list[Entry]:
    """The same with rows sent home by a kernel of their own."""
    return _in_lane("compute", APART, num_layers, BATCHES)


def compute(num_layers: int) -> list[Entry]:
    """A micro-batch's compute over the tables that are there; nothing travels."""
    return _in_lane("compute", COMPUTE, num_layers, BATCHES[1:])


def exchange(num_layers: int) -> list[Entry]:
    """A micro-batch's exchange of the rows that are there."""
    return _in_lane("exchange", EXCHANGE, num_layers, BATCHES[:1])


def beside(num_layers: int) -> list[Entry]:
    """``compute`` of one micro-batch and ``exchange`` of the other on two streams, which do not wait for each other."""
    pairs = zip(_by_layer(compute(num_layers)), _by_layer(exchange(num_layers)), strict=True)
    return [entry for layers in pairs for layer in layers for entry in layer]


def pipeline(num_layers: int) -> list[Entry]:
    """Both micro-batches as an engine would run them: each one's exchange beside the other's compute."""
    plan: list[Entry] = []
    place: dict[tuple[int, Part, int], int] = {}

    def add(lane: Lane, batch: int, part: Part, layer: int, *after: tuple[int, Part, int]) -> None:
        place[batch, part, layer] = len(plan)
        waits = tuple(place[key] for key in after)
        plan.append(Entry(lane=lane, batch=batch, part=part, layer=layer, after=waits))

    def finish(batch: int, layer: int) -> None:
        add("compute", batch, "combine", layer, (batch, "await_homes", layer))

    for layer in range(num_layers):
        for batch in BATCHES:
            if layer:
                finish(batch, layer - 1)
            add("compute", batch, "attend", layer)
            add("exchange", batch, "dispatch", layer, (batch, "attend", layer))
            add("exchange", batch, "await_table", layer)
        for batch in BATCHES:
            add("compute", batch, "experts_local", layer, (batch, "await_table", layer))
            add("exchange", batch, "send", layer, (batch, "experts_local", layer))
            add("exchange", batch, "await_homes", layer)
    for batch in BATCHES:
        finish(batch, num_layers - 1)
    return plan


def two_streams(num_layers: int) -> list[Entry]:
    """The least change: the kernels of today, waits in kernels of one program, each micro-batch on its own stream."""
    parts: tuple[Part, ...] = ("attend", "dispatch", "await_table", "experts_home", "await_homes", "combine")
    lanes: tuple[Lane, ...] = ("compute", "exchange")
    both = [_by_layer(_in_lane(lanes[batch], parts, num_layers, (batch,))) for batch in BATCHES]
    return [entry for layers in zip(*both, strict=True) for layer in layers for entry in layer]


PLANS = {
    "serial": serial,
    "apart": apart,
    "compute": compute,
    "exchange": exchange,
    "beside": beside,
    "pipeline": pipeline,
    "two_streams": two_streams,
}


def calls_of(name: str, num_layers: int) -> int:
    """Layers of micro-batches that a plan runs; one of ``beside`` is a compute and an exchange."""
    return num_layers * (1 if name in ("compute", "exchange", "beside") else len(BATCHES))


def stuck(plan: Sequence[Entry], size: int, seed: int) -> list[Entry]:
    """Play a plan on ranks whose entries begin and end in an order drawn at random.

    Args:
        plan: Of every rank.
        size: Ranks.
        seed: Of the order.

    Returns:
        Entries that no rank could go on from; none where all have ended.
    """
    draw = random.Random(seed)
    lanes = [[i for i, e in enumerate(plan) if e.lane == lane] for lane in ("compute", "exchange")]
    ended: list[set[int]] = [set() for _ in range(size)]
    begun: list[set[int]] = [set() for _ in range(size)]

    def moves() -> list[tuple[int, int, bool]]:
        found = []
        for rank in range(size):
            for lane in lanes:
                i = next((i for i in lane if i not in ended[rank]), None)
                if i is None:
                    continue
                if i in begun[rank]:
                    if plan[i].part not in WAITING or all(i in b for b in begun):
                        found.append((rank, i, True))
                    continue
                filled = any(plan[j].part in FILLING for j in begun[rank] - ended[rank])
                if not filled and all(j in ended[rank] for j in plan[i].after):
                    found.append((rank, i, False))
        return found

    while options := moves():
        rank, i, ends = draw.choice(options)
        (ended if ends else begun)[rank].add(i)
    first = [next((i for i in lane if i not in ended[rank]), None) for rank in range(size) for lane in lanes]
    return [plan[i] for i in first if i is not None]


def _in_lane(lane: Lane, parts: Sequence[Part], num_layers: int, batches: Sequence[int]) -> list[Entry]:
    return [
        Entry(lane=lane, batch=batch, part=part, layer=layer)
        for batch in batches
        for layer in range(num_layers)
        for part in parts
    ]


def _by_layer(plan: Sequence[Entry]) -> list[list[Entry]]:
    return [[e for e in plan if e.layer == layer] for layer in range(1 + max(e.layer for e in plan))]
