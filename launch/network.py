"""This host's network interfaces and addresses: which one reaches the other nodes."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
import time
from pathlib import Path

__all__ = ["address_of", "address_towards", "interface_with"]

SIOCGIFADDR = 0x8915
POLL_S = 0.5


def address_of(interface: str) -> str:
    """The first IPv4 address of an interface, else its first global IPv6 address.

    Raises:
        ValueError: there is no such interface, or it has no address.
    """
    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        raise ValueError(
            f"GLOO_SOCKET_IFNAME ({interface}) must be an interface of this host: {', '.join(names)}"
        )
    addresses = _addresses(interface)
    if not addresses:
        raise ValueError(f"GLOO_SOCKET_IFNAME ({interface}) must have an address; it has none")
    return addresses[0]


def address_towards(host: str, port: int, *, timeout_s: float = 0.0) -> str:
    """The address from which this host would reach ``host``; no packet is sent.

    Args:
        host: Name or address.
        port: Any port of it.
        timeout_s: How long to wait for the name to be known: a pod's name becomes so a moment after its start.

    Raises:
        ValueError: the name stays unknown, or no route leads there.
    """
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
            break
        except socket.gaierror as error:
            if time.monotonic() >= end_s:
                raise ValueError(
                    f"MASTER_ADDR ({host}) must be a host that is known here: {error.strerror}"
                ) from None
        time.sleep(POLL_S)
    fault = ""
    for family, kind, protocol, _, target in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(target)
            except OSError as error:
                fault = error.strerror or str(error)
            else:
                return str(probe.getsockname()[0])
    raise ValueError(f"MASTER_ADDR ({host}) must be reachable from here: {fault}")


def interface_with(address: str) -> str:
    """Name of the interface that has an address.

    Raises:
        ValueError: none has.
    """
    for _, name in socket.if_nameindex():
        if address in _addresses(name):
            return name
    if ipaddress.ip_address(address).is_loopback:
        return "lo"
    raise ValueError(
        f"no interface of this host has {address} as its first address: name one in GLOO_SOCKET_IFNAME"
    )


def _addresses(interface: str) -> list[str]:
    """IPv4 first: an interface's other IPv4 addresses are not told by this old call."""
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
            addresses.append(socket.inet_ntoa(answer[20:24]))
        except OSError:
            pass  # it has none
    table = Path("/proc/net/if_inet6")
    for line in table.read_text(encoding="ascii").splitlines() if table.exists() else ():
        digits, _, _, scope, _, name = line.split()
        if name == interface and scope != "20":  # link-local addresses need the interface's name beside them
            addresses.append(str(ipaddress.IPv6Address(int(digits, 16))))
    return addresses
