"""Which network addresses an image may be fetched from (fault F51).

An http(s) URL from outside is a way into the operator's network, so what is connected to must be a
public address.  The address of each connection is checked before it is made: the bytes would go
there, whatever the host's spelling and whatever its name resolves to the next time.
"""

from __future__ import annotations

import ipaddress
import socket

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# Of these `ipaddress` takes some, or all before Python 3.12.4, for global: protocol assignments
# (Oracle's metadata), Azure's host, 6to4 relays, site-local, documentation.
_LOCAL = [
    ipaddress.ip_network(network)
    for network in (
        "192.0.0.0/24",
        "168.63.129.16/32",
        "192.88.99.0/24",
        "fec0::/10",
        "3fff::/20",
    )
]


def is_public(address: str) -> bool:
    """Whether it lies on the internet.  Raises ValueError for what is no canonical address.

    Not public: loopback, private, shared, link-local, multicast, reserved, and IPv6 addresses that
    carry such an IPv4 address to a translator or a tunnel.
    """
    ip: Address = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        embedded = ip.ipv4_mapped or ip.sixtofour
        if ip in _NAT64:
            embedded = ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF)
        ip = embedded or ip
    if any(ip in network for network in _LOCAL):
        return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


def public_socket(address: tuple[int, int, int, str, tuple[str | int, ...]]) -> socket.socket:
    """A socket for one entry of getaddrinfo; raises OSError where that is no public address.

    A connector's `socket_factory`: it is asked for every connection, and for nothing else.
    """
    family, kind, protocol, _, (host, *_) = address
    if not is_public(str(host)):
        raise OSError(None, "it leads to a private or local address")  # which one is not told
    return socket.socket(family, kind, protocol)
