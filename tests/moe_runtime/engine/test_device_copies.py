"""Copies to and from a device, on tensors of the CPU, where they are done at once; engine tests have the GPU's."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.engine.device_copies import NUM_INPUT_SETS, DeviceEvent, InputRing, to_host
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
    with pytest.raises(PeerError, match=r"has not ended in 0\.05 s: rank 3 has not raised a flag$") as raised:
        event.wait(None, 0.05, lambda: ("rank 3 has not raised a flag", 3))
    assert raised.value.rank == 3
    with pytest.raises(PeerError, match=r"another rank has gone or is late$") as raised:
        event.wait(None, 0.05, lambda: ("", None))
    assert raised.value.rank is None


def test_buffers_take_turns_and_grow():
    ring = InputRing(4, torch.device("cpu"), None, None)
    target = torch.zeros(9, dtype=torch.int32)
    addresses = set()
    for step in range(2 * NUM_INPUT_SETS):
        host = ring.next(4)
        addresses.add(host.ctypes.data)
        host[:] = step
        ring.upload(4, target)
        assert target.tolist() == [step] * 4 + [0] * 5
    assert len(addresses) == NUM_INPUT_SETS
    assert ring.next(9).shape == (9,)


def test_a_copy_to_the_host_does_not_change_with_its_source():
    source = torch.arange(3)
    host = to_host(source)
    source += 1
    assert host.tolist() == [0, 1, 2]
