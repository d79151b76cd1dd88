"""The data plane in simulation: bytes that are read late, land late, and outlive their sender.

Theory of operation
-------------------
A write is cut into a few pieces.  Each piece is read from the source when it moves, not when the
write was asked for, so a source that is reused too early shows up as wrong bytes.  Pieces land at
times of their own within the write's duration (latency plus bytes over bandwidth; writes of one
process queue behind each other).

Two kinds of hardware.  `shm`: the writer's own threads move the bytes, so a stall stops them and a
kill ends them; a dead owner's segment still takes them, and nobody sees it.  `rdma`: a network card
moves them: they land while the writer is stalled, and for a while after it died; a region that is
gone refuses.

`Unknown` outcomes are a stress that a drill asks for: the writer gets it early, and the bytes may
land up to `linger_s` later; `settle` gives True when they have.  A call that raises late is alike.
Where only the peer has the outcome (`asks`, as between hosts), `settle` asks it, if it lives.
`fence` gives True only when the peer is dead and nothing between the two is under way; with `asks`,
a writer's death in a write must be attested (`witnesses.py`).

A changed bit is found by who sums: a transport that does so itself (`own_check`) fails the write.

Every landing is shown to `on_land`, for the integrity checker: memory must belong to a lease that
was granted to this writer."""

from __future__ import annotations

import asyncio
import contextvars
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from epd.messages import Address, RemoteRegion, TransportOffer
from epd.transport.base import (
    Buffer,
    DataPlane,
    Region,
    WriteFailed,
    WriteOutcome,
    WriteUnknown,
    Written,
)
from epd.transport.region import (
    Piece,
    RegionIds,
    RegionKey,
    SlotRegion,
    WriteRefused,
    byte_views,
    check_shape,
    key_of,
    only_reference,
    plan,
)
from epd_lab.sim.core.loop import SimLoop
from epd_lab.sim.core.process import SimProcess, current_process
from epd_lab.sim.core.rand import SEPARATOR, KeyedRandom
from epd_lab.sim.planes.witnesses import Witnesses

FENCE_COST_S = 0.001
LOCAL_COST_S = 0.00002
CLOSE_LOOK_S, CLOSE_LOOKS, SETTLE_TIMEOUT_S = 0.01, 500, 0.5
SLOW_WRITE_S = 0.02  # there is time for more than the next step: a sign, it changes nothing


@dataclass(frozen=True, slots=True)
class DataConditions:
    """How writes behave; probabilities are per write."""

    kind: str = "shm"  # or "rdma"
    latency_s: float = 0.0001
    jitter_s: float = 0.002
    nbytes_per_s: float = 2e6  # small, as the simulated tensors are
    num_pieces: int = 3
    failed: float = 0.0  # definite failure: nothing has landed
    unknown: float = 0.0  # reported before its end
    corrupt: float = 0.0  # a bit of it lands as another
    own_check: bool = False  # the transport sums what it moves
    asks: bool = False  # whether a write in doubt has ended is known to its target only
    linger_s: float = 2.0  # how long after the report, or after the writer's death, bytes may land


@dataclass(eq=False, slots=True)
class SimWrite:
    """One write under way."""

    writer: SimProcess
    target: RemoteRegion
    slots: tuple[int, ...]
    pieces: list[Piece]
    future: asyncio.Future[WriteOutcome]
    checksums: dict[int, bytes] = field(default_factory=dict)  # by index of piece: bytes as read
    corrupt_piece: int = -1
    what: str = ""  # of a write whose bytes were told to change
    raises: Exception | None = None  # instead of an outcome, while bytes still land
    num_landed: int = 0
    refused: str = ""
    ended: bool = False


class Fabric:
    """All regions and writes of a world."""

    def __init__(
        self,
        loop: SimLoop,
        random: KeyedRandom,
        trace: Callable[..., None],
        conditions: DataConditions,
    ) -> None:
        self.loop = loop
        self.random = random
        self.trace = trace
        self.conditions = conditions
        self.regions: dict[RegionKey, tuple[SlotRegion, SimProcess]] = {}
        self.writes: dict[SimWrite, None] = {}
        self.lives: dict[tuple[str, int], SimProcess] = {}
        self.barred: set[tuple[tuple[str, int], tuple[str, int]]] = set()  # owner, writer
        self.busy_until_s: dict[str, float] = {}
        self.counters: Counter[str] = Counter()
        self.on_land: Callable[[SimWrite, SimProcess, Sequence[int]], None] | None = None
        self.witnesses = Witnesses(self.lives)
        self.corrupt_next: dict[str, deque[str]] = {}  # by writer: what its next writes are called
        self.near: tuple[str, ...] = ()  # whose devices reach each other: how their names begin
        self._serial: Counter[tuple[object, ...]] = Counter()

    def region(self, target: RemoteRegion) -> tuple[SlotRegion, SimProcess] | None:
        found = self.regions.get(key_of(target))
        return found if found is not None and found[0].remote == target else None

    def writes_of(self, process: SimProcess) -> list[SimWrite]:
        return [w for w in self.writes if w.writer is process]

    def process_died(self, process: SimProcess) -> None:
        """Its threads stop; what a card has taken over lands for a while yet."""
        for write in self.writes_of(process):
            owner = (write.target.instance_id, write.target.epoch)
            self.witnesses.died_in_a_write((process.instance_id, process.epoch), owner)
            if self.conditions.kind == "shm":
                self.end(write)
            else:
                ends_s = self.loop.now_s + self.conditions.linger_s
                self.loop.call_outside(ends_s, self.end, write)

    def heal(self) -> None:
        """No stress from now on; what is under way goes on."""
        kind = self.conditions.kind
        self.conditions = DataConditions(kind=kind, asks=self.conditions.asks)
        self.corrupt_next.clear()

    def end(self, write: SimWrite) -> None:
        write.ended = True
        self.writes.pop(write, None)

    def begin(self, write: SimWrite) -> None:
        """Schedule the pieces and the report of a write."""
        conditions, loop = self.conditions, self.loop
        writer = write.writer.name
        nbytes = sum([view.nbytes for _, view in write.pieces])
        place = (writer, write.target.instance_id, write.target.region_id, *write.slots)
        self._serial[place] += 1
        key = SEPARATOR.join(map(str, (*place, self._serial[place])))
        starts_s = max(loop.now_s, self.busy_until_s.get(writer, 0.0))
        took_s = conditions.latency_s + nbytes / conditions.nbytes_per_s
        took_s += conditions.jitter_s * self.random.share(f"jitter{SEPARATOR}{key}")
        took_s *= write.writer.slowness
        self.counters["slow_write"] += took_s > SLOW_WRITE_S
        ends_s = self.busy_until_s[writer] = starts_s + took_s
        self.writes[write] = None
        # a card goes on by itself; a copying thread lives and stalls with its process
        context = write.writer.context if conditions.kind == "shm" else contextvars.Context()
        reported_s = ends_s
        if self.random.chance(conditions.failed, "failed", key):
            self.counters["failed"] += 1
            write.refused = "the connection broke before the first byte"
            loop.call_at(starts_s, self._report, write, context=write.writer.context)
            return
        unknown = write.raises is not None or self.random.chance(conditions.unknown, "unknown", key)
        if unknown:
            self.counters["unknown"] += 1
            ends_s += conditions.linger_s * self.random.uniform("linger", key)
        count = len(write.pieces)
        planned = self.corrupt_next.get(write.writer.instance_id)
        if planned or self.random.chance(conditions.corrupt, "corrupt", key):
            write.what = planned.popleft() if planned else ""
            write.corrupt_piece = int(count * self.random.share(f"corrupt piece{SEPARATOR}{key}"))
        for index in range(count):
            drawn = self.random.share(f"piece{SEPARATOR}{index}{SEPARATOR}{key}")
            when_s = starts_s + (ends_s - starts_s) * ((index + drawn) / count)
            loop.call_at(when_s, self._land, write, index, context=context)
        loop.call_at(ends_s, self._finish, write, context=context)
        if unknown:
            told = WriteUnknown("the transport gave no answer in time")
            loop.call_at(reported_s, self._tell, write, told, context=write.writer.context)

    def _land(self, write: SimWrite, index: int) -> None:
        if write.ended:
            return
        found = self.region(write.target)
        if found is None:
            write.refused = "the region is gone"
            return
        region, owner = found
        offset, view = write.pieces[index]
        content = bytes(view)  # read now, not when it was asked for
        write.checksums[index] = content
        write.num_landed += 1
        if not owner.alive or region.revoked:
            if self.conditions.kind != "shm":
                write.refused = "the peer does not answer"
            return
        slot_nbytes, nbytes = write.target.slot_nbytes, len(content)
        touched = range(offset // slot_nbytes, (offset + nbytes - 1) // slot_nbytes + 1)
        if self.on_land is not None:
            self.on_land(write, owner, touched)
        region.forget(touched)
        region.buffer[offset : offset + nbytes] = content
        if index == write.corrupt_piece:
            self._corrupt(write, region, offset)
        self.trace("land", write.writer.name, write.target.region_id, *touched)

    def _corrupt(self, write: SimWrite, region: SlotRegion, offset: int) -> None:
        self.counters["corrupted"] += 1
        self.counters[f"corrupted {write.what or write.target.region_id}"] += 1
        region.buffer[offset] ^= 1
        if self.conditions.own_check:
            self.counters["corruption refused"] += 1
            write.refused = "what arrived has another sum than what was sent"

    def _finish(self, write: SimWrite) -> None:
        if not write.ended:
            self.end(write)
            if current_process() is write.writer:
                self._report(write)
            else:
                self.loop.call_soon(self._report, write, context=write.writer.context)

    def _report(self, write: SimWrite) -> None:
        self.end(write)
        if write.refused:
            self._tell(write, WriteFailed(write.refused))
            return
        checksum = 0
        for index in range(len(write.pieces)):
            checksum = zlib.crc32(write.checksums.get(index, b""), checksum)
        self._tell(write, Written(sum(v.nbytes for _, v in write.pieces), checksum))

    def _tell(self, write: SimWrite, outcome: WriteOutcome) -> None:
        if not write.future.done():
            self.trace("written", write.writer.name, write.target.region_id, type(outcome).__name__)
            if write.raises is not None:
                write.future.set_exception(write.raises)
            else:
                write.future.set_result(outcome)

    def under_way(self, writer: tuple[str, int], owner: tuple[str, int]) -> bool:
        return any(
            (w.writer.instance_id, w.writer.epoch) == writer
            and (w.target.instance_id, w.target.epoch) == owner
            for w in self.writes
        )


class SimTransferEngine(DataPlane):
    """The `TransferEngine` port of one simulated process."""

    def __init__(self, fabric: Fabric, process: SimProcess) -> None:
        self._fabric = fabric
        self._process = process
        self._life = (process.instance_id, process.epoch)
        self._region_ids = RegionIds()
        self._closed = False
        fabric.lives[self._life] = process

    def allocate(
        self, name: str, num_slots: int, slot_nbytes: int, *, by_reference: bool = False
    ) -> SlotRegion:
        nbytes = check_shape(name, num_slots, slot_nbytes)
        remote = RemoteRegion(
            backend="sim",
            instance_id=self._life[0],
            epoch=self._life[1],
            region_id=self._region_ids.new(name),
            locator="",
            slot_nbytes=slot_nbytes,
            num_slots=num_slots,
        )
        region = SlotRegion(remote, memoryview(bytearray(nbytes)), by_reference=by_reference)
        self._fabric.regions[key_of(remote)] = (region, self._process)
        return region

    @property
    def offers(self) -> tuple[TransportOffer, ...]:
        return (TransportOffer(name="sim", domain=""),)

    def descriptor(self, region: Region, transport: str) -> RemoteRegion:
        return region.remote

    def recut(self, region: Region, num_parts: int) -> Region:
        return region  # of one head

    def takes_references(self, target: RemoteRegion) -> bool:
        found = self._fabric.region(target)
        return found is not None and found[1] is self._process and found[0].by_reference

    async def write(
        self, source: Sequence[Buffer], target: RemoteRegion, slots: Sequence[int]
    ) -> WriteOutcome:
        breaks = self._process.breaks
        late = breaks.meet("write")
        found = self._fabric.region(target)
        if found is None or self._closed:
            return WriteFailed(f"region {target.region_id!r} of {target.instance_id} is not there")
        region = found[0]
        if (reference := only_reference(source)) is not None:
            await asyncio.sleep(LOCAL_COST_S)
            if not self.takes_references(target):
                return WriteFailed("the region was revoked meanwhile, or is not in this process")
            region.deposit(slots, [reference])
            return Written(reference.nbytes, 0)
        try:
            views = byte_views(source)
            pieces = plan(views, target, slots)
        except WriteRefused as refused:
            return WriteFailed(str(refused))
        if ((target.instance_id, target.epoch), self._life) in self._fabric.barred:
            return WriteFailed(f"{target.instance_id} has fenced this instance")
        cut = _cut(pieces, self._fabric.conditions.num_pieces)
        write = SimWrite(
            self._process, target, tuple(slots), cut, self._fabric.loop.create_future()
        )
        write.raises = breaks.error("write") if late else None
        self._fabric.begin(write)
        return await write.future

    async def settle(self, peer: Address) -> bool:
        """True: nothing of ours is under way to that peer."""
        await self._take_time("settle")
        life = (peer.instance_id, peer.epoch)
        if self._fabric.conditions.asks and not self._fabric.witnesses.answers(self._process, life):
            self._fabric.counters["settle unanswered"] += 1
            await asyncio.sleep(SETTLE_TIMEOUT_S)
            return False
        return not self._fabric.under_way(self._life, life)

    async def fence(
        self, peer: Address, host_id: str, pid: int, *, has_ended: bool = False
    ) -> bool:
        """True: dead, and nothing between us is under way; never without `host_id`.

        Bars that life for good, as engines between hosts do: who fences the living is found out.
        """
        await self._take_time("fence")
        life, fabric = (peer.instance_id, peer.epoch), self._fabric
        fabric.barred.add((self._life, life))
        if not host_id or not fabric.witnesses.has_ended(life, attested=has_ended):
            return False
        if fabric.conditions.asks and fabric.witnesses.lacks(self._process, life):
            fabric.counters["fence not attested"] += 1
            return False
        return not fabric.under_way(life, self._life) and not fabric.under_way(self._life, life)

    async def _take_time(self, call: str) -> None:
        late = self._process.breaks.meet(call)
        await asyncio.sleep(FENCE_COST_S)
        if late:
            raise self._process.breaks.error(call)

    async def checksum(self, views: Sequence[Buffer]) -> int:
        if self._process.breaks.meet("checksum"):
            raise self._process.breaks.error("checksum")
        return zlib.crc32(b"".join(views))

    def revoke(self, region: Region) -> None:
        self._fabric.regions.pop(key_of(region.remote), None)
        if isinstance(region, SlotRegion):
            region.release()

    async def close(self) -> bool:
        self._closed = True
        fabric, own = self._fabric, self._process
        for _ in range(CLOSE_LOOKS):
            if fabric.writes_of(own):
                await asyncio.sleep(CLOSE_LOOK_S)
        for key in [key for key in self._fabric.regions if key[:2] == self._life]:
            self.revoke(self._fabric.regions[key][0])
        return not fabric.writes_of(own)


def _cut(pieces: list[Piece], wanted: int) -> list[Piece]:
    """At least `wanted` pieces, if the bytes suffice: a write can then be half done."""
    cut: list[Piece] = []
    per_piece = max(1, -(-wanted // max(1, len(pieces))))
    for offset, view in pieces:
        step = max(1, -(-view.nbytes // per_piece))
        starts = range(0, view.nbytes, step)
        cut.extend((offset + start, view[start : start + step]) for start in starts)
    return cut
