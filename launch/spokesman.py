"""One of the ranks speaks where all have the same to say before they have met: a wrong flag is told once."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from datetime import timedelta

__all__ = ["may_speak"]

CONNECT_TIMEOUT = timedelta(seconds=5)
RANK_0_FIRST = timedelta(seconds=1)


def may_speak(message: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this rank is to print ``message``; False where another one has, or is about to.

    Ranks ask the store that torchrun keeps for them. Rank 0 is given a moment to be first. Where there is no such store
    every rank speaks: the fault may be on one of them alone.
    """
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or environ.get("WORLD_SIZE", "1") == "1":
        return True
    from torch.distributed import DistStoreError, TCPStore  # type: ignore[attr-defined]

    words = f"{environ.get('TORCHELASTIC_RESTART_COUNT', '')} {message}"
    key = f"moe_runtime/said/{hashlib.sha256(words.encode('utf-8', 'replace')).hexdigest()}"
    try:
        store = TCPStore(
            environ["MASTER_ADDR"],
            int(environ["MASTER_PORT"]),
            is_master=False,
            timeout=CONNECT_TIMEOUT,
            wait_for_workers=False,
        )
        if environ.get("RANK") != "0":
            with contextlib.suppress(DistStoreError):
                store.wait([key], RANK_0_FIRST)
        return bool(store.add(key, 1) == 1)
    except (KeyError, ValueError, RuntimeError):
        return True
