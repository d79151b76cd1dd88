"""Where KV from elsewhere lands: in its own blocks, or in host memory in front of a device's pool.

On a CPU the KV pool is registered memory, so what has arrived is in place.  A GPU's pool cannot be
written by the transfer engine: bytes land in blocks of a smaller region, and publishing them copies
them into the blocks that the request has leased.  Then the landing blocks are free for the next; a
queue in order of arrival waits for them.  They are needed only for what is not here yet (the prefix
cache may have the first blocks).  Both kinds of blocks of a room have one owner, its transfer,
until they are taken or released together.  A transfer fills *slots*, a few of each block
(`scheduling/kv_order.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from epd.engine.base import LanguageEngine
from epd.scheduling.pool import Pool

Blocks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Waiting:
    room: str
    blocks: Blocks
    received: range
    leased: Callable[[Blocks], None]


@dataclass(frozen=True, slots=True)
class _Reserved:
    """A room's blocks, those of them that its transfer fills, and where that lands."""

    blocks: Blocks
    received: Blocks
    landing: Blocks


class Landing:
    """Room for the prompts' KV of the rooms of one decode instance."""

    def __init__(self, engine: LanguageEngine, return_blocks: Callable[[Blocks], None]) -> None:
        self._engine = engine
        self._return_blocks = return_blocks
        self._pool = Pool(engine.num_landing_blocks)
        self._reserved: dict[str, _Reserved] = {}
        self._queue: dict[str, _Waiting] = {}

    @property
    def num_leased(self) -> int:
        return self._pool.num_leased + len(self._queue)

    def fits(self, num_prompt_blocks: int) -> bool:
        return num_prompt_blocks <= self._engine.num_landing_blocks

    def lease(
        self, room: str, blocks: Blocks, received: range, leased: Callable[[Blocks], None]
    ) -> None:
        """Call `leased(slots)` when the blocks with these places among `blocks` can arrive."""
        waiting = _Waiting(room, blocks, received, leased)
        if self._engine.kv_in_place:
            self._reserve(waiting, blocks[received.start : received.stop])
        else:
            self._queue[room] = waiting
            self._pump()

    def leave(self, room: str) -> None:
        """The transfer ended before it had slots."""
        if (waiting := self._queue.pop(room, None)) is not None:
            self._return_blocks(waiting.blocks)
            self._pump()

    async def land(self, room: str) -> None:
        """What arrived becomes the content of the room's blocks."""
        if not self._engine.kv_in_place:
            reserved = self._reserved[room]
            await self._engine.land_kv(reserved.landing, reserved.received)

    def take(self, room: str) -> Blocks:
        """The room's blocks, filled; where they landed is free."""
        reserved = self._reserved.pop(room)
        if not self._engine.kv_in_place:
            self._pool.give_back(reserved.landing)
            self._pump()
        return reserved.blocks

    def release(self, room: str) -> None:
        """Nothing writes any more, and nobody wants the blocks."""
        self._return_blocks(self.take(room))

    def _pump(self) -> None:
        while self._queue:
            room, waiting = next(iter(self._queue.items()))
            landing = self._pool.take(len(waiting.received))
            if landing is None:
                return
            del self._queue[room]
            self._reserve(waiting, landing)

    def _reserve(self, waiting: _Waiting, landing: Blocks) -> None:
        received = waiting.blocks[waiting.received.start : waiting.received.stop]
        self._reserved[waiting.room] = _Reserved(waiting.blocks, received, landing)
        size = self._engine.kv_layout.slots_per_block
        waiting.leased(tuple(block * size + group for block in landing for group in range(size)))
