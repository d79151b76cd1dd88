"""What most gateways are never asked for is imported with the first request for it."""

from __future__ import annotations

import asyncio
import pkgutil
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from epd.api.http.exchange import Exchange


async def fetched(place: str) -> Any:
    """What is at `module:name`; a thread imports the module, so that the loop goes on meanwhile."""
    if place.partition(":")[0] in sys.modules:
        return pkgutil.resolve_name(place)
    return await asyncio.to_thread(pkgutil.resolve_name, place)


class Rarely:
    """Handlers of an object that is imported and made with the first request for one of them."""

    def __init__(self, place: str, *arguments: object) -> None:
        self._place = place
        self._arguments = arguments
        self._made: object = None

    def handler(self, name: str) -> Callable[[Exchange], Awaitable[None]]:
        async def handle(exchange: Exchange) -> None:
            kind = await fetched(self._place)
            self._made = self._made or kind(*self._arguments)
            await getattr(self._made, name)(exchange)

        return handle
