"""Where KV from elsewhere lands: in its own blocks, or in memory in front of a device's pool.

Where the transport of the pair reaches the pool, what has arrived is in place: on a CPU, and from
another GPU of the host.  Other peers do not write a GPU's pool: bytes land in blocks of a smaller
region in host memory.  Publishing copies them into the blocks that the request has leased.  Then
the landing blocks are free for the next room of a queue in order of arrival.  They are needed only
for what is not here yet (the prefix cache may have the first blocks).  Both kinds of blocks of a
room have one owner, its INCOMING.  A transfer fills *slots*, a few of each block
(`scheduling/kv_order.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from epd.engine.base import LanguageEngine
from epd.scheduling.pool import Pool

Blocks = tuple[int, ...]


class Landing:
    """Room for the prompts' KV of the rooms of one decode instance."""

    def __init__(self, engine: LanguageEngine) -> None:
        self._engine = engine
        self._pool = Pool(engine.num_landing_blocks)
        self._queue: dict[str, Blocks] = {}  # by room: what is to be filled
        self._leased: dict[str, Blocks] = {}  # by room: in front of the pool

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
        for room, received in list(self._queue.items()):
            blocks = self._pool.take(len(received))
            if blocks is None:
                return
            del self._queue[room]
            self._leased[room] = blocks
            yield room, self.slots(blocks)

    def slots(self, blocks: Blocks) -> Blocks:
        size = self._engine.kv_layout.slots_per_block
        return tuple(block * size + group for block in blocks for group in range(size))

    def has(self, room: str) -> bool:
        """Whether its slots are in front of the pool."""
        return room in self._leased

    def release(self, room: str) -> None:
        """Nothing lands for it any more, and what has landed is not needed in front of the pool."""
        self._pool.give_back(self._leased.pop(room, ()))
