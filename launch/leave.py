"""The end of a rank whose peer has gone, stalled or is late, and of that peer."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

import msgspec

from moe_runtime.comm.groups import RankGroup
from moe_runtime.errors import PeerError
from moe_runtime.exit_codes import EXIT_FAULT
from moe_runtime.launch.cli import print_error
from moe_runtime.server.processes import ProcessId, end_process, this_process

__all__ = ["leave_at_once", "meet_processes"]

END_WAIT_S = 0.5
"""In which a peer that can may end itself, and say why."""


def meet_processes(group: RankGroup) -> list[ProcessId]:
    """Every rank's process, for ``leave_at_once``; a collective."""
    gathered = group.all_gather_bytes(msgspec.msgpack.encode(this_process()))
    return [msgspec.msgpack.decode(data, type=ProcessId) for data in gathered]


def leave_at_once(error: PeerError, processes: Sequence[ProcessId]) -> NoReturn:
    """Say why, end the peer where it is on this host, and end this process without freeing anything: a kernel on its
    GPU may wait for the peer for ever, and freeing memory waits for that kernel. A launcher would wait half a minute
    for a stopped process to end.

    Args:
        error: Names the peer.
        processes: From ``meet_processes``; none before the ranks have met.
    """
    print_error(str(error))
    logging.shutdown()
    sys.stdout.flush()
    if error.rank is not None and error.rank < len(processes):
        peer = processes[error.rank]
        if peer.pid != os.getpid():
            time.sleep(END_WAIT_S)
            end_process(peer)
    os._exit(EXIT_FAULT)
