"""Which network addresses a picture may be fetched from.

An http(s) URL from outside is a way into the operator's network, so what is connected to must be a
public address.  Names are resolved by a resolver that drops all others, so that a name which
changes between check and connection gains nothing; literal addresses, which no resolver sees, are
read strictly, because libraries differ in what they take for one (to some, `2130706433` is
loopback).
"""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohttp.abc import AbstractResolver

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# A host whose last label is a number is an IPv4 address in some spelling, never a name.
_ENDS_IN_NUMBER = re.compile(r"(?:^|\.)(?:\d+|0[xX][0-9a-fA-F]*)\.?$")


class AddressRefused(Exception):
    """The text says why, for the client."""


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
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


def check_host(host: str) -> None:
    """Refuse literal addresses that are not public; names pass.  Raises AddressRefused."""
    if ":" not in host and not _ENDS_IN_NUMBER.search(host):
        return
    try:
        public = is_public(host)
    except ValueError:
        raise AddressRefused(f"{host} is not an address in its usual form") from None
    if not public:
        raise AddressRefused(f"{host} is a private or local address")


def public_resolver() -> AbstractResolver:
    """The system's resolver, with every address dropped that is not public."""
    from aiohttp.abc import AbstractResolver, ResolveResult
    from aiohttp.resolver import ThreadedResolver

    class PublicResolver(AbstractResolver):
        def __init__(self) -> None:
            self._inner = ThreadedResolver()

        async def resolve(
            self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
        ) -> list[ResolveResult]:
            found = await self._inner.resolve(host, port, family)
            public = [entry for entry in found if is_public(entry["host"])]
            if not public:
                raise OSError(None, f"{host} is a private or local address")
            return public

        async def close(self) -> None:
            await self._inner.close()

    return PublicResolver()
