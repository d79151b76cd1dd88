"""Where KV from elsewhere lands: in its own blocks, or in memory in front of a device's pool.

On a CPU the KV pool is registered memory, so what has arrived is in place.  Peers do not write a
GPU's pool: bytes land in blocks of a smaller region, in host memory or in its mirror on the device.
A landing block is one block of both.  Publishing copies them into the blocks that the request has
leased.  Then the landing blocks are free for the next room of a queue in order of arrival.  They
are needed only for what is not here yet (the prefix cache may have the first blocks).  Both kinds
of blocks of a room have one owner, its INCOMING.  A transfer fills *slots*, a few of each block
(`scheduling/kv_order.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from epd.engine.base import LanguageEngine
from epd.scheduling.pool import Pool

Blocks = tuple[int, ...]


class Landing:
    """Room for the prompts' KV of the rooms of one decode instance."""

    def __init__(self, engine: LanguageEngine) -> None:
        self._engine = engine
        self._pool = Pool(engine.num_landing_blocks)
        self._queue: dict[str, Blocks] = {}  # by room: what is to be filled

    @property
    def num_leased(self) -> int:
        return self._pool.num_leased + len(self._queue)

    def fits(self, num_prompt_blocks: int) -> bool:
        return num_prompt_blocks <= self._engine.num_landing_blocks

    def join(self, room: str, received: Blocks) -> None:
        """Wait until these blocks can arrive, as `grants` then yields."""
        self._queue[room] = received

    def leave(self, room: str) -> None:
        self._queue.pop(room, None)

    def grants(self) -> Iterator[tuple[str, Blocks]]:
        """Whose blocks can arrive, and the slots to land in; look when one has joined or left."""
        size = self._engine.kv_layout.slots_per_block
        for room, received in list(self._queue.items()):
            in_place = self._engine.kv_in_place
            blocks = received if in_place else self._pool.take(len(received))
            if blocks is None:
                return
            del self._queue[room]
            yield room, tuple(block * size + group for block in blocks for group in range(size))

    def release(self, slots: Sequence[int]) -> None:
        """Nothing lands in them any more, and what has landed is not needed there."""
        if not self._engine.kv_in_place:
            self._pool.give_back(self._blocks_of(slots))

    def _blocks_of(self, slots: Sequence[int]) -> Blocks:
        size = self._engine.kv_layout.slots_per_block
        return tuple(slot // size for slot in slots[::size])
