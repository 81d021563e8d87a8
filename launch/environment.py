"""Who this process is among the ranks, from what its launcher has set; the one module that decides.

source     looked for                        rank, world                         rendezvous
torchrun   RANK                              RANK, WORLD_SIZE                    MASTER_ADDR, MASTER_PORT; its own store
variables  RANK, not TORCHELASTIC_RUN_ID     the same                            the same; rank 0 listens there
SLURM      SLURM_STEP_NODELIST (in srun)     SLURM_PROCID, SLURM_STEP_NUM_TASKS  first host; loopback if the only one
LWS        LWS_GROUP_SIZE                    LWS_WORKER_INDEX, LWS_GROUP_SIZE    LWS_LEADER_ADDRESS
alone      none of these                     0, 1

The first that is there counts; torchrun inside a SLURM step or inside a pod of a LeaderWorkerSet starts several ranks
in each. Under SLURM and LWS, MASTER_ADDR and MASTER_PORT replace the address and the port where they are set.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["RankEnvironment", "Source", "expand_hosts", "likely_rank", "read_environment"]

LWS_PORT = 29500
SLURM_FIRST_PORT = 20000
SLURM_NUM_PORTS = 10000

Source = Literal["alone", "torchrun", "variables", "SLURM", "LWS"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """A rank's place.

    Attributes:
        rank: Own number among all ranks.
        size: Number of ranks.
        local_rank: Own number among the ranks of this node.
        local_size: Number of ranks of this node.
        address: Where the ranks meet; a name or address of rank 0's node, empty for one rank.
        port: Port there.
        has_store: The launcher listens at ``address``; else rank 0 does.
        interface: Network interface asked for (GLOO_SOCKET_IFNAME); empty leaves the choice to the runtime.
        source: Which launcher said so.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str = ""
    port: int = 0
    has_store: bool = False
    interface: str = ""
    source: Source = "alone"

    def __post_init__(self) -> None:
        names = _NAMES[self.source]
        for value, name, size, size_name in (
            (self.rank, names[0], self.size, names[1]),
            (self.local_rank, names[2], self.local_size, names[3]),
        ):
            if not 0 <= value < size:
                raise ValueError(f"{name} ({value}) must be in [0, {size_name}) with {size_name} ({size})")
        if self.local_size > self.size:
            raise ValueError(f"{names[3]} ({self.local_size}) must be at most {names[1]} ({self.size})")
        if self.size > 1 and not 0 < self.port < 65536:
            raise ValueError(f"MASTER_PORT ({self.port}) must be in [1, 65535]")

    @property
    def is_one_node(self) -> bool:
        """Whether all ranks are on this node, so that nothing needs to leave it."""
        return self.local_size == self.size


_NAMES = {
    "alone": ("rank", "size", "local_rank", "local_size"),
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "variables": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "SLURM": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    "LWS": ("LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "local_rank", "local_size"),
}


def read_environment(environ: Mapping[str, str]) -> RankEnvironment:
    """A rank's place; the process alone where no launcher speaks.

    Raises:
        ValueError: a variable is missing or malformed, or two contradict each other; names them.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _from_variables(environ)
    in_step, in_group = "SLURM_STEP_NODELIST" in environ, "LWS_GROUP_SIZE" in environ
    if in_step and in_group:
        raise ValueError(
            "SLURM_STEP_NODELIST and LWS_GROUP_SIZE must not both be set: start ranks with srun or in a "
            "LeaderWorkerSet"
        )
    if in_step:
        return _from_slurm(environ)
    return _from_lws(environ) if in_group else RankEnvironment()


def likely_rank(environ: Mapping[str, str]) -> int:
    """The rank by which a message is marked, when the environment may be wrong: 0 where nothing can be read."""
    try:
        return read_environment(environ).rank
    except ValueError:
        text = environ.get("RANK") or environ.get("SLURM_PROCID") or environ.get("LWS_WORKER_INDEX") or "0"
        return int(text) if text.isdecimal() else 0


def expand_hosts(text: str) -> list[str]:
    """SLURM's compressed list of hosts in full, in its order.

    ``a[08-10,12],b`` is a08, a09, a10, a12, b; several brackets in a name run like nested loops, the last one fastest.

    Raises:
        ValueError: it is no such list.
    """
    hosts = []
    for name in re.split(r",(?![^\[]*\])", text):
        parts = re.split(r"(\[[0-9,-]+\])", name)
        expanded = [""]
        for part in parts:
            choices = _numbers(part[1:-1], text) if part.startswith("[") else [part]
            expanded = [start + choice for start in expanded for choice in choices]
        hosts += expanded
    if not all(re.fullmatch(r"[A-Za-z0-9_.:-]+", host) for host in hosts):
        raise ValueError(f"{text!r} must be a list of hosts as SLURM writes it, such as gpu[01-04,7]")
    return hosts


def _numbers(text: str, whole: str) -> list[str]:
    """``01-03,7`` in full; a range keeps the width of its first number."""
    numbers = []
    for piece in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", piece)
        if match is None:
            raise ValueError(f"{whole!r} holds {piece!r}, which is neither a number nor a range")
        first, last = match[1], match[2] or match[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _from_variables(environ: Mapping[str, str]) -> RankEnvironment:
    is_torchrun = "TORCHELASTIC_RUN_ID" in environ
    hint = "torchrun sets it"
    rank, size = _integer(environ, "RANK", hint), _integer(environ, "WORLD_SIZE", hint)
    source: Source = "torchrun" if is_torchrun else "variables"
    RankEnvironment(rank=rank, size=size, port=1, source=source)  # their own fault before that of others
    if size == 1:
        return RankEnvironment(source=source)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environ.get(name):
            raise ValueError(f"{name} must be set where WORLD_SIZE ({size}) is above 1; {hint}")
    place = RankEnvironment(
        rank=rank,
        size=size,
        local_rank=_integer(environ, "LOCAL_RANK", hint),
        local_size=_integer(environ, "LOCAL_WORLD_SIZE", hint),
        address=environ["MASTER_ADDR"],
        port=_integer(environ, "MASTER_PORT", hint),
        has_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        interface=environ.get("GLOO_SOCKET_IFNAME", ""),
        source=source,
    )
    if "LWS_GROUP_SIZE" in environ:
        _check_group(environ, place)
    if not is_torchrun and "SLURM_STEP_NODELIST" in environ:
        _check_step(place, _from_slurm(environ))
    return place


def _check_group(environ: Mapping[str, str], place: RankEnvironment) -> None:
    """torchrun in a LeaderWorkerSet: one node for each pod, and rank 0 in the pod that gets the requests."""
    pods, index = _integer(environ, "LWS_GROUP_SIZE"), _integer(environ, "LWS_WORKER_INDEX")
    if place.size != pods * place.local_size:
        raise ValueError(
            f"WORLD_SIZE ({place.size}) must be LWS_GROUP_SIZE ({pods}) times LOCAL_WORLD_SIZE ({place.local_size}): "
            "start torchrun with --nnodes $LWS_GROUP_SIZE in every pod"
        )
    if place.rank // place.local_size != index:
        raise ValueError(
            f"RANK ({place.rank}) must belong to pod {place.rank // place.local_size}, not to LWS_WORKER_INDEX "
            f"({index}): start torchrun with --node-rank $LWS_WORKER_INDEX and --master-addr $LWS_LEADER_ADDRESS"
        )


def _check_step(place: RankEnvironment, step: RankEnvironment) -> None:
    """Variables set by hand inside srun, which must say what SLURM says."""
    if (place.rank, place.size, place.local_rank) != (step.rank, step.size, step.local_rank):
        raise ValueError(
            f"RANK, WORLD_SIZE and LOCAL_RANK ({place.rank}, {place.size}, {place.local_rank}) must be SLURM_PROCID, "
            f"SLURM_STEP_NUM_TASKS and SLURM_LOCALID ({step.rank}, {step.size}, {step.local_rank}); leave the first "
            "three out"
        )


def _from_slurm(environ: Mapping[str, str]) -> RankEnvironment:
    hint = "srun sets it"
    rank = _integer(environ, "SLURM_PROCID", hint)
    count = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    size = _integer(environ, count, hint)
    hosts = expand_hosts(environ["SLURM_STEP_NODELIST"])
    if size == 1:
        return RankEnvironment(rank=rank, source="SLURM")
    counts = [size] if len(hosts) == 1 else _tasks_per_node(environ, len(hosts))
    if sum(counts) != size:
        raise ValueError(
            f"{count} ({size}) must be the sum of SLURM_STEP_TASKS_PER_NODE "
            f"({environ.get('SLURM_STEP_TASKS_PER_NODE', '')})"
        )
    node = _integer(environ, "SLURM_NODEID", hint) if len(hosts) > 1 else 0
    if not 0 <= node < len(hosts):
        raise ValueError(f"SLURM_NODEID ({node}) must be a node of SLURM_STEP_NODELIST ({len(hosts)} hosts)")
    return RankEnvironment(
        rank=rank,
        size=size,
        local_rank=_integer(environ, "SLURM_LOCALID", hint),
        local_size=counts[node],
        address=environ.get("MASTER_ADDR") or (hosts[0] if len(hosts) > 1 else "127.0.0.1"),
        port=_integer(environ, "MASTER_PORT") if "MASTER_PORT" in environ else _slurm_port(environ),
        interface=environ.get("GLOO_SOCKET_IFNAME", ""),
        source="SLURM",
    )


def _tasks_per_node(environ: Mapping[str, str], num_hosts: int) -> list[int]:
    """``4(x2),3`` is 4, 4, 3."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    counts: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", piece)
        if match is None:
            raise ValueError(
                f"SLURM_STEP_TASKS_PER_NODE ({text!r}) must be counts such as 4(x2),3; srun sets it"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    if len(counts) != num_hosts:
        raise ValueError(
            f"SLURM_STEP_TASKS_PER_NODE ({text}) must have a count for each of the {num_hosts} hosts of "
            "SLURM_STEP_NODELIST"
        )
    return counts


def _slurm_port(environ: Mapping[str, str]) -> int:
    """The same on all ranks of a step; another for other steps and jobs, which may share a node."""
    job, step = _integer(environ, "SLURM_JOB_ID", "srun sets it"), environ.get("SLURM_STEP_ID", "0")
    return SLURM_FIRST_PORT + (8 * job + (int(step) if step.isdecimal() else 0)) % SLURM_NUM_PORTS


def _from_lws(environ: Mapping[str, str]) -> RankEnvironment:
    hint = "the LeaderWorkerSet controller sets it"
    size, index = _integer(environ, "LWS_GROUP_SIZE", hint), _integer(environ, "LWS_WORKER_INDEX", hint)
    address = environ.get("MASTER_ADDR") or environ.get("LWS_LEADER_ADDRESS", "")
    if size > 1 and not address:
        raise ValueError(f"LWS_LEADER_ADDRESS must be set where LWS_GROUP_SIZE ({size}) is above 1; {hint}")
    return RankEnvironment(
        rank=index,
        size=size,
        address=address,
        port=_integer(environ, "MASTER_PORT") if "MASTER_PORT" in environ else LWS_PORT,
        interface=environ.get("GLOO_SOCKET_IFNAME", ""),
        source="LWS",
    )


def _integer(environ: Mapping[str, str], name: str, hint: str = "") -> int:
    text = environ.get(name, "")
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} ({text!r}) must be an integer{'; ' if hint else ''}{hint}") from None
