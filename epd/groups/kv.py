"""The KV of all ranks of an instance, for its roles: what is written, and what has landed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from epd.engine.base import LanguageEngine
from epd.groups.asks import LandKv, OtherRanks, RankLost, WriteKv, WritePart, WriteState, added_up
from epd.groups.data import RankKv
from epd.layouts import blocks_of_runs, num_parts_of, state_runs
from epd.messages import Grant, KvLayout, RemoteRegion
from epd.shares import Cell, cells, cut, is_cut
from epd.transport.base import DataPlane, Region, WriteFailed, WriteOutcome, WriteUnknown, Written


class Sent(NamedTuple):
    """A part of what goes to a consumer: slots here and there; and all of a state, or nothing."""

    slots: Sequence[int]
    targets: Sequence[int]
    state: Sequence[int]  # blocks here
    state_targets: Sequence[int]  # slots there


class KvRanks:
    """`others`: of a group."""

    def __init__(
        self, engine: LanguageEngine, transfers: DataPlane, others: OtherRanks | None
    ) -> None:
        self.own = RankKv(engine, transfers)
        self._layout = engine.kv_layout
        self._others = others

    # --- at a producer ----------------------------------------------------------------------------

    def writes(self, sent: Sent, grant: Grant) -> list[WritePart]:
        """The same of each rank, in the parts that the consumer's ranks need."""
        assert grant.layout is not None
        theirs, regions = grant.layout, (grant.region, *grant.parts)
        slots, targets = list(sent.slots), list(sent.targets)
        asks: list[tuple[int, WriteKv | WriteState]] = []
        if not _states_differ(self._layout, theirs):
            size = self._layout.slots_per_block
            slots += [block * size + group for block in sent.state for group in range(size)]
            targets += sent.state_targets
        elif sent.state:
            asks += self._state_writes(sent, theirs, regions)
        if slots:
            asks += self._kv_writes(slots, targets, theirs, regions)
        return [partial(self._write, rank, ask) for rank, ask in asks]

    def _kv_writes(
        self,
        slots: Sequence[int],
        targets: Sequence[int],
        theirs: KvLayout,
        regions: Sequence[RemoteRegion],
    ) -> Iterator[tuple[int, WriteKv]]:
        found = cells(self._layout.shares, theirs.shares)
        by_head = is_cut(found)
        for cell in found:
            num_heads = len(theirs.shares[cell.consumer])
            ask = WriteKv(
                slots=tuple(slots),
                target=regions[cell.consumer],
                target_slots=tuple(cut(targets, cell.target, num_heads) if by_head else targets),
                heads=_ends(cell.source) if by_head else None,
            )
            yield cell.producer, ask

    def _state_writes(
        self, sent: Sent, theirs: KvLayout, regions: Sequence[RemoteRegion]
    ) -> Iterator[tuple[int, WriteState]]:
        """Behind one another, at each rank of the consumer from the beginning of its slots."""
        for rank, region in enumerate(regions):
            num_parts = num_parts_of(self._layout, theirs, rank)
            slots = cut(sent.state_targets, range(num_parts), num_parts)
            for cell, run in state_runs(self._layout, theirs, rank):
                ask = WriteState(
                    blocks=tuple(sent.state),
                    heads=_ends(cell.source),
                    target=region,
                    target_slots=tuple(slots[run.start : run.stop]),
                )
                yield cell.producer, ask

    async def _write(self, rank: int, ask: WriteKv | WriteState) -> WriteOutcome:
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

    def objection(self, producer: KvLayout) -> str:
        """Why states of its ranks cannot come here, if they cannot."""
        own = self._layout
        if not _states_differ(producer, own):
            return ""
        if blocks_of_runs(producer, own) <= own.num_state_blocks:
            return ""
        return (
            f"states from {len(producer.shares)} ranks do not fit the blocks that "
            f"{len(own.shares)} have for them; give prefill and decode as many ranks each"
        )

    def written(self, producer: KvLayout) -> Region:
        """The own region, as ranks of such shares write to it."""
        return self.own.written(by_head=is_cut(cells(producer.shares, self._layout.shares)))

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
        own, states = self._layout, []
        if _states_differ(producer, own):
            states = cells(producer.state_shares, own.state_shares)
        asks = [
            LandKv(
                transport=transport,
                slots=tuple(slots),
                blocks=tuple(blocks),
                heads=_from_each(cells(producer.shares, own.shares), rank),
                states=_from_each(states, rank),
                summed=tuple(tuple(slots) for slots, _ in written),
            )
            for rank in range(len(self._layout.shares))
        ]
        return await added_up(self.own.land, self._others, asks)


def _from_each(found: Sequence[Cell], rank: int) -> tuple[tuple[int, int], ...]:
    """What comes to a rank head by head, from each rank of the producer that writes to it."""
    to_it = [cell for cell in found if cell.consumer == rank]
    return tuple(_ends(cell.target) for cell in to_it) if is_cut(found) else ()


def _states_differ(producer: KvLayout, consumer: KvLayout) -> bool:
    """Whether their ranks share the heads of states in other ways."""
    return producer.state_shares != consumer.state_shares


def _ends(heads: range) -> tuple[int, int]:
    return heads.start, heads.stop
