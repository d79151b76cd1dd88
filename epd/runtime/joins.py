"""Which gateways an instance joins: endpoints as they were given, and names that are looked up.

A name that has several addresses stands for as many gateways, as that of a headless service of
Kubernetes. It is looked up again and again, on a thread. A new address is joined. One that the name
has lost is left when the gateway there is silent.  Of a name with addresses of both families those
of IPv4 count, or a gateway would be called twice.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable, Sequence

from epd.messages import Address
from epd.transport.endpoint import is_tcp, split_tcp

LOOK_UP_EVERY_S = 5.0
ONLY_ONE = "gateway"  # what it is called where there is one, unless it answers by another name

logger = logging.getLogger(__name__)


class Joins:
    """`given`: one or several endpoints, with commas between them."""

    def __init__(self, given: str, public_key: str) -> None:
        self._given = given.split(",")
        self._public_key = public_key
        self._known: dict[str, list[str]] = {}  # the last addresses of each name

    async def first(self) -> list[Address]:
        found = await self._look_up()
        label = ONLY_ONE if len(found) == 1 else ""
        return [self._address(endpoint, label) for endpoint in found]

    async def watch(self, on_change: Callable[[Sequence[Address]], None]) -> None:
        """Look names up for as long as it is not cancelled; without names there is nothing to do.
        Each time `on_change` gets all gateways: one may have become silent since."""
        while any(map(_has_name, self._given)):
            await asyncio.sleep(LOOK_UP_EVERY_S)
            on_change([self._address(endpoint) for endpoint in await self._look_up()])

    def _address(self, endpoint: str, label: str = "") -> Address:
        return Address(label or endpoint, 0, endpoint, self._public_key)

    async def _look_up(self) -> list[str]:
        """Each once.  A name without an answer keeps its addresses; before the first answer the
        socket looks it up itself."""
        for endpoint in filter(_has_name, self._given):
            try:
                self._known[endpoint] = await _addresses(endpoint)
            except OSError as error:
                logger.warning("%s cannot be looked up: %s", endpoint, error)
        found = (self._known.get(endpoint, [endpoint]) for endpoint in self._given)
        return list(dict.fromkeys(one for addresses in found for one in addresses))


def _has_name(endpoint: str) -> bool:
    if not is_tcp(endpoint):
        return False
    host = split_tcp(endpoint)[0].strip("[]")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host != "localhost"
    return False


async def _addresses(endpoint: str) -> list[str]:
    """Raises OSError."""
    host, port = split_tcp(endpoint)
    loop = asyncio.get_running_loop()
    answers = await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    by_four = [address for family, *_, address in answers if family == socket.AF_INET]
    if by_four:
        return sorted(f"tcp://{address[0]}:{port}" for address in by_four)
    return sorted(f"tcp://[{address[0]}]:{port}" for *_, address in answers)
