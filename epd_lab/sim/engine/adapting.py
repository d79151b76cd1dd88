"""Adapters on a simulated device: they come and go in the order of its works.

An instance's files of an adapter may be others than the gateway's (`spoiled`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from functools import cached_property

from epd.engine.adapter_list import Changing, FollowedList
from epd.engine.base import AdapterParts, EngineError, nothing
from epd_lab.sim.engine.device import SimDevice

LOAD_S = 0.1


class Adapting:
    """What an engine does of adapters; an adapter's digest is what it changes, too."""

    device: SimDevice
    held: frozenset[str] = frozenset()  # on the device
    spoiled: frozenset[str] = frozenset()
    _ready = ""

    @cached_property
    def _followed(self) -> FollowedList:
        return FollowedList(lambda: tuple(sorted(self.held)))

    @property
    def adapters(self) -> tuple[str, ...]:
        return self._followed.usable

    def begin_with(self, digests: tuple[str, ...], spoiled: frozenset[str]) -> None:
        self.held, self.spoiled = frozenset(digests), spoiled

    def hold_adapters(
        self, wanted: Mapping[str, str], parts: AdapterParts | None = None
    ) -> Changing:
        return self._followed.follow(wanted, parts or self)

    async def read_adapter(self, digest: str, path: str) -> None:
        if digest in self.spoiled:
            raise EngineError("it has other files here")
        await self.device.run(LOAD_S, 1.0, nothing, call="hold_adapters")
        self._ready = digest

    def change_adapters(self, dropped: Sequence[str], held: str) -> Awaitable[None]:
        def change() -> None:
            ready, self._ready = self._ready, ""
            if held not in {"", ready}:
                raise EngineError(f"{held} is not ready")
            self.held = (self.held - {*dropped}) | ({held} - {""})

        return self.device.run(0.0, 0.0, change, call="hold_adapters")
