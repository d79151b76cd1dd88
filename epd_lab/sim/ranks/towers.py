"""The vision towers of a simulated group.

Each rank makes the rows of its own images, in slices where its leader gives the batch turns.  It
waits for all ranks' in the command itself, or in the last of the turns.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence

from epd.engine.base import Patches
from epd.groups.engines import Encoded
from epd.groups.leader import Encode, GoOn
from epd.shares import owners
from epd_lab.sim.engine.engines import SimVisionEngine


class Gather:
    """Where the ranks of a group join their rows."""

    def __init__(self, size: int, enter: Callable[[int, int], asyncio.Future[None]]) -> None:
        """`enter(rank, number)`: ended when all ranks are in this command."""
        self.size = size
        self._enter = enter
        self._made: dict[int, dict[int, Encoded]] = defaultdict(dict)  # by command and rank
        self._all_made: dict[int, asyncio.Future[None]] = {}

    async def __call__(
        self, rank: int, number: int, batch: Sequence[Patches], made: Awaitable[Encoded]
    ) -> Encoded:
        """The rows of all images, of which a rank has made its own."""
        met = self._enter(rank, number)
        ranks = owners([p.num_patches for p in batch], self.size)
        parts = self._made[number]
        parts[rank] = await made
        await asyncio.shield(met)
        if number not in self._all_made:
            self._all_made[number] = asyncio.get_running_loop().create_future()
        all_made = self._all_made[number]  # set by the first of several that enter last
        if len(parts) == self.size and not all_made.done():
            all_made.set_result(None)
        await asyncio.shield(all_made)
        each = [iter(parts[one]) for one in range(self.size)]
        return [next(each[its]) for its in ranks]


class SimTowerShare:
    """Of one rank: `epd.groups.engines.TowerShare`."""

    def __init__(
        self,
        gather: Gather,
        rank: int,
        engine: SimVisionEngine,
        begins: Callable[[Encode | GoOn], int],
    ) -> None:
        """`begins`: gets the command that the rank begins, and gives its number."""
        self._gather = gather
        self._rank = rank
        self._engine = engine
        self._begins = begins
        self._batch: Sequence[Patches] = ()
        self._mine: list[Patches] = []
        self._num_turns = self._left = 0
        self._slice: Awaitable[Encoded] = _nothing()  # that was launched last

    def num_turns(self, batch: Sequence[Patches]) -> int:
        shares = [self._own(batch, rank) for rank in range(self._gather.size)]
        count = max(self._engine.num_slices(share) for share in shares if share)
        return count if count > 1 else 0

    def encode(self, batch: Sequence[Patches], num_turns: int = 0) -> Awaitable[Encoded]:
        own = self._own(batch, self._rank)
        if num_turns:
            self._batch, self._mine = batch, own
            self._num_turns = self._left = num_turns
            self._slice = self._launch()
        number = self._begins(Encode(list(batch), num_turns))
        if num_turns:
            return _nothing()
        made = self._engine.encode(own) if own else _nothing()
        return self._gather(self._rank, number, batch, made)

    def go_on(self) -> Awaitable[Encoded]:
        """Done when the slice before has passed, which is the last one's own."""
        self._left -= 1
        passed = self._slice
        if self._left:
            self._slice = self._launch()
        number = self._begins(GoOn())
        return passed if self._left else self._gather(self._rank, number, self._batch, passed)

    def _launch(self) -> Awaitable[Encoded]:
        """The next slice; the last one gives rows."""
        if not self._mine:
            return _nothing()
        return self._engine.slice(self._mine, self._num_turns, is_last=self._left == 1)

    def _own(self, batch: Sequence[Patches], rank: int) -> list[Patches]:
        ranks = owners([p.num_patches for p in batch], self._gather.size)
        return [patches for patches, its in zip(batch, ranks, strict=True) if its == rank]


def _nothing() -> asyncio.Future[Encoded]:
    over: asyncio.Future[Encoded] = asyncio.get_running_loop().create_future()
    over.set_result([])
    return over
