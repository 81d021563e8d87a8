"""Two nodes on one machine: network namespaces joined by a veth pair, each with a boot id of its own.

Needs root and iproute2. What runs in a node sees its own loopback and ``eth7``; files and process ids are the
machine's. Nothing is added to the machine's own network.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

__all__ = ["ADDRESSES", "Node", "two_nodes"]

INTERFACE = "eth7"
ADDRESSES = ("198.18.0.1", "198.18.0.2")
PORT = 29500
CLONE_NEWNET = 0x40000000
# The mount is seen by the node's processes alone: `ip netns exec` gives them mounts of their own.
IN_NODE = 'mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"'

_numbers = itertools.count()
_Result = TypeVar("_Result")


class Node:
    """One node.

    Attributes:
        idx: 0 or 1.
        address: Its address on the wire between them.
    """

    def __init__(self, idx: int, folder: Path) -> None:
        self.idx = idx
        self.address = ADDRESSES[idx]
        self.namespace = f"moe{os.getpid()}-{next(_numbers)}"
        self._boot_id = folder / f"boot_id_{idx}"
        self._boot_id.write_text(f"{uuid.UUID(int=idx + 1)}\n")

    def start(self, *command: str, **variables: str) -> subprocess.Popen[str]:
        """Start a command in a session of its own; both outputs in one pipe."""
        in_node = ["ip", "netns", "exec", self.namespace, "sh", "-c", IN_NODE, str(self._boot_id)]
        return subprocess.Popen(
            [*in_node, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
            start_new_session=True,
        )

    def torchrun(self, num_ranks: int, *arguments: str) -> subprocess.Popen[str]:
        """Start this node's part of two-node ranks."""
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "2",
            "--node-rank",
            str(self.idx),
        ]
        command += ["--master-addr", ADDRESSES[0], "--master-port", str(PORT)]
        return self.start(*command, "--nproc-per-node", str(num_ranks), *arguments)

    def call(self, function: Callable[[], _Result]) -> _Result:
        """``function()`` in a thread whose sockets are this node's."""
        results: list[_Result] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                libc = ctypes.CDLL(None, use_errno=True)
                with open(f"/run/netns/{self.namespace}", "rb") as namespace:
                    if libc.setns(namespace.fileno(), CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), "setns")
                results.append(function())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    def pids(self) -> list[int]:
        """Processes in this node."""
        text = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True
        )
        return [int(line) for line in text.stdout.split()]

    def kill(self) -> None:
        """End all of its processes at once, as a power cut would (the kernel goes on to answer for them)."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def cut(self) -> None:
        """Cut the wire: packets are lost, and nothing answers for this node."""
        _ip("-n", self.namespace, "link", "set", INTERFACE, "down")

    def listeners(self) -> dict[int, set[str]]:
        """Addresses at which each process listens (TCP, in the kernel's hexadecimal), by process id."""
        pids = self.pids()
        if not pids:
            return {}
        owners: dict[str, int] = {}
        for pid in pids:
            with contextlib.suppress(OSError):
                for entry in os.scandir(f"/proc/{pid}/fd"):
                    with contextlib.suppress(OSError):
                        owners[os.readlink(entry.path)] = pid
        found: dict[int, set[str]] = {}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pids[0]}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                owner = owners.get(f"socket:[{fields[9]}]")
                if fields[3] == "0A" and owner is not None:
                    found.setdefault(owner, set()).add(fields[1].rpartition(":")[0])
        return found


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[tuple[Node, Node]]:
    """Two nodes; skips the test, with the reason, where namespaces cannot be made."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the command ip (iproute2)")
    nodes = Node(0, folder), Node(1, folder)
    try:
        try:
            for node in nodes:
                _ip("netns", "add", node.namespace)
            _ip(
                "-n", nodes[0].namespace, "link", "add", INTERFACE, "type", "veth",
                "peer", "name", INTERFACE, "netns", nodes[1].namespace,
            )  # fmt: skip
            for node in nodes:
                _ip("-n", node.namespace, "addr", "add", f"{node.address}/24", "dev", INTERFACE)
                _ip("-n", node.namespace, "link", "set", INTERFACE, "up")
                _ip("-n", node.namespace, "link", "set", "lo", "up")
                probe = [
                    "ip",
                    "netns",
                    "exec",
                    node.namespace,
                    "sh",
                    "-c",
                    IN_NODE,
                    str(node._boot_id),
                    "true",
                ]
                subprocess.run(probe, check=True, capture_output=True, text=True)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        yield nodes
    finally:
        for node in nodes:
            if Path(f"/run/netns/{node.namespace}").exists():
                node.kill()
                _ip("netns", "del", node.namespace)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
