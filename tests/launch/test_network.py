"""Interfaces and addresses of this host."""

from __future__ import annotations

import socket

import pytest

from moe_runtime.launch import network
from moe_runtime.launch.network import address_of, address_towards, interface_with


def test_loopback_has_its_address_and_the_address_its_interface() -> None:
    assert address_of("lo") == "127.0.0.1"
    assert interface_with("127.0.0.1") == "lo"
    assert address_towards("127.0.0.1", 9) == "127.0.0.1"
    assert address_towards("localhost", 9) in ("127.0.0.1", "::1")


def test_every_interface_with_an_address_is_found_by_it() -> None:
    for _, name in socket.if_nameindex():
        for address in network._addresses(name)[:1]:
            assert interface_with(address) == name


def test_an_unknown_interface_is_named_with_those_there_are() -> None:
    with pytest.raises(
        ValueError, match=r"GLOO_SOCKET_IFNAME \(eth99\) must be an interface of this host: .*lo"
    ):
        address_of("eth99")


def test_an_interface_without_an_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_addresses", lambda name: [])
    with pytest.raises(ValueError, match=r"GLOO_SOCKET_IFNAME \(lo\) must have an address"):
        address_of("lo")


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no interface of this host has 192\.0\.2\.77"):
        interface_with("192.0.2.77")


def test_a_name_is_waited_for_and_then_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    known_after, real = [3], socket.getaddrinfo

    def lookup(host: str, port: int, **options: int) -> list[tuple[object, ...]]:
        known_after[0] -= 1
        if known_after[0] > 0:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return list(real("127.0.0.1", port, **options))

    monkeypatch.setattr(network, "POLL_S", 0.0)
    monkeypatch.setattr(network.socket, "getaddrinfo", lookup)
    assert address_towards("moe-0.moe", 1, timeout_s=30) == "127.0.0.1"
    known_after[0] = 3
    with pytest.raises(
        ValueError, match=r"MASTER_ADDR \(moe-0.moe\) must be a host that is known here: Name or serv"
    ):
        address_towards("moe-0.moe", 1)
