"""A rank's own part of what its group moves, and the data plane of all its ranks.

Theory of operation
-------------------
Each rank has a data plane of its own and regions in it.  A region of a group has a part at every
rank: of one name, with the same slots.  So slots are leased once, by the leader, and mean the same
everywhere.  Who writes to a group, or from one, writes parts (`epd.fsm.fan_out`), each from one
rank to another, and no rank passes anything on.

Where two groups share heads alike, what one rank writes to another is slots as they are.  Else the
producer sends a slot head by head, each where the consumer expects it.  The consumer puts them in
their order when it takes them in (`LanguageEngine.land_kv`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Iterator, Sequence
from typing import NamedTuple

from epd.config import PrefillConfig
from epd.engine.base import LanguageEngine
from epd.groups.asks import (
    Answer,
    AnyAsk,
    Fault,
    Fence,
    Holds,
    Joined,
    LandKv,
    OtherRanks,
    RankLost,
    ReadAdapter,
    Settle,
    SumRows,
    Sums,
    WriteKv,
    WriteState,
    of_all,
)
from epd.groups.rows import RankRows
from epd.messages import Address, RemoteRegion
from epd.shares import cut, runs
from epd.transport.base import DataPlane, Region, WriteOutcome


class _Piece(NamedTuple):
    """What one rank of a producer wrote of a state."""

    heads: range  # by their place among those here
    nbytes: int
    run: range  # the slots that it fills, of those that the state has,
    slots: Sequence[int]  # and in the region


class RankKv:
    """The KV of one rank: its part of the region, and what comes and goes."""

    def __init__(self, engine: LanguageEngine, transfers: DataPlane) -> None:
        self._engine = engine
        self._transfers = transfers
        layout = engine.kv_layout
        self._num_heads = layout.num_kv_heads
        num_slots = engine.num_landing_blocks * layout.slots_per_block
        self.region = transfers.allocate("kv", num_slots, layout.slot_nbytes)
        engine.attach_kv(self.region.buffer)
        self._pool: Region | None = None  # of a device, by the transport that reaches it

    def take_in(self) -> None:
        """Others may write to it: to a device's pool, where they can."""
        if self._engine.kv_memory is not None:
            self._pool = self._transfers.mirror(self.region, self._engine.kv_memory)

    def is_pool(self, transport: str) -> bool:
        """Whether slots are those of the pool, where bytes come over this transport."""
        pool = self._pool
        return self._engine.kv_in_place or (pool is not None and pool.remote.backend == transport)

    def written(self, *, by_head: bool) -> Region:
        """What others write to."""
        return self._transfers.recut(self.region, self._num_heads) if by_head else self.region

    async def write(self, ask: WriteKv | WriteState) -> WriteOutcome:
        engine, in_place = self._engine, self._transfers.takes_references(ask.target)
        if isinstance(ask, WriteState):
            source = await engine.fetch_state(ask.blocks, range(*ask.heads), in_place=in_place)
        else:
            heads = None if ask.heads is None else range(*ask.heads)
            source = await engine.fetch_kv(ask.slots, in_place=in_place, heads=heads)
        return await self._transfers.write(source, ask.target, ask.target_slots)

    async def land(self, ask: LandKv) -> Sums:
        """What has landed becomes the content of the blocks."""
        by_head, layout = bool(ask.heads), self._engine.kv_layout
        region = self._transfers.landing(self.written(by_head=by_head), ask.transport)
        num_apart = layout.num_state_blocks if ask.states else 0  # the last blocks
        size, last = layout.slots_per_block, len(ask.blocks) - num_apart
        apart = ask.slots[last * size :]
        pieces = self._pieces(region, apart, ask.states) if ask.states else []
        sums = [await self._sum(region, slots, ask.heads, apart, pieces) for slots in ask.summed]
        memory = region.buffer  # a look: where it lands in place, the engine reads it alone
        slots = [slot // size for slot in ask.slots[::size]]
        if last and (by_head or not self.is_pool(ask.transport)):
            await self._engine.land_kv(memory, slots[:last], ask.blocks[:last], by_head=by_head)
        if pieces:
            at = [(one.heads, one.run.start * region.remote.slot_nbytes) for one in pieces]
            await self._engine.land_state(memory, slots[last:], ask.blocks[last:], at)
        return Sums(sums=tuple(sums))

    def _pieces(
        self, region: Region, slots: Sequence[int], states: Sequence[tuple[int, int]]
    ) -> list[_Piece]:
        """What came of a state; the region's slots may be finer than these."""
        layout, fine = self._engine.kv_layout, region.remote.slot_nbytes
        num_parts = layout.slot_nbytes // fine
        cuts = cut(slots, range(num_parts), num_parts)
        heads, first = [range(*own) for own in states], layout.first_state_head
        sizes = [layout.state_nbytes(range(first + h.start, first + h.stop)) for h in heads]
        each = zip(heads, sizes, runs(sizes, fine), strict=True)
        return [_Piece(own, size, run, cuts[run.start : run.stop]) for own, size, run in each]

    async def _sum(
        self,
        region: Region,
        slots: Sequence[int],
        heads: Sequence[tuple[int, int]],
        apart: Sequence[int],
        pieces: Sequence[_Piece],
    ) -> int:
        """Of one write; slots of a state that came `apart` are in none of them, or all."""
        state = set(apart)
        kv: Sequence[int] = [slot for slot in slots if slot not in state]
        written = [cut(kv, range(*own), self._num_heads) for own in heads] if heads else [kv]
        each = [(part, len(part) * region.remote.slot_nbytes) for part in written if part]
        if len(kv) < len(slots):
            each += [(piece.slots, piece.nbytes) for piece in pieces]
        total = 0
        for part, nbytes in each:
            total += await self._transfers.checksum(region.views(part, nbytes))
        return total & 0xFFFFFFFF


class RankPart:
    """What a rank that does not lead does beside the steps."""

    def __init__(
        self,
        engine: LanguageEngine | None,
        transfers: DataPlane,
        config: PrefillConfig | None = None,
        *,
        takes_kv: bool,
    ) -> None:
        """`config`: of a rank that embedding rows come to."""
        self._engine = engine
        self._transfers = transfers
        self._rows: RankRows | None = None
        if config is not None and engine is not None and engine.row_contract is not None:
            self._rows = RankRows(transfers, config, engine.row_contract)
            engine.attach_rows(self._rows)
        self._kv = RankKv(engine, transfers) if engine is not None else None
        if self._kv is not None and takes_kv:
            self._kv.take_in()

    def joined(self) -> Joined:
        return Joined(regions=tuple(self._regions()))

    def _regions(self) -> Iterator[tuple[str, str, RemoteRegion]]:
        regions = [] if self._rows is None else [self._rows.region]
        if self._kv is not None:
            regions += [self._kv.written(by_head=by_head) for by_head in (False, True)]
        for region in regions:
            for transport in ("", *(offer.name for offer in self._transfers.offers)):
                there = self._transfers.descriptor(region, transport)
                yield region.remote.region_id, transport, there

    async def answer(self, ask: AnyAsk) -> Answer:
        try:
            match ask:
                case WriteKv() | WriteState():
                    assert self._kv is not None  # only its leader asks, which has the same roles
                    return await self._kv.write(ask)
                case LandKv():
                    assert self._kv is not None
                    return await self._kv.land(ask)
                case SumRows():
                    assert self._rows is not None
                    return await self._rows.sum(ask)
                case ReadAdapter():
                    assert self._engine is not None
                    await self._engine.read_adapter(ask.digest, ask.path)
                    return Holds(holds=True)
                case Settle():
                    return Holds(holds=await self._transfers.settle(ask.peer))
                case Fence():
                    where = ask.peer, ask.host_id, ask.pid
                    fenced = await self._transfers.fence(*where, has_ended=ask.has_ended)
                    return Holds(holds=fenced)
        except Exception as error:
            return Fault(reason=str(error) or repr(error))


class GroupDataPlane:
    """`DataPlane` of all ranks: the leader's own, with the parts of the others, which close
    theirs."""

    def __init__(self, own: DataPlane, others: OtherRanks) -> None:
        self._own = own
        self._others = others
        self.offers = own.offers
        self.lacks = own.lacks
        self.allocate, self.recut, self.revoke = own.allocate, own.recut, own.revoke
        self.descriptor, self.mirror, self.landing = own.descriptor, own.mirror, own.landing
        self.takes_references = own.takes_references
        self.guard, self.lend, self.take_back = own.guard, own.lend, own.take_back
        self.write, self.checksum, self.close = own.write, own.checksum, own.close

    @property
    def refused(self) -> Counter[str]:
        return self._own.refused

    def parts(self, region: Region, transport: str) -> tuple[RemoteRegion, ...]:
        def at(joined: Joined) -> RemoteRegion:
            key = [region.remote.region_id, transport]
            return next(there for *its, there in joined.regions if its == key)

        return tuple(at(joined) for _, joined in sorted(self._others.joined.items()))

    async def settle(self, peer: Address) -> bool:
        return await self._all(self._own.settle(peer), Settle(peer=peer))

    async def fence(
        self, peer: Address, host_id: str, pid: int, *, has_ended: bool = False
    ) -> bool:
        own = self._own.fence(peer, host_id, pid, has_ended=has_ended)
        ask = Fence(peer=peer, host_id=host_id, pid=pid, has_ended=has_ended)
        return await self._all(own, ask)

    async def _all(self, own: Awaitable[bool], ask: AnyAsk) -> bool:
        others = (self._holds(rank, ask) for rank in sorted(self._others.joined))
        return all(await of_all([own, *others]))

    async def _holds(self, rank: int, ask: AnyAsk) -> bool:
        try:
            answer = await self._others.ask(rank, ask)
        except RankLost:  # what it does is not known, and the process is about to end
            return False
        return isinstance(answer, Holds) and answer.holds
