"""Copies and events: on a device that does not run ahead they are there at once; waits have a bound."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.engine.device_copies import DeviceEvent, InputRing, to_host
from moe_runtime.errors import PeerError


class NeverEnds:
    """A step in which a kernel waits for a rank that has gone."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        raise AssertionError("this would wait for good")


def test_a_step_that_does_not_end_is_given_up_after_a_while():
    event = DeviceEvent(torch.device("cpu"))
    event.wait(None, 0.05)
    event._event = NeverEnds()
    looks: list[int] = []
    for check in (None, lambda: looks.append(1)):
        with pytest.raises(PeerError, match=r"the GPU's step has not ended in 0\.05 s"):
            event.wait(check, 0.05)
    assert not looks, "a look is for longer waits"


def test_a_ring_gives_a_buffer_back_only_after_all_others_and_grows_where_asked():
    ring = InputRing(4, torch.device("cpu"), None, None)
    target = torch.zeros(9, dtype=torch.int32)
    first = ring.next(4)
    first[:] = [1, 2, 3, 4]
    ring.upload(4, target)
    others = [ring.next(2), ring.next(9)]
    for other in others:
        other.fill(7)
    assert first.tolist() == [1, 2, 3, 4]
    assert target.tolist() == [1, 2, 3, 4, 0, 0, 0, 0, 0]
    again = ring.next(4)
    again.fill(5)
    assert first.tolist() == [5, 5, 5, 5]


def test_a_copy_on_the_host_is_a_copy():
    x = torch.arange(3)
    copied = to_host(x)
    x.fill_(9)
    assert copied.tolist() == [0, 1, 2]
