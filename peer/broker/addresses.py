"""The names and addresses under which other devices reach this machine."""

from __future__ import annotations

import ipaddress
import re
import socket

import psutil

EVERYWHERE = ("", "0.0.0.0", "::")
"""Addresses to listen on that stand for all interfaces of the machine."""

# Documentation addresses (RFC 5737, RFC 3849): connecting a UDP socket sends nothing, but makes the
# kernel choose the interface that leads out of the machine.
_OUTSIDE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
_DNS_NAME = re.compile(
    r"(?!-)[a-z0-9_-]{1,63}(?<!-)(\.(?!-)[a-z0-9_-]{1,63}(?<!-))*", re.IGNORECASE
)


def is_address(text: str) -> bool:
    """Return True for an IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_host(text: str) -> bool:
    """Return True for an address, or a name as certificates spell it: no wildcard, no port, ASCII."""
    return is_address(text) or (len(text) <= 253 and _DNS_NAME.fullmatch(text) is not None)


def is_loopback(text: str) -> bool:
    """Return True for an address or name that only this machine can reach."""
    return ipaddress.ip_address(text).is_loopback if is_address(text) else text == "localhost"


def machine_names() -> list[str]:
    """Return the machine's host names and the addresses of all its interfaces, loopback included."""
    names = [name for name in (socket.gethostname(), socket.getfqdn()) if is_host(name)]
    return list(dict.fromkeys(["localhost", *names, *machine_addresses()]))


def machine_addresses() -> list[str]:
    """Return the addresses of all interfaces, without IPv6 link-local ones: a URL cannot name those."""
    found = [
        # A link-local address comes with its interface, as in fe80::1%eth0.
        ipaddress.ip_address(entry.address.partition("%")[0])
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return [str(address) for address in found if address.version == 4 or not address.is_link_local]


def host_for_others(listening: str) -> str:
    """Return the host of a URL with which another device reaches a server that listens there.

    For a server on all interfaces: the address that faces the network, else any other one that is not
    loopback, else the host name.
    """
    if listening not in EVERYWHERE:
        return listening
    family = socket.AF_INET6 if listening == "::" else socket.AF_INET
    candidates = [_outgoing_address(family), *machine_addresses()]
    for address in candidates:
        if address and (":" in address) == (listening == "::") and not is_loopback(address):
            return address
    return socket.gethostname()


def _outgoing_address(family: socket.AddressFamily) -> str | None:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((_OUTSIDE[family], 9))
            return probe.getsockname()[0]
    except OSError:  # no network, or none of this family
        return None
