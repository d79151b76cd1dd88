"""Where KV from elsewhere lands: in its own blocks, or in host memory in front of a device's pool.

On a CPU the KV pool is registered memory, so the slots of a transfer are the blocks themselves and
what has arrived is in place.  A GPU's pool cannot be written by the transfer engine: bytes land in
slots of a smaller region, and publishing them copies them into the blocks that the request has
leased.  Then the slots are free for the next; a line in order of arrival waits for them.  Slots are
needed only for blocks that are not here yet (the prefix cache may have the first ones).  Blocks and
slots of a room have one owner, its transfer, until they are taken or released together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from epd.engine.base import LanguageEngine
from epd.scheduling.pool import Pool

Blocks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Waiting:
    count: int
    leased: Callable[[Blocks], None]


@dataclass(frozen=True, slots=True)
class _Reserved:
    """A room's blocks, and which of them its transfer fills."""

    blocks: Blocks
    received: range


class Landing:
    """Slots for the prompts' KV of the rooms of one decode instance."""

    def __init__(self, engine: LanguageEngine, return_blocks: Callable[[Blocks], None]) -> None:
        self._engine = engine
        self._return_blocks = return_blocks
        self._pool = Pool(engine.num_landing_blocks)
        self._reserved: dict[str, _Reserved] = {}
        self._line: dict[str, _Waiting] = {}

    @property
    def num_leased(self) -> int:
        return self._pool.num_leased + len(self._line)

    def fits(self, num_prompt_blocks: int) -> bool:
        return num_prompt_blocks <= self._engine.num_landing_blocks

    def lease(
        self, room: str, blocks: Blocks, received: range, leased: Callable[[Blocks], None]
    ) -> None:
        """Call `leased(slots)` when the blocks with these places among `blocks` can arrive."""
        self._reserved[room] = _Reserved(blocks, received)
        if self._engine.kv_in_place:
            leased(blocks[received.start : received.stop])
            return
        self._line[room] = _Waiting(len(received), leased)
        self._pump()

    def leave(self, room: str) -> None:
        """The transfer ended before it had slots."""
        if self._line.pop(room, None) is not None:
            self._return_blocks(self._reserved.pop(room).blocks)
            self._pump()

    async def land(self, room: str, slots: Blocks) -> None:
        """What arrived in the slots becomes the content of the room's blocks."""
        if not self._engine.kv_in_place:
            reserved = self._reserved[room]
            blocks = reserved.blocks[reserved.received.start : reserved.received.stop]
            await self._engine.land_kv(slots, blocks)

    def take(self, room: str, slots: Blocks) -> Blocks:
        """The room's blocks, filled; its slots are free."""
        if not self._engine.kv_in_place:
            self._pool.give_back(slots)
            self._pump()
        return self._reserved.pop(room).blocks

    def release(self, room: str, slots: Blocks) -> None:
        """Nothing writes into the slots any more, and nobody wants the blocks."""
        self._return_blocks(self.take(room, slots))

    def _pump(self) -> None:
        while self._line:
            room, waiting = next(iter(self._line.items()))
            slots = self._pool.take(waiting.count)
            if slots is None:
                return
            del self._line[room]
            waiting.leased(slots)
