"""One rank speaks for all that have the same to say."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import TCPStore

from moe_runtime.launch.spokesman import may_speak


@pytest.fixture
def environ() -> dict[str, str]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environ = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": "4",
        "store": store,  # kept alive
    }
    return environ  # type: ignore[return-value]


def test_the_same_message_is_spoken_once_and_by_rank_0_where_it_has_it(environ: dict[str, str]) -> None:
    def speak(rank: int) -> bool:
        return may_speak("port (-1) must be in [0, 65535]", {**environ, "RANK": str(rank)})

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(speak, range(4))) == [True, False, False, False]


def test_a_message_of_one_rank_alone_is_spoken(environ: dict[str, str]) -> None:
    assert may_speak("mine", {**environ, "RANK": "0"})
    assert may_speak("other", {**environ, "RANK": "2"})
    assert not may_speak("other", {**environ, "RANK": "3"})
    assert may_speak("other", {**environ, "RANK": "3", "TORCHELASTIC_RESTART_COUNT": "1"}), "a new start"


def test_without_torchrun_s_store_every_rank_speaks() -> None:
    assert may_speak("x", {"WORLD_SIZE": "2", "RANK": "1"})
    assert may_speak("x", {})
