"""Adapters on a simulated device: they come and go in the order of its works.

An instance's files of an adapter may be others than the gateway's (`spoiled`).
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping

from epd_lab.sim.engine.device import SimDevice

LOAD_S = 0.1


class Adapting:
    """What an engine does of adapters; an adapter's digest is what it changes, too."""

    device: SimDevice
    adapters: tuple[str, ...] = ()
    held: frozenset[str] = frozenset()  # on the device
    spoiled: frozenset[str] = frozenset()
    _wanted: Mapping[str, str] = {}  # by the last list

    def begin_with(self, digests: tuple[str, ...], spoiled: frozenset[str]) -> None:
        self.adapters, self.held, self.spoiled = digests, frozenset(digests), spoiled
        self._wanted = dict.fromkeys(digests, "")

    def hold_adapters(self, wanted: Mapping[str, str]) -> Coroutine[object, None, dict[str, str]]:
        self._wanted = dict(wanted)
        self.adapters = tuple(one for one in self.adapters if one in wanted)
        return self._follow(self._wanted)

    async def _follow(self, wanted: Mapping[str, str]) -> dict[str, str]:
        unheld = {one: "it has other files here" for one in wanted if one in self.spoiled}
        target = frozenset(wanted) - unheld.keys()

        def change() -> None:
            self.held = target

        cost_s = LOAD_S * len(target - self.held)
        await self.device.run(cost_s, 1.0, change, call="hold_adapters")
        self.adapters = tuple(one for one in sorted(self.held) if one in self._wanted)
        return unheld
