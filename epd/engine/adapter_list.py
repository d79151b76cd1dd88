"""How an engine follows the gateway's list of adapters, with the other ranks of its group.

Theory of operation
-------------------
An adapter comes in two phases.  First each rank reads and checks its part beside the steps, and has
it ready.  When all have, one change between two steps puts it in: in a group a numbered command, so
it is at the same step of each rank.  If one rank cannot, none has it: the change that comes
instead forgets what the others have ready.  What goes, goes in such a change, too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from epd.engine.base import AdapterParts, DeviceLost, EngineError

if TYPE_CHECKING:
    from epd.engine.device.executor import DeviceExecutor

Changing = Coroutine[object, None, dict[str, str]]  # by digest, why it cannot be held


class FollowedList:
    """Lists are applied in their order."""

    def __init__(self, held: Callable[[], tuple[str, ...]]) -> None:
        """`held`: digests of what the device has."""
        self._held = held
        self._wanted: Mapping[str, str] | None = None  # by the last list, if one came
        self._turn = asyncio.Lock()

    @property
    def usable(self) -> tuple[str, ...]:
        """Of those that are held, those that are not to go."""
        held, wanted = self._held(), self._wanted
        return held if wanted is None else tuple(one for one in held if one in wanted)

    def follow(self, wanted: Mapping[str, str], parts: AdapterParts) -> Changing:
        """See `HoldsAdapters.hold_adapters`."""
        self._wanted = dict(wanted)
        return self._follow(self._wanted, parts)

    async def _follow(self, wanted: Mapping[str, str], parts: AdapterParts) -> dict[str, str]:
        unheld: dict[str, str] = {}
        async with self._turn:
            if dropped := [digest for digest in self._held() if digest not in wanted]:
                await parts.change_adapters(dropped, "")
            for digest, path in wanted.items():
                if digest in self._held():
                    continue
                try:
                    await parts.read_adapter(digest, path)
                    await parts.change_adapters((), digest)
                except DeviceLost:
                    raise
                except Exception as error:  # whatever it is, the others are held
                    unheld[digest] = str(error)
                    with contextlib.suppress(EngineError):  # who cannot any more ends
                        await parts.change_adapters((), "")
        return unheld


class AdapterBank(Protocol):
    """What an engine has of adapters."""

    followed: FollowedList

    def make_ready(self, digest: str, path: str) -> None:
        """On a thread of the pool.  Raises ModelError."""

    def change(self, dropped: Sequence[str], held: str) -> None:
        """Between the runs of the model.  Raises ModelError."""


class WithBank:
    """`HoldsAdapters` and `AdapterParts` of an engine that may have a bank."""

    bank: AdapterBank | None  # of adapters, where requests may name some
    _executor: DeviceExecutor

    @property
    def adapters(self) -> tuple[str, ...]:
        return self.bank.followed.usable if self.bank is not None else ()

    def hold_adapters(
        self, wanted: Mapping[str, str], parts: AdapterParts | None = None
    ) -> Changing:
        assert self.bank is not None  # whose settings ask for this
        return self.bank.followed.follow(wanted, parts or self)

    async def read_adapter(self, digest: str, path: str) -> None:
        assert self.bank is not None
        await self._executor.compute(self.bank.make_ready, digest, path)

    def change_adapters(self, dropped: Sequence[str], held: str) -> Awaitable[None]:
        assert self.bank is not None
        return self._executor.launch_brief(self.bank.change, dropped, held)
