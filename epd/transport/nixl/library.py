"""NIXL's agent, from the package to one finished transfer.

Measured of NIXL 1.5.1 over TCP (tests/transport/nixl/): a released transfer goes on, and still
reads its source.  Bytes land in memory that its owner has deregistered, from a writer that it has
removed, and whose state is DONE.  So nothing of NIXL ends a write but its own end.  An owner gets
no sign of a writer's death.  A stopped or unreachable peer is in progress for ever, unless the
kernel gives its connection up (`LIMIT`), as where a cable is cut.  UCX's own keep-alive stays off:
where a peer that it gave up wakes again, the process that wrote to it ends with a segmentation
fault.  A connection that broke is made again only once the peer's metadata is removed and loaded
anew.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import importlib
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Protocol

import numpy as np

from epd.transport.base import TransportError
from epd.transport.host import TcpSocket
from epd.transport.linked.leave import End, FarRegion, Moved, WritePiece

LIMIT_MS = 5017  # of bytes that nobody acknowledges; no other connection has this limit
LIMIT = "UCX_TCP_USER_TIMEOUT"
ENVIRONMENT = {
    "NIXL_LOG_LEVEL": "FATAL",  # what fails is returned, and not only logged
    "UCX_LOG_LEVEL": "FATAL",  # on standard output
    LIMIT: f"{LIMIT_MS}ms",
    "UCX_KEEPALIVE_INTERVAL": "inf",
    # A dead writer's queue in shared memory would be read after its end, and nothing shows it.
    "UCX_TLS": "^posix,sysv,xpmem",
}
PACKAGES = ("nixl-cu13", "nixl-cu12")
FIRST_PAUSE_S = 20e-6
LONGEST_PAUSE_S = 1e-3
GIVE_UP_S = 60.0  # after this a write is without end
MEMORY = "DRAM"
PAUSE_US = 100_000


def load() -> ModuleType:
    """The library's module.  Raises TransportError that names what to install."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for package in PACKAGES:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(f"{package.replace('-', '_')}._api")
    raise TransportError(
        f"the nixl transport needs the package {PACKAGES[1]}: pip install {PACKAGES[1]} "
        f"({PACKAGES[0]} beside a torch for CUDA 13)"
    )


@contextlib.contextmanager
def with_pause(module: ModuleType) -> Iterator[None]:
    """The thread of an agent that is made within sleeps until UCX has an event.  The package gives
    it no pause, so it takes half a core of a process that has nothing to do."""
    bare = module.nixlBind.nixlAgent

    def made(name: str, config: object) -> object:
        setattr(config, "pthrDelay", PAUSE_US)  # noqa: B010 - a name of the library's, in microseconds
        return bare(name, config)

    module.nixlBind.nixlAgent = made
    try:
        yield
    finally:
        module.nixlBind.nixlAgent = bare


def missing() -> str:
    """Why the library cannot be used here; empty if it can.  Imports it."""
    try:
        load()
    except (TransportError, ImportError) as error:
        return str(error)
    return ""


class _Cut(Protocol):
    """A list of slots that the library has prepared."""

    def release(self) -> None: ...


@dataclass(eq=False, slots=True)
class _Memory:
    """Registered own memory, cut into slots by size; `uses`: as a region, and by writes."""

    address: int
    nbytes: int
    device: int | None
    descriptors: object
    num_regions: int = 0
    uses: int = 0
    lists: dict[int, _Cut] = field(default_factory=dict)

    def overlaps(self, address: int, nbytes: int) -> bool:
        return self.address < address + nbytes and address < self.address + self.nbytes

    def covers(self, address: int, nbytes: int) -> bool:
        return self.address <= address and address + nbytes <= self.address + self.nbytes


@dataclass(slots=True)
class _Peer:
    """Metadata of one life of a peer, as loaded: what it is called, what refers to it.

    `is_over`: a connection broke, or a later life has come."""

    name: str
    words: set[str] = field(default_factory=set)
    lists: dict[tuple[int, int], _Cut] = field(default_factory=dict)  # by address and slot
    under_way: int = 0
    is_over: bool = False


class _Write:
    """One transfer that was submitted."""

    def __init__(self, agent: Agent, peer: _Peer, handle: object, read: list[_Memory]) -> None:
        self._agent, self._peer, self._handle, self._read = agent, peer, handle, read

    def look(self, post: bool = False) -> End:
        """DONE, BROKEN, or ENDLESS as long as it is under way; not asked for after its end."""
        api = self._agent.api
        try:
            state = api.transfer(self._handle) if post else api.check_xfer_state(self._handle)
        except self._agent.errors:
            state = "ERR"
        if state == "PROC":
            return End.ENDLESS
        with contextlib.suppress(*self._agent.errors):
            api.release_xfer_handle(self._handle)
        self._agent.ended(self._peer, self._read, is_broken=state != "DONE")
        return End.DONE if state == "DONE" else End.BROKEN


class Agent:
    """One agent, by the name of a life of an instance; reachable by all that have its words."""

    device_memory = "VRAM"

    def __init__(self, life: str) -> None:
        module = load()
        kinds = [kind for kind in vars(module.nixlBind).values() if isinstance(kind, type)]
        own = (kind for kind in kinds if issubclass(kind, Exception))
        self.errors: tuple[type[Exception], ...] = (*own, RuntimeError, ValueError)
        sync = module.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = module.nixl_agent_config(backends=["UCX"], sync_mode=sync)
        try:  # two engines of one life, as tests have, are two
            with with_pause(module):
                self.api = module.nixl_agent(f"{life}-{secrets.token_hex(4)}", config)
        except self.errors as error:
            why = f"{error!r}; UCX_LOG_LEVEL=info shows more"
            raise TransportError(f"nixl makes no agent: {why}") from None
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.api))  # until nothing is in doubt
        self._lock = threading.Lock()
        self._memories: list[_Memory] = []
        self._peers: dict[str, _Peer] = {}  # by name
        self._names: dict[str, str] = {}  # by word
        self._is_limit_ours = os.environ[LIMIT] == ENVIRONMENT[LIMIT]

    def carries(self, one: TcpSocket) -> bool:
        """UCX sends both ways over one connection, and gives each its limit."""
        return not self._is_limit_ours or abs(one.user_timeout_ms - LIMIT_MS) <= 1

    def _kind(self, device: int | None) -> tuple[str, int]:
        """The library's words for a memory."""
        return (MEMORY, 0) if device is None else (self.device_memory, device)

    def register(self, address: int, nbytes: int, device: int | None = None) -> str:
        """See `Mover`; on a device, by its number."""
        with self._lock:
            same = (m for m in self._memories if (m.address, m.nbytes) == (address, nbytes))
            try:
                memory = next(same, None) or self._registered(address, nbytes, device)
            except self.errors as error:
                raise TransportError(
                    f"nixl cannot register {nbytes} bytes ({error}): raise the limit of locked "
                    "memory (ulimit -l unlimited), or lower pool_nbytes or kv_nbytes"
                ) from None
            memory.num_regions += 1
            memory.uses += 1
            metadata = self.api.get_partial_agent_metadata(memory.descriptors, True, ["UCX"])
            return base64.urlsafe_b64encode(metadata).decode()

    def share(self, address: int) -> None:
        """One more region lies in the memory that is registered there."""
        with self._lock:
            memory = self._region_at(address)
            memory.num_regions += 1
            memory.uses += 1

    def unregister(self, address: int) -> None:
        with self._lock:
            memory = self._region_at(address)
            memory.num_regions -= 1
            self._let_go([memory])

    def _region_at(self, address: int) -> _Memory:
        return next(m for m in self._memories if m.address == address and m.num_regions)

    def _registered(self, address: int, nbytes: int, device: int | None) -> _Memory:
        """Raises one of `errors`."""
        kind, number = self._kind(device)
        descriptors = self.api.register_memory([(address, nbytes, number, "")], kind)
        self._memories.append(_Memory(address, nbytes, device, descriptors))
        return self._memories[-1]

    def _let_go(self, memories: list[_Memory]) -> None:
        for memory in memories:
            memory.uses -= 1
            if not memory.uses:
                self._memories.remove(memory)
                for cut in memory.lists.values():
                    cut.release()
                self.api.deregister_memory(memory.descriptors)

    def transfer(self, to: FarRegion, pieces: Sequence[WritePiece]) -> Moved:
        """See `Mover`."""
        if not pieces:
            return Moved(End.DONE)  # an empty list is refused
        try:
            with self._lock:
                write = self._prepared(to, pieces)
        except self.errors:
            return Moved(End.REFUSED)
        pause_s, until_s = FIRST_PAUSE_S, time.monotonic() + GIVE_UP_S
        end = write.look(post=True)
        while end is End.ENDLESS and time.monotonic() < until_s:
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)
            end = write.look()
        return Moved(end, write.look)

    def _prepared(self, to: FarRegion, pieces: Sequence[WritePiece]) -> _Write:
        """Raises one of `errors`: nothing is under way."""
        peer = self._peer(to.word)
        read = self._read_by(pieces)
        moves = np.array([(p.source, p.target, p.nbytes) for p in pieces], np.uint64)
        try:
            handle = self._by_slots(peer, to, moves, read[0]) if len(read) == 1 else None
            if handle is None:
                described = []
                for side, device in enumerate((pieces[0].device, to.device)):
                    kind, number = self._kind(device)
                    numbers = np.full(len(moves), number, np.uint64)
                    end = np.stack((moves[:, side], moves[:, 2], numbers), 1)
                    described.append(self.api.get_xfer_descs(end, kind))
                handle = self.api.initialize_xfer("WRITE", *described, peer.name)
        except self.errors:
            self._let_go(read)
            raise
        peer.under_way += 1
        return _Write(self, peer, handle, read)

    def _read_by(self, pieces: Sequence[WritePiece]) -> list[_Memory]:
        """The registered memory that the library may look a source up in, held until the write's
        end.  A source outside of any is registered for so long."""
        spans: list[list[int]] = []
        for source, nbytes in sorted((piece.source, piece.nbytes) for piece in pieces):
            if spans and spans[-1][0] + spans[-1][1] == source:
                spans[-1][1] += nbytes
            else:
                spans.append([source, nbytes])
        read: list[_Memory] = []
        try:
            for span in spans:
                used = [m for m in self._memories if m.overlaps(*span)]
                if not any(memory.covers(*span) for memory in used):
                    used.append(self._registered(span[0], span[1], pieces[0].device))
                for memory in used:
                    if memory not in read:
                        memory.uses += 1
                        read.append(memory)
        except self.errors:
            self._let_go(read)
            raise
        return read

    def _peer(self, word: str) -> _Peer:
        if (name := self._names.get(word)) is None:
            name = self.api.add_remote_agent(base64.urlsafe_b64decode(word)).decode()
            self._names[word] = name
            instance = name.rsplit("-", 2)[0]
            for other in list(self._peers.values()):
                if other.name != name and other.name.rsplit("-", 2)[0] == instance:
                    self._part_with(other)
        peer = self._peers.setdefault(name, _Peer(name))
        peer.words.add(word)
        if peer.is_over:
            raise ValueError(f"writes to {name} have not ended")
        return peer

    def _part_with(self, peer: _Peer) -> None:
        """At once, or with the end of its last write; what is loaded after that is another."""
        peer.is_over = True
        if peer.under_way:
            return
        for cut in peer.lists.values():
            cut.release()
        del self._peers[peer.name]
        for word in peer.words:
            self._names.pop(word, None)
        with contextlib.suppress(*self.errors):
            self.api.remove_remote_agent(peer.name)

    def _by_slots(self, peer: _Peer, to: FarRegion, moves: np.ndarray, memory: _Memory) -> object:
        """A transfer of whole slots out of a region, by lists that are made once; or None."""
        slot = to.slot_nbytes
        offsets = moves - np.array((memory.address, to.base, 0), np.uint64)
        if not memory.num_regions or (offsets % np.uint64(slot)).any():
            return None
        if slot not in memory.lists:
            its = (memory.address, slot, memory.nbytes // slot, memory.device)
            memory.lists[slot] = self._cut("", *its)
        if (to.base, slot) not in peer.lists:
            theirs = (to.base, slot, to.num_slots, to.device)
            peer.lists[to.base, slot] = self._cut(peer.name, *theirs)
        counts = (moves[:, 2] // slot).astype(np.int64)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        sources, targets = (
            (np.repeat(offsets[:, side].astype(np.int64) // slot, counts) + within).astype(np.int32)
            for side in (0, 1)
        )
        lists = (memory.lists[slot], sources, peer.lists[to.base, slot], targets)
        return self.api.make_prepped_xfer("WRITE", *lists)

    def _cut(self, name: str, address: int, slot: int, count: int, device: int | None) -> _Cut:
        kind, number = self._kind(device)
        table = np.array([(address, slot, number, slot, count)], np.uint64)
        cut: _Cut = self.api.prep_xfer_dlist(name, table, kind)
        return cut

    def ended(self, peer: _Peer, read: list[_Memory], *, is_broken: bool) -> None:
        """Of one write."""
        with self._lock:
            self._let_go(read)
            peer.under_way -= 1
            if is_broken or peer.is_over:
                self._part_with(peer)

    def give_back(self) -> None:
        """The agent ends."""
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self.api))
        del self.api
