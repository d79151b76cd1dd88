"""The KV of all ranks of an instance, for its roles: what is written, and what has landed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from epd.engine.base import LanguageEngine
from epd.messages import Grant, KvLayout
from epd.roles.fan_out import WritePart
from epd.roles.rank_asks import LandKv, OtherRanks, RankLost, WriteKv, added_up
from epd.roles.rank_data import RankKv
from epd.scheduling.kv_cells import Cell, cells, cut
from epd.transport.base import DataPlane, Region, WriteFailed, WriteOutcome, WriteUnknown, Written


class KvRanks:
    """`others`: of a group."""

    def __init__(
        self, engine: LanguageEngine, transfers: DataPlane, others: OtherRanks | None
    ) -> None:
        self.own = RankKv(engine, transfers)
        self._layout = engine.kv_layout
        self._others = others

    # --- at a producer ----------------------------------------------------------------------------

    def writes(
        self, slots: Sequence[int], grant: Grant, target_slots: Sequence[int]
    ) -> list[WritePart]:
        """The same slots of each rank, in the parts that the consumer's ranks need."""
        assert grant.layout is not None
        theirs, regions = grant.layout, (grant.region, *grant.parts)
        found: list[WritePart] = []
        for cell in cells(self._layout.shares, theirs.shares):
            target, by_head = regions[cell.consumer], cell.is_cut
            num_heads = len(theirs.shares[cell.consumer])
            at = cut(target_slots, cell.target, num_heads) if by_head else target_slots
            ask = WriteKv(
                slots=tuple(slots),
                target=target,
                target_slots=tuple(at),
                heads=_ends(cell.source) if by_head else None,
            )
            found.append(partial(self._write, cell.producer, ask))
        return found

    async def _write(self, rank: int, ask: WriteKv) -> WriteOutcome:
        if not rank:
            return await self.own.write(ask)
        assert self._others is not None
        try:
            outcome = await self._others.ask(rank, ask)
        except RankLost as lost:
            return WriteUnknown(str(lost))
        assert isinstance(outcome, Written | WriteFailed | WriteUnknown)
        return outcome

    # --- at a consumer ----------------------------------------------------------------------------

    def written(self, producer: KvLayout) -> Region:
        """The own region, as ranks of such shares write to it."""
        return self.own.written(by_head=bool(self._heads(producer, 0)))

    async def land(
        self,
        producer: KvLayout,
        transport: str,
        slots: Sequence[int],
        blocks: Sequence[int],
        written: Sequence[tuple[Sequence[int], int]],
    ) -> list[int]:
        """What such a producer's ranks wrote to slots of every rank becomes the content of blocks;
        the checksums of these writes, of all their parts."""
        asks = [
            LandKv(
                transport=transport,
                slots=tuple(slots),
                blocks=tuple(blocks),
                heads=self._heads(producer, rank),
                summed=tuple(tuple(slots) for slots, _ in written),
            )
            for rank in range(len(self._layout.shares))
        ]
        return await added_up(self.own.land, self._others, asks)

    def _heads(self, producer: KvLayout, rank: int) -> tuple[tuple[int, int], ...]:
        """What comes to a rank head by head, from each rank of the producer that writes to it."""
        to_it = [c for c in cells(producer.shares, self._layout.shares) if c.consumer == rank]
        return tuple(_ends(cell.target) for cell in to_it) if _is_cut(to_it) else ()


def _is_cut(to_one_rank: Sequence[Cell]) -> bool:
    return any(cell.is_cut for cell in to_one_rank)


def _ends(heads: range) -> tuple[int, int]:
    return heads.start, heads.stop
