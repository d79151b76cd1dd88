"""Data plane over mooncake's transfer engine: one-sided writes between hosts.

Mooncake moves bytes and nothing more: any process that knows port and address may write, a failed
write may still land, and nobody can be turned away.  So every write asks first, over a connection
of our own (`links`: authenticated, of one life of a peer): the owner checks region, epoch and
slots, and notes the write as begun; the writer says when it has ended.  The owner therefore knows
at any time who may be writing.

Outcomes.  Not begun, or declined: `WriteFailed`.  All pieces done: `Written`.  Anything else:
`WriteUnknown`.

Fence.  A peer is barred: it begins nothing any more.  If it has begun nothing that has not ended,
that is all.  Otherwise it must have died on this host, and the library must have read its
connections to their ends.  A writer in doubt whose connections broke can also ask a living owner
whether they have been read to the end.  What neither covers stays owned: a host that vanished in
the middle of a write leaves its slots owned until this process ends.

Protocol TCP: any source memory will do.  RDMA reads sources from registered memory only: KV blocks
lie in it, rows go through the encoder's ring of send slots.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import re
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from epd.config import MOONCAKE_OVER_TCP, MooncakeConfig
from epd.messages import Address, Message, RemoteRegion
from epd.transport.backend import Backend, BackendSettings
from epd.transport.base import Life, WriteOutcome, WriteUnknown, Written
from epd.transport.endpoint import is_loopback, is_tcp
from epd.transport.frames import BeginFrame, Declined, Done, EndFrame, SettleFrame
from epd.transport.host import has_half_closed_arrivals, is_process_dead, this_host_id
from epd.transport.host_engine import HostEngine
from epd.transport.host_memory import address_of, anonymous
from epd.transport.links import Links
from epd.transport.mooncake_library import End, Library, Piece, missing
from epd.transport.region import Piece as Place
from epd.transport.region import SlotRegion, WriteRefused, check_shape
from epd.transport.wire import Wire, WireLost

BEGIN_TIMEOUT_S = 10.0
NUM_THREADS = 16  # writes under way at once; a frozen peer does not get as far as here
LOCATOR = re.compile(r"(?P<control>[^/]+)/(?P<engine>[^/]+)/(?P<base>[0-9a-f]{1,16})")

_kept: list[memoryview] = []  # memory that a peer may still write to: never given back


class MooncakeTransferEngine(HostEngine):
    """One instance's data plane over mooncake.

    `host`: where peers can reach this instance.  `secret`: of the cluster; may be empty on
    loopback.  Raises TransportError when the library is missing or the address cannot be used.
    """

    kind = "mooncake"

    def __init__(
        self,
        instance_id: str,
        epoch: int,
        *,
        checksums: bool = False,
        host: str = "127.0.0.1",
        secret: bytes = b"",
        config: MooncakeConfig = MOONCAKE_OVER_TCP,
        begin_timeout_s: float = BEGIN_TIMEOUT_S,
    ) -> None:
        super().__init__(instance_id, epoch, checksums=checksums)
        self._begin_timeout_s = begin_timeout_s
        self._links: Links = Links(self._life, host, secret, self._on_frame)
        self._library = Library.acquire(host, config)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="epd-mooncake")
        self._barred: set[Life] = set()
        self._begun: dict[bytes, tuple[Life, memoryview]] = {}  # by peers, into our memory
        self._ended: dict[Life, list[bytes]] = {}  # own writes whose end the owner may not know
        self._doubts: dict[Life, dict[bytes, tuple[str, End]]] = {}  # own writes, ended unknown

    @property
    def domain(self) -> str:
        return self._links.domain

    def allocate(
        self, name: str, num_slots: int, slot_nbytes: int, *, by_reference: bool = False
    ) -> SlotRegion:
        """Zeroed, resident memory, registered with mooncake."""
        memory = anonymous(check_shape(name, num_slots, slot_nbytes))
        remote = self._register(self._region_ids.new(name), memory, num_slots, slot_nbytes)
        region = SlotRegion(remote, memory, by_reference=by_reference)
        self._own[remote.region_id] = region
        return region

    def _register(
        self, region_id: str, memory: memoryview, num_slots: int, slot_nbytes: int
    ) -> RemoteRegion:
        base = address_of(memory)
        self._library.register(base, memory.nbytes)
        engine = f"{self._library.host}:{self._library.port}"
        locator = f"{self._links.listen()}/{engine}/{base:x}"
        return self._remote(region_id, locator, num_slots, slot_nbytes)

    def expose(self, region: SlotRegion) -> RemoteRegion:
        own = region.remote
        remote = self._register(own.region_id, region.buffer, own.num_slots, own.slot_nbytes)
        self._own[own.region_id] = region
        return remote

    def conceal(self, region: SlotRegion, remote: RemoteRegion) -> None:
        if self._own.pop(remote.region_id, None) is not None:
            self._library.unregister(address_of(region.buffer))

    # --- writing ----------------------------------------------------------------------------------

    async def _write(
        self,
        views: list[memoryview],
        pieces: list[Place],
        target: RemoteRegion,
        slots: tuple[int, ...],
    ) -> WriteOutcome:
        found = LOCATOR.fullmatch(target.locator)
        if found is None:
            raise WriteRefused(f"{target.locator!r} is not a place that mooncake can write to")
        base, control, engine = int(found["base"], 16), found["control"], found["engine"]
        moves = [Piece(address_of(view), base + offset, view.nbytes) for offset, view in pieces]
        life = (target.instance_id, target.epoch)
        token = secrets.token_bytes(12)
        nbytes = sum(view.nbytes for view in views)
        wire = await self._begin(target, slots, nbytes, control, token)
        transfer = functools.partial(self._library.transfer, engine, moves)
        end = await asyncio.get_running_loop().run_in_executor(self._threads, transfer)
        if end in {End.BROKEN, End.ENDLESS}:
            self._doubts.setdefault(life, {})[token] = (control, end)
            return WriteUnknown(f"mooncake to {target.instance_id}: {end.value}")
        self._ended.setdefault(life, []).append(token)
        wire.post(EndFrame(tokens=(token,)))
        if end is End.REFUSED:
            raise WriteRefused(f"mooncake does not reach {target.instance_id} at {engine}")
        checksum = await self._copier.checksum(views) if self._copier.checksums else 0
        return Written(nbytes, checksum)

    async def _begin(
        self, target: RemoteRegion, slots: tuple[int, ...], nbytes: int, control: str, token: bytes
    ) -> Wire:
        """The owner's leave to write.  Raises WriteRefused: nothing was submitted."""
        life = (target.instance_id, target.epoch)
        wire = await self._links.to(life, control)
        number, answer = wire.ask()
        ended = tuple(self._ended.get(life, ()))
        wire.post(
            BeginFrame(
                number=number,
                region_id=target.region_id,
                slot_nbytes=target.slot_nbytes,
                num_slots=target.num_slots,
                slots=slots,
                nbytes=nbytes,
                token=token,
                ended=ended,
            )
        )
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

    def _on_frame(self, wire: Wire, frame: Any) -> None:
        if isinstance(frame, BeginFrame):
            self._end(frame.ended)
            wire.post(self._answer(wire, frame))
        elif isinstance(frame, EndFrame):
            self._end(frame.tokens)
        elif isinstance(frame, SettleFrame):
            self._answer_later(self._settle(wire, frame))
        else:
            wire.sever()

    def _answer(self, wire: Wire, frame: BeginFrame) -> Message:
        if wire.peer in self._barred:
            return Declined(number=frame.number, reason="this instance is fenced")
        try:
            region = self._granted(frame)
        except WriteRefused as refused:
            return Declined(number=frame.number, reason=str(refused))
        self._begun[frame.token] = (wire.peer, region.buffer)
        return Done(number=frame.number)

    def _end(self, tokens: tuple[bytes, ...]) -> None:
        for token in tokens:
            self._begun.pop(token, None)

    async def _settle(self, wire: Wire, frame: SettleFrame) -> None:
        """The writer has closed what carried these; have we read it to the end?"""
        if await asyncio.to_thread(has_half_closed_arrivals):
            wire.post(Declined(number=frame.number, reason="bytes may still be arriving"))
            return
        self._end(frame.tokens)
        wire.post(Done(number=frame.number))

    # --- the end of things ------------------------------------------------------------------------

    async def settle(self, peer: Address) -> bool:
        """Ask the peer about our writes that ended in doubt; those that did not end stay so."""
        if not await super().settle(peer):
            return False
        life = (peer.instance_id, peer.epoch)
        return await self._resolve(life, self._doubts.get(life, {}))

    async def fence(self, peer: Address, host_id: str, pid: int) -> bool:
        """Bar that life; True once nothing that it or we have begun can still move."""
        life = (peer.instance_id, peer.epoch)
        self._barred.add(life)  # but still heard: it may say what has ended
        begun = [token for token, (writer, _) in self._begun.items() if writer == life]
        doubts = self._doubts.get(life, {})
        if not begun and not doubts:
            return True
        if host_id == this_host_id() and is_process_dead(pid):
            self._doubts.pop(life, None)  # its memory is gone
            arriving = await asyncio.to_thread(has_half_closed_arrivals)
            if begun and arriving:
                return False
            self._end(tuple(begun))
            return True
        return not begun and await self._resolve(life, doubts)

    async def _resolve(self, life: Life, doubts: dict[bytes, tuple[str, End]]) -> bool:
        if any(end is End.ENDLESS for _, end in doubts.values()):
            return False
        for control in sorted({control for control, _ in doubts.values()}):
            tokens = tuple(token for token, (where, _) in doubts.items() if where == control)

            def settle(number: int, tokens: tuple[bytes, ...] = tokens) -> Message:
                return SettleFrame(number=number, tokens=tokens)

            if not await self._links.ask_apart(life, control, settle):
                return False
            for token in tokens:
                del doubts[token]
        return True

    async def close(self) -> None:
        if self._closed:
            return
        await super().close()
        # Memory that somebody may still write to is not given back.
        _kept.extend(memory for _, memory in self._begun.values())
        self._threads.shutdown(wait=False)
        if not (self._writes or self._begun or any(self._doubts.values())):
            self._library.give_back()


def _make(its: BackendSettings) -> MooncakeTransferEngine:
    return MooncakeTransferEngine(
        its.instance_id, its.epoch, checksums=its.checksums, host=its.host, secret=its.secret,
        config=its.mooncake,
    )  # fmt: skip


def _is_offered(endpoint: str, directory: str) -> bool:
    """The package is imported only where it is there and would be of use."""
    if not is_tcp(endpoint) or is_loopback(endpoint):
        return False
    return importlib.util.find_spec("mooncake") is not None and not missing()


BACKEND = Backend(
    "mooncake", rank=20, leaves_host=True, make=_make, is_offered=_is_offered,
    domain="none, beyond loopback; on loopback the network namespace",
    offered="if the bus listens where other hosts reach it, and the package works",
    lacks=missing,
)  # fmt: skip
