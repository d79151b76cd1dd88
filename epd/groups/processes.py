"""The ranks of an instance as real processes: started or awaited, led, watched, ended together.

Theory of operation
-------------------
The process of an instance leads.  Before it has a thread it forks a process for each other rank of
its host.  Leader and follower share a socket pair, on which steps go one way and their numbers come
back, in order.  No other process has an end of it.  The file by which torch.distributed's ranks
find each other has no name.  Only the forks of this life have it, so no rank of an earlier one can
be met (fault F30).  Ranks of other hosts come behind them, over connections of their own
(`elsewhere`); then all find each other by a store of this life, at the leader's address.

One fate: a follower that ends closes its socket, which ends its group (GROUP).  A leader that ends,
however that came, takes its followers along: the kernel kills them, whatever they are in the midst
of, a collective that nobody else is in included.  Those elsewhere lose the connection, and end.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn, TypeVar

import msgspec

from epd.config import InstanceConfig
from epd.engine.base import EngineError
from epd.fsm.group import CommandExecuted, RankBeat, RankEnded, RankJoined
from epd.fsm.story import RecordingJournal
from epd.groups.asks import Answer, AnyAsk, Fault, GroupLost, Joined, RankLost, RankPlace
from epd.groups.commands import (
    AskAnswered,
    AskSent,
    Beat,
    Executed,
    Present,
    Reply,
    decode_reply,
    encode_command,
    frame,
    frame_of,
)
from epd.groups.following import (
    Rendezvous,
    follow,
    limit_collectives,
    listener,
    open_shard,
)
from epd.groups.leader import Command, Leader
from epd.in_thread import in_thread
from epd.runtime import lines
from epd.runtime.logs import set_up_logging
from epd.runtime.system import SystemClock, die_with_parent
from epd.runtime.worker import Status, new_epoch
from epd.transport.host import this_host_id
from epd.transport.routing import data_host

if TYPE_CHECKING:
    from epd.engine.sharding import Shard
    from epd.groups.elsewhere import Gathering

T = TypeVar("T")


# --- the leader -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Rank:
    place: RankPlace
    socket: socket.socket | None = None  # until the loop has it
    reader: asyncio.StreamReader | None = None
    writer: asyncio.StreamWriter | None = None
    reads: asyncio.Task[None] | None = None
    asked: dict[int, asyncio.Future[Answer]] = field(default_factory=dict)  # by serial
    lost: RankLost | None = None

    def end(self, lost: RankLost) -> None:
        self.lost = lost
        for future in self.asked.values():
            if not future.done():
                future.set_exception(lost)


class RankProcesses:
    """The ports `Ranks` and `OtherRanks`; `leader`, and ranks of other hosts: from `form` on."""

    def __init__(self, config: InstanceConfig, meets: Rendezvous, ranks: dict[int, _Rank]) -> None:
        self.config = config
        self.epoch = meets.epoch
        self.leader: Leader
        self.joined: dict[int, Joined] = {}
        self._meets = meets
        self._ranks = ranks
        self._serials = itertools.count(1)
        self._gathering: Gathering | None = None

    @property
    def places(self) -> tuple[RankPlace, ...]:
        return tuple(rank.place for rank in self._ranks.values())

    async def form(self, load: Callable[[], T], status: Status = lambda state, detail: None) -> T:
        """Run `load`, which blocks, while the other ranks load; its result when all are there.

        Raises GroupLost, and what `load` raises.
        """
        if self.config.ranks_elsewhere:
            await self._gather(status)
        config, clock = self.config, SystemClock()
        journal = RecordingJournal(clock.now_s)
        size = 1 + len(self._ranks)
        self.leader = leader = Leader(config.instance_id, size, self, clock, config.timing, journal)
        for number, rank in self._ranks.items():
            if rank.socket is not None:
                opened = await asyncio.open_unix_connection(sock=rank.socket)
                rank.reader, rank.writer = opened
            assert rank.reader is not None
            rank.reads = asyncio.create_task(self._read(number, rank.reader))
        loaded = in_thread(load, "load")
        try:
            for awaited in (loaded, leader.ready):
                await asyncio.wait((awaited, leader.lost), return_when=asyncio.FIRST_COMPLETED)
                if leader.lost.done():
                    raise GroupLost(leader.lost.result())
                awaited.result()
        except BaseException:
            self.kill()
            raise
        limit_collectives(config)
        return loaded.result()

    async def _gather(self, status: Status) -> None:
        """The ranks of other hosts."""
        from epd.groups.elsewhere import Begun, Gathering

        assert self._meets.address is not None
        self._gathering = Gathering(self.config, self.epoch)  # it answers late ones, too,
        there = await self._gathering.all_there(status)
        for place, (reader, writer) in there.items():
            rank = 1 + len(self._ranks)
            self._ranks[rank] = _Rank(place, reader=reader, writer=writer)
            writer.write(frame(Begun(rank=rank, port=self._meets.address[1])))
        status("loading", "")

    async def _read(self, number: int, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                self._take(number, decode_reply(await frame_of(reader)))
        except (EOFError, OSError):
            self._ranks[number].end(RankLost(f"rank {number} has ended"))
            self.leader.fire(RankEnded(number, "its process has ended"))

    def _take(self, number: int, reply: Reply) -> None:
        match reply:
            case Present():
                self.joined[number] = reply.joined
                self.leader.fire(RankJoined(number))
            case AskAnswered():
                future = self._ranks[number].asked.pop(reply.serial)
                if not future.done():
                    future.set_result(reply.answer)
            case Beat():
                self.leader.fire(RankBeat(number))
            case Executed(number=0):
                self.leader.fire(RankEnded(number, reply.failure))
            case Executed():
                failed = bool(reply.failure)
                self.leader.fire(CommandExecuted(number, reply.number, failed))

    def shard(self) -> Shard:
        """The leader's own; waits until all ranks are at it."""
        return open_shard(self.config, 0, self._meets)

    async def ask(self, rank: int, ask: AnyAsk) -> Answer:
        its = self._ranks[rank]
        if its.lost is not None:
            raise its.lost
        assert its.writer is not None
        serial = next(self._serials)
        its.asked[serial] = asyncio.get_running_loop().create_future()
        its.writer.write(frame(AskSent(serial, ask)))
        answer = await its.asked[serial]
        if isinstance(answer, Fault):
            raise EngineError(f"rank {rank}: {answer.reason}")
        return answer

    def send(self, number: int, command: Command) -> None:
        data = encode_command(number, command)
        for rank in self._ranks.values():
            assert rank.writer is not None
            rank.writer.write(data)

    def end(self) -> None:
        if self._gathering is not None:
            self._gathering.close()
        for rank in self._ranks.values():
            assert rank.writer is not None
            with contextlib.suppress(OSError):  # it has ended already
                rank.writer.write_eof()

    def kill(self) -> None:
        """Those of this host are children that nobody waits for: their numbers stay theirs."""
        for rank in self._ranks.values():
            if rank.socket is not None:
                os.kill(rank.place[1], signal.SIGKILL)
            elif rank.writer is not None:
                rank.writer.transport.abort()


def fork_ranks(config: InstanceConfig, log_level: str, *, log_json: bool) -> RankProcesses:
    """Fork the followers of this process, which leads; to be called before there are threads."""
    leader, meets = os.getpid(), _rendezvous(config)
    ranks: dict[int, _Rank] = {}
    for number, device in enumerate(config.rank_devices, 1):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if not pid:
            for other in (*(rank.socket for rank in ranks.values()), ours):
                if other is not None:
                    other.close()
            name = f"{config.instance_id}.{number}"
            set_up_logging(name, log_level, as_json=log_json)
            own = msgspec.structs.replace(
                config, engine=msgspec.structs.replace(config.engine, device=device)
            )
            _be_rank(own, number, meets, theirs, leader)
        theirs.close()
        ranks[number] = _Rank((this_host_id(), pid), ours)
    return RankProcesses(config, meets, ranks)


def _rendezvous(config: InstanceConfig) -> Rendezvous:
    if not config.ranks_elsewhere:
        return Rendezvous(new_epoch(), os.memfd_create("epd-ranks"))
    host = data_host(config.endpoint)
    store = listener(host, 0)
    port = store.getsockname()[1]
    return Rendezvous(new_epoch(), store.detach(), (host, port))


# --- a follower -----------------------------------------------------------------------------------


def _be_rank(
    config: InstanceConfig, rank: int, meets: Rendezvous, channel: socket.socket, leader: int
) -> NoReturn:
    """In the fork; leaves without teardown, as what its parent has to close is not its own."""
    import uvloop

    async def live() -> int:
        return await follow(config, rank, meets, *await asyncio.open_unix_connection(sock=channel))

    status = 1
    try:
        die_with_parent()
        for asked_of_leader in (signal.SIGINT, signal.SIGTERM):
            signal.signal(asked_of_leader, signal.SIG_IGN)
        if os.getppid() == leader:  # else it died before the kernel was asked
            status = uvloop.run(live())
    finally:
        lines.flush()
        os._exit(status)
