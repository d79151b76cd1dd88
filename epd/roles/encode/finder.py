"""Rows without a vision tower: a prefill instance that shares the encoders' storage finds them.

It is the encode role with an engine that cannot encode. An image is looked for in storage; if
storage does not have it, whole, its rooms fail as `absent` (a row of ENCODING), and the gateway
asks an encoder. To make that rare, the gateway gets the hashes in storage, like the contents of an
encoder's cache. Therefore storage is listed now and then, because anybody may write there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Never

from epd.engine.base import EncodeFailure, EngineError, Patches, Rows, nothing
from epd.messages import Clip, PixelBounds, RowContract
from epd.roles.base import Actor, Component
from epd.transport.base import Storage

if TYPE_CHECKING:
    from epd.roles.cache_events import CachePublisher

LOOK_EVERY_S = 1.0


class NoTower:
    """A `VisionEngine` for rows in host memory that others have made."""

    max_batches = 1
    patch_s = 0.0
    adapters: tuple[str, ...] = ()

    def __init__(self, contract: RowContract) -> None:
        self.contract = contract

    async def preprocess(
        self,
        image: object,
        grid_thw: tuple[int, int, int],
        clip: Clip | None = None,
        bounds: PixelBounds | None = None,
        on_begin: Callable[[], None] = nothing,
    ) -> Patches:
        raise EngineError("this instance has no vision tower")

    async def encode(self, batch: Sequence[Patches]) -> list[Rows | EncodeFailure]:
        raise EngineError("this instance has no vision tower")

    async def hold_adapters(self, wanted: Mapping[str, str]) -> dict[str, str]:
        raise EngineError("this instance has no vision tower")

    async def to_host(self, rows: Rows) -> Rows:
        return rows

    async def to_device(self, rows: Rows) -> Rows:
        return rows

    async def copy_out(self, rows: Rows, views: Sequence[memoryview]) -> None:
        raise EngineError("this instance sends no rows")


class StorageWatch(Component[Never]):
    """Lists storage every `LOOK_EVERY_S`, for the gateway."""

    def __init__(self, actor: Actor, storage: Storage, events: CachePublisher) -> None:
        super().__init__(actor)
        self._storage = storage
        self._events = events

    def start(self) -> None:
        self._look()

    def _look(self) -> None:
        self.actor.spawn("list storage", self._list(), self._listed)

    async def _list(self) -> Sequence[str] | None:
        try:
            return await self._storage.listing()
        except Exception as error:  # the next look may have it
            self.actor.fault("list storage", error)
            return None

    def _listed(self, keys: Sequence[str] | None) -> None:
        if keys is not None:
            self._events.in_storage(keys)
        self.actor.timers.call_later(LOOK_EVERY_S, self._look)
