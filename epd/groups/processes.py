"""The ranks of an instance as real processes of one host: forked, led, watched, ended together.

Theory of operation
-------------------
The process of an instance leads.  Before it has a thread it forks a process for each other rank.
Leader and follower share a socket pair, on which steps go one way and their numbers come back, in
order.  No other process has an end of it.  The file by which torch.distributed's ranks find each
other has no name.  Only the forks of this life have it, so no rank of an earlier one can be met
(fault F30).

One fate: a follower that ends closes its socket, which ends its group (GROUP).  A leader that ends,
however that came, takes its followers along: the kernel kills them, whatever they are in the midst
of, a collective that nobody else is in included.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, NoReturn, TypeVar

import msgspec

from epd.config import InstanceConfig
from epd.engine.base import EngineError
from epd.errors import Told, explain
from epd.fsm.group import CommandExecuted, RankEnded, RankJoined
from epd.fsm.story import RecordingJournal
from epd.groups.asks import Answer, AnyAsk, Fault, Joined, RankLost
from epd.groups.commands import Numbered, numbered
from epd.groups.data import RankPart
from epd.groups.leader import Command, Follower, Leader
from epd.records import rank_name
from epd.runtime import heap, lines
from epd.runtime.loading import load_rank
from epd.runtime.logs import set_up_logging
from epd.runtime.system import SystemClock, die_with_parent
from epd.runtime.worker import new_epoch, open_transfers

if TYPE_CHECKING:
    from epd.engine.sharding import Shard

T = TypeVar("T")
_LENGTH = struct.Struct("!I")


class GroupLost(Told):
    """A rank could not be loaded; the text is its own sentence."""


class AskSent(msgspec.Struct, frozen=True, tag="Asked"):
    """Something beside the steps."""

    serial: int
    ask: AnyAsk


class Present(msgspec.Struct, frozen=True, tag=True):
    """Of a rank: it is loaded."""

    joined: Joined


class Executed(msgspec.Struct, frozen=True, tag=True):
    """Of a rank: a command, done or failed; number 0: it cannot go on, or was never loaded."""

    number: int
    failure: str = ""


class AskAnswered(msgspec.Struct, frozen=True, tag="Answered"):
    """Of a rank: what came of what it was asked."""

    serial: int
    answer: Answer


_encode = msgspec.msgpack.Encoder(enc_hook=lambda tensor: tensor.tolist()).encode
_decode_order = msgspec.msgpack.Decoder(Numbered | AskSent).decode
_decode_reply = msgspec.msgpack.Decoder(Present | Executed | AskAnswered).decode


def encode_command(number: int, command: Command) -> bytes:
    return _framed(_encode(numbered(number, command)))


def _framed(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


async def _frame_of(reader: asyncio.StreamReader) -> bytes:
    """Raises EOFError or OSError when the other end is gone."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(length)


# --- the leader -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Rank:
    pid: int
    socket: socket.socket
    writer: asyncio.StreamWriter | None = None
    reads: asyncio.Task[None] | None = None
    asked: dict[int, asyncio.Future[Answer]] = field(default_factory=dict)  # by serial
    lost: RankLost | None = None

    def end(self, lost: RankLost) -> None:
        self.lost = lost
        for future in self.asked.values():
            if not future.done():
                future.set_exception(lost)


class ForkedRanks:
    """The ports `Ranks` and `OtherRanks` over forked processes; `leader`: from `form` on."""

    def __init__(
        self, config: InstanceConfig, epoch: int, meeting: int, ranks: dict[int, _Rank]
    ) -> None:
        self.config = config
        self.epoch = epoch
        self.leader: Leader
        self.joined: dict[int, Joined] = {}
        self.pids = tuple(rank.pid for rank in ranks.values())
        self._meeting = meeting
        self._ranks = ranks
        self._serials = itertools.count(1)

    async def form(self, load: Callable[[], T]) -> T:
        """Run `load`, which blocks, while the other ranks load; its result when all are there.

        Raises GroupLost, and what `load` raises.
        """
        config, clock = self.config, SystemClock()
        journal = RecordingJournal(clock.now_s)
        size = 1 + len(self._ranks)
        self.leader = leader = Leader(config.instance_id, size, self, clock, config.timing, journal)
        for number, rank in self._ranks.items():
            reader, rank.writer = await asyncio.open_unix_connection(sock=rank.socket)
            rank.reads = asyncio.create_task(self._read(number, reader))
        loaded = _in_thread(load)
        try:
            for awaited in (loaded, leader.ready):
                await asyncio.wait((awaited, leader.lost), return_when=asyncio.FIRST_COMPLETED)
                if leader.lost.done():
                    raise GroupLost(leader.lost.result())
                awaited.result()
        except BaseException:
            self.kill()
            raise
        return loaded.result()

    async def _read(self, number: int, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                self._take(number, _decode_reply(await _frame_of(reader)))
        except (EOFError, OSError):
            self._ranks[number].end(RankLost(f"rank {number} has ended"))
            self.leader.fire(RankEnded(number, "its process has ended"))

    def _take(self, number: int, reply: Present | Executed | AskAnswered) -> None:
        match reply:
            case Present():
                self.joined[number] = reply.joined
                self.leader.fire(RankJoined(number))
            case AskAnswered():
                future = self._ranks[number].asked.pop(reply.serial)
                if not future.done():
                    future.set_result(reply.answer)
            case Executed(number=0):
                self.leader.fire(RankEnded(number, reply.failure))
            case Executed():
                failed = bool(reply.failure)
                self.leader.fire(CommandExecuted(number, reply.number, failed))

    def shard(self) -> Shard:
        """The leader's own; waits until all ranks are at it."""
        return open_shard(self.config, 0, self._meeting)

    async def ask(self, rank: int, ask: AnyAsk) -> Answer:
        its = self._ranks[rank]
        if its.lost is not None:
            raise its.lost
        assert its.writer is not None
        serial = next(self._serials)
        its.asked[serial] = asyncio.get_running_loop().create_future()
        its.writer.write(_framed(_encode(AskSent(serial, ask))))
        answer = await its.asked[serial]
        if isinstance(answer, Fault):
            raise EngineError(f"rank {rank}: {answer.reason}")
        return answer

    def send(self, number: int, command: Command) -> None:
        frame = encode_command(number, command)
        for rank in self._ranks.values():
            assert rank.writer is not None
            rank.writer.write(frame)

    def end(self) -> None:
        for rank in self._ranks.values():
            assert rank.writer is not None
            with contextlib.suppress(OSError):  # it has ended already
                rank.writer.write_eof()

    def kill(self) -> None:
        """They are children that nobody waits for: their numbers stay theirs."""
        for rank in self._ranks.values():
            os.kill(rank.pid, signal.SIGKILL)


def _in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """On a thread that no process waits for: it may be in a collective for good."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(tell: Callable[[], None]) -> None:
        if not future.done():
            tell()

    def run() -> None:
        try:
            tell = partial(future.set_result, work())
        except Exception as error:
            tell = partial(future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, tell)

    threading.Thread(target=run, name="load", daemon=True).start()
    return future


def fork_ranks(config: InstanceConfig, log_level: str, *, log_json: bool) -> ForkedRanks:
    """Fork the followers of this process, which leads; to be called before there are threads."""
    meeting = os.memfd_create("epd-ranks")
    leader, epoch = os.getpid(), new_epoch()
    ranks: dict[int, _Rank] = {}
    for number, device in enumerate(config.rank_devices, 1):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if not pid:
            for other in (*(rank.socket for rank in ranks.values()), ours):
                other.close()
            name = f"{config.instance_id}.{number}"
            set_up_logging(name, log_level, as_json=log_json)
            own = msgspec.structs.replace(
                config, engine=msgspec.structs.replace(config.engine, device=device)
            )
            _be_rank(own, number, epoch, meeting, theirs, leader)
        theirs.close()
        ranks[number] = _Rank(pid, ours)
    return ForkedRanks(config, epoch, meeting, ranks)


# --- a follower -----------------------------------------------------------------------------------


def _be_rank(
    config: InstanceConfig, rank: int, epoch: int, meeting: int, channel: socket.socket, leader: int
) -> NoReturn:
    """In the fork; leaves without teardown, as what its parent has to close is not its own."""
    status = 1
    try:
        die_with_parent()
        for asked_of_leader in (signal.SIGINT, signal.SIGTERM):
            signal.signal(asked_of_leader, signal.SIG_IGN)
        if os.getppid() == leader:  # else it died before the kernel was asked
            status = follow(config, rank, epoch, meeting, channel)
    finally:
        lines.flush()
        os._exit(status)


def follow(
    config: InstanceConfig, rank: int, epoch: int, meeting: int, channel: socket.socket
) -> int:
    """Load a rank's share, then execute commands until there are no more; the exit status."""
    import uvloop

    from epd.engine.factory import build_executor

    try:
        executor = build_executor(config.engine, config.num_ranks)
        own = load_rank(config, executor, open_shard(config, rank, meeting))
    except Exception as error:
        channel.sendall(_framed(_encode(Executed(0, explain(error)[1]))))
        return 1

    async def live() -> None:
        reader, writer = await asyncio.open_unix_connection(sock=channel)

        def tell(reply: Present | Executed | AskAnswered) -> None:
            writer.write(_framed(_encode(reply)))

        async def answer(asked: AskSent) -> None:
            tell(AskAnswered(asked.serial, await part.answer(asked.ask)))

        transfers = open_transfers(config, rank_name(config.instance_id, rank), epoch)
        engine = own.language.engine if own.language is not None else None
        prefills = config.prefill if "prefill" in config.roles else None
        part = RankPart(engine, transfers, prefills, takes_kv="decode" in config.roles)
        follower = Follower(own, lambda *executed: tell(Executed(*executed)))
        heap.keep()
        tell(Present(part.joined()))
        answering: set[asyncio.Task[None]] = set()
        with contextlib.suppress(EOFError, OSError):
            while True:
                order = _decode_order(await _frame_of(reader))
                if isinstance(order, Numbered):
                    follower.execute(order.number, order.command)
                    continue
                task = asyncio.create_task(answer(order))
                answering.add(task)
                task.add_done_callback(answering.discard)
        await executor.close()
        await transfers.close()

    uvloop.run(live())
    return 0


def open_shard(config: InstanceConfig, rank: int, meeting: int) -> Shard:
    """Meet the other ranks.  All are on one host, so gloo needs no network but its own."""
    from torch import distributed

    from epd.engine.sharding import ProcessGroupCollectives, Shard

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    size = config.num_ranks
    distributed.init_process_group(
        "gloo" if config.engine.device == "cpu" else "nccl",
        store=distributed.FileStore(f"/proc/self/fd/{meeting}", size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=config.timing.group_join_timeout_s),
    )
    world = distributed.group.WORLD
    assert world is not None
    return Shard(rank, size, ProcessGroupCollectives(world))
