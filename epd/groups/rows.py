"""The receive pools of the ranks of an instance, which are one: same slots, one lease.

A rank of a group has a pool in its own data plane, which its engine reads.  What an encoder has
written is at each rank, all of it or its part; only the sums of it are asked of the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from epd.config import PrefillConfig
from epd.engine.base import SlotRows
from epd.fsm.incoming import Incoming
from epd.groups.asks import LandedWrites, OtherRanks, SumRows, Sums, added_up
from epd.messages import RowContract
from epd.scheduling.slots import receive_pool
from epd.transport.base import Buffer, DataPlane, Reference


class RankRows:
    """`RowMemory` of one rank: its pool."""

    def __init__(self, transfers: DataPlane, config: PrefillConfig, contract: RowContract) -> None:
        self._transfers = transfers
        num_slots, self.rows_per_slot = receive_pool(config, contract.row_nbytes)
        slot_nbytes = self.rows_per_slot * contract.row_nbytes
        self.region = transfers.allocate("rows", num_slots, slot_nbytes, by_reference=True)
        transfers.mirror(self.region)

    @property
    def buffer(self) -> memoryview:
        return self.region.buffer

    def views(self, rows: SlotRows, nbytes: int) -> Sequence[Buffer]:
        return self._transfers.landing(self.region, rows.transport).views(rows.slots, nbytes)

    async def sum(self, ask: SumRows) -> Sums:
        rows = SlotRows(ask.slots, 0, is_sharded=False, transport=ask.transport)
        return Sums(sums=(await self._transfers.checksum(self.views(rows, ask.nbytes)),))


class RowRanks:
    """Those of all ranks, for the leader's roles; `others`: of a group."""

    def __init__(
        self, own: RankRows, contract: RowContract, others: OtherRanks | None, *, shards: bool
    ) -> None:
        self.own = own
        self._row_nbytes = contract.row_nbytes
        self._others = others
        self._shards = shards

    @property
    def num_ranks(self) -> int:
        return 1 + len(self._others.places) if self._others is not None else 1

    def shards(self, num_rows: int) -> bool:
        """Whether each rank gets its part of an image, and not all of it.  A rank without a part
        would save nothing: such an image is less than what telling of it takes."""
        return self._shards and num_rows >= self.num_ranks > 1

    def landed(self, incoming: Incoming, transport: str) -> object:
        """The form in which a step has them: their holder, if they were made in this process; their
        place at each rank, of several; or views."""
        rows = self._rows(incoming, transport)
        views = self.own.views(rows, incoming.nbytes)
        if isinstance(views[0], Reference):
            return views[0].holder
        return views if self.num_ranks == 1 else rows

    async def sums(self, incoming: Incoming, transport: str, written: LandedWrites) -> list[int]:
        """Of what has landed at all ranks, by one write."""
        rows = self._rows(incoming, transport)
        return [await self._sum_of_all(rows) for _ in written]

    def _rows(self, incoming: Incoming, transport: str) -> SlotRows:
        is_sharded = self.shards(incoming.num_rows)
        return SlotRows(incoming.slots, incoming.num_rows, is_sharded, transport)

    async def _sum_of_all(self, rows: SlotRows) -> int:
        asks = [
            SumRows(
                transport=rows.transport,
                slots=tuple(rows.slots),
                nbytes=len(rows.held(rank, self.num_ranks)) * self._row_nbytes,
            )
            for rank in range(self.num_ranks)
        ]
        (found,) = await added_up(self.own.sum, self._others, asks)
        return found
