"""Data planes over a mover of bytes without owners: mooncake's engine, NIXL's agents.

A mover makes one-sided writes and nothing more: any process that has an address may write, a failed
write may still land, and nobody can be turned away.  So every write asks first, over a connection
of our own (`links`: authenticated, of one life of a peer).  The owner checks region, epoch and
slots, and notes the write as begun; the writer reports its end.  So the owner has at any time a
list of those that may be writing.

Outcomes.  Not begun, or declined: `WriteFailed`.  All pieces done: `Written`.  Else:
`WriteUnknown`.

Fence.  A peer is barred: it begins nothing any more.  If it has begun nothing that has not ended,
that is all.  Otherwise its process must have ended, and the mover must have read its connections to
their ends.  Of another host, a life that runs there attests both, if we are connected with one: its
successor, mostly.  A writer in doubt whose connections broke can also ask a living owner
whether they have been read to the end.  In all other cases memory stays owned: a host that vanished
in the middle of a write leaves its slots owned until one of its instances is back.

Over TCP any source memory will do.  RDMA reads sources from registered memory only: KV blocks lie
in it, rows go through the encoder's ring of send slots.
"""

from __future__ import annotations

import asyncio
import functools
import re
import secrets
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from epd.messages import Address, Message, RemoteRegion
from epd.transport.backend import BackendSettings
from epd.transport.base import Life, WriteOutcome, WriteUnknown, Written
from epd.transport.host import (
    TcpSocket,
    has_half_closed_arrivals,
    is_process_dead,
    is_still_sent_to,
    own_ports,
    this_host_id,
)
from epd.transport.host_engine import Write
from epd.transport.host_memory import address_of
from epd.transport.linked.engine import LinkedEngine
from epd.transport.linked.frames import (
    BeginFrame,
    Declined,
    Done,
    EndFrame,
    GoneFrame,
    SettleFrame,
)
from epd.transport.linked.wire import Wire, WireLost
from epd.transport.region import SlotRegion, WriteRefused

BEGIN_TIMEOUT_S = 10.0
NUM_THREADS = 16  # writes under way at once; a frozen peer does not get as far as here
LOCATOR = re.compile(
    r"(?P<control>[^/]+)/(?P<place>[^/]+)/(?P<base>[0-9a-f]{1,16})(@(?P<device>[0-9]{1,2}))?"
)

_kept: list[memoryview] = []  # memory that a peer may still write to: never given back


class End(Enum):
    DONE = "all bytes are in the target's memory"
    REFUSED = "some pieces were never submitted and nothing is under way"
    BROKEN = "some pieces failed and their connections are closed; what was sent may still land"
    ENDLESS = "some pieces did not end: the source may still be read"


@dataclass(frozen=True, slots=True)
class WritePiece:
    """Bytes from one address of this process to one of the peer's; those of one write come from
    one memory: the host's (None), or a device's by its number."""

    source: int
    target: int
    nbytes: int
    device: int | None = None


@dataclass(frozen=True, slots=True)
class FarRegion:
    """A region of a peer: its mover's word for it, and its slots from an address of theirs."""

    word: str
    base: int
    slot_nbytes: int
    num_slots: int
    device: int | None = None  # that they lie on


@dataclass(slots=True)
class Moved:
    """`look`: whether a write without an end has ended meanwhile; None where nothing can."""

    end: End
    look: Callable[[], End] | None = None


class Mover(Protocol):
    """One engine of a library.  Its methods may block, but `transfer` alone does for long."""

    def carries(self, one: TcpSocket) -> bool:
        """Whether a peer's bytes may come over it.  One that is not the mover's may be closed at
        its other end for ever, and no fence would end."""

    def register(self, address: int, nbytes: int) -> str:
        """Let peers write there, to a `FarRegion` of this word.  Raises TransportError."""

    def unregister(self, address: int) -> None: ...

    def transfer(self, to: FarRegion, pieces: Sequence[WritePiece]) -> Moved:
        """Write the pieces; blocks its thread, asleep most of the time."""

    def give_back(self) -> None:
        """Nothing is registered, under way or in doubt any more."""


@dataclass(slots=True)
class _Doubt:
    """A write of ours that ended unknown, and where its owner answers."""

    control: str
    moved: Moved


class LeaveEngine(LinkedEngine):
    """One instance's data plane over a mover.  Raises TransportError, also without the library."""

    def __init__(self, its: BackendSettings) -> None:
        super().__init__(its)
        self._begin_timeout_s = BEGIN_TIMEOUT_S
        self._mover = self._moved_by(its)
        self._threads = ThreadPoolExecutor(
            NUM_THREADS, thread_name_prefix=f"epd-{self.kind}", initializer=self._enter
        )
        self._barred: set[Life] = set()
        self._begun: dict[bytes, tuple[Life, memoryview]] = {}  # by peers, into our memory
        self._ended: dict[Life, list[bytes]] = {}  # own writes whose end the owner may not know
        self._doubts: dict[Life, dict[bytes, _Doubt]] = {}  # own writes, ended unknown

    @abstractmethod
    def _moved_by(self, its: BackendSettings) -> Mover: ...

    def _enter(self) -> None:
        """A thread that moves bytes begins."""

    def _locator(self, memory: memoryview) -> str:
        """And registered with the mover."""
        base = address_of(memory)
        word = self._mover.register(base, memory.nbytes)
        return f"{super()._locator(memory)}/{word}/{base:x}"

    def conceal(self, region: SlotRegion, remote: RemoteRegion) -> None:
        if self._own.pop(remote.region_id, None) is not None:
            found = LOCATOR.fullmatch(remote.locator)
            assert found is not None  # it is ours
            self._mover.unregister(int(found["base"], 16))

    # --- writing ----------------------------------------------------------------------------------

    async def _write(self, write: Write) -> WriteOutcome:
        target, life = write.target, write.life
        found = LOCATOR.fullmatch(target.locator)
        if found is None:
            raise WriteRefused(f"{target.locator!r} is not a place that {self.kind} can write to")
        base, control = int(found["base"], 16), found["control"]
        device = int(found["device"]) if found["device"] else None
        place = FarRegion(found["place"], base, target.slot_nbytes, target.num_slots, device)
        moves = self._moves(write, base)
        token = secrets.token_bytes(12)
        wire = await self._begin(write, control, token)
        transfer = functools.partial(self._mover.transfer, place, moves)
        moved = await asyncio.get_running_loop().run_in_executor(self._threads, transfer)
        if moved.end in {End.BROKEN, End.ENDLESS}:
            self._doubts.setdefault(life, {})[token] = _Doubt(control, moved)
            return WriteUnknown(f"{self.kind} to {target.instance_id}: {moved.end.value}")
        self._ended.setdefault(life, []).append(token)
        wire.post(EndFrame(tokens=(token,)))
        if moved.end is End.REFUSED:
            raise WriteRefused(f"{self.kind} does not reach {target.instance_id}")
        checksum = await self._sum(write) if self._copier.checksums else 0
        return Written(write.nbytes, checksum)

    async def _sum(self, write: Write) -> int:
        return await self._copier.checksum(write.views)

    def _moves(self, write: Write, base: int) -> list[WritePiece]:
        """Into a region at `base`."""
        return [
            WritePiece(address_of(view), base + offset, view.nbytes)
            for offset, view in write.pieces
        ]

    async def _begin(self, write: Write, control: str, token: bytes) -> Wire:
        """The owner's leave to write.  Raises WriteRefused: nothing was submitted."""
        target, life = write.target, write.life
        wire = await self._links.to(life, control)
        number, answer = wire.ask()
        ended = tuple(self._ended.get(life, ()))
        wire.post(BeginFrame(number=number, token=token, ended=ended, **write.announced()))
        await asyncio.wait((answer,), timeout=self._begin_timeout_s)
        try:
            if not answer.done():
                wire.sever()
                raise WireLost(f"it did not answer for {self._begin_timeout_s:g} s")
            said = answer.result()
        except WireLost as lost:
            self._ended.setdefault(life, []).append(token)  # should it have been noted as begun
            raise WriteRefused(f"{target.instance_id}: {lost}") from None
        self._ended[life] = [t for t in self._ended.get(life, ()) if t not in ended]
        if isinstance(said, Declined):
            raise WriteRefused(f"{target.instance_id} refused: {said.reason}")
        return wire

    # --- being written to -------------------------------------------------------------------------

    def _on_frame(self, wire: Wire, frame: object) -> None:
        if isinstance(frame, BeginFrame):
            self._end(frame.ended)
            wire.post(self._answer(wire, frame))
        elif isinstance(frame, EndFrame):
            self._end(frame.tokens)
        elif isinstance(frame, SettleFrame):
            self._answer_later(self._settle(wire, frame))
        elif isinstance(frame, GoneFrame):
            self._answer_later(self._attest(wire, frame))
        else:
            wire.sever()

    def _answer(self, wire: Wire, frame: BeginFrame) -> Message:
        if wire.peer in self._barred:
            return Declined(number=frame.number, reason="this instance is fenced")
        try:
            region = self._granted(frame, wire.peer)
        except WriteRefused as refused:
            return Declined(number=frame.number, reason=str(refused))
        self._begun[frame.token] = (wire.peer, region.buffer)
        return Done(number=frame.number)

    def _end(self, tokens: tuple[bytes, ...]) -> None:
        for token in tokens:
            self._begun.pop(token, None)

    async def _settle(self, wire: Wire, frame: SettleFrame) -> None:
        """The writer has closed what carried these; have we read it to the end?"""
        if await self._is_arriving():
            wire.post(Declined(number=frame.number, reason="bytes may still be arriving"))
            return
        self._end(frame.tokens)
        wire.post(Done(number=frame.number))

    async def _attest(self, wire: Wire, frame: GoneFrame) -> None:
        if is_process_dead(frame.pid) and not await asyncio.to_thread(
            is_still_sent_to, frame.ports
        ):
            wire.post(Done(number=frame.number))
        else:
            wire.post(Declined(number=frame.number, reason="it may live, or its bytes are queued"))

    # --- the end of things ------------------------------------------------------------------------

    async def settle(self, peer: Address) -> bool:
        """Ask the peer about our writes that ended in doubt; those that have no end stay so."""
        if not await super().settle(peer):
            return False
        life = (peer.instance_id, peer.epoch)
        return await self._resolve(life, self._doubts.get(life, {}))

    async def fence(
        self, peer: Address, host_id: str, pid: int, *, has_ended: bool = False
    ) -> bool:
        """Bar that life; True once nothing that it or we have begun can still move."""
        life = (peer.instance_id, peer.epoch)
        self._barred.add(life)  # but still heard: it may say what has ended
        begun = [token for token, (writer, _) in self._begun.items() if writer == life]
        doubts = self._doubts.get(life, {})
        if not begun and not doubts:
            return True
        if has_ended or await self._is_gone(life, host_id, pid):
            self._doubts.pop(life, None)  # its memory is gone
            if begun and await self._is_arriving():
                return False
            self._end(tuple(begun))
            return True
        return not begun and await self._resolve(life, doubts)

    async def _is_arriving(self) -> bool:
        return await asyncio.to_thread(has_half_closed_arrivals, self._mover.carries)

    async def _is_gone(self, life: Life, host_id: str, pid: int) -> bool:
        """Its process has ended, as seen here, or attested by a process that can see it."""
        if host_id == this_host_id():
            return is_process_dead(pid)
        ports = await asyncio.to_thread(own_ports, self._mover.carries)
        return await self._links.attested(
            life, host_id, lambda number: GoneFrame(number=number, pid=pid, ports=ports)
        )

    async def _resolve(self, life: Life, doubts: dict[bytes, _Doubt]) -> bool:
        for doubt in list(doubts.values()):
            if doubt.moved.end is End.ENDLESS and doubt.moved.look is not None:
                doubt.moved.end = await asyncio.to_thread(doubt.moved.look)
        if any(doubt.moved.end is End.ENDLESS for doubt in doubts.values()):
            return False
        for control in sorted({doubt.control for doubt in doubts.values()}):
            tokens = tuple(token for token, doubt in doubts.items() if doubt.control == control)

            def settle(number: int, tokens: tuple[bytes, ...] = tokens) -> Message:
                return SettleFrame(number=number, tokens=tokens)

            if not await self._links.ask_apart(life, control, settle):
                return False
            for token in tokens:  # whoever asks: others may have asked meanwhile
                doubts.pop(token, None)
        return not doubts  # nor those that came meanwhile

    async def close(self) -> bool:
        """Always False: a library's engine stays, and only the process ends what it still does."""
        if self._closed:
            return False
        await super().close()
        # Memory that somebody may still write to is not given back.
        _kept.extend(memory for _, memory in self._begun.values())
        self._threads.shutdown(wait=False)
        if not (self._writes or self._begun or any(self._doubts.values())):
            self._mover.give_back()
        return False
