"""A rank that does not lead: it loads its share, then executes commands until there are no more."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from epd.config import InstanceConfig
from epd.errors import explain
from epd.groups.commands import (
    AskAnswered,
    AskSent,
    Beat,
    Executed,
    Numbered,
    Present,
    Reply,
    decode_order,
    frame,
    frame_of,
)
from epd.groups.data import RankPart
from epd.groups.leader import END_S, Follower
from epd.in_thread import in_thread
from epd.records import rank_name
from epd.runtime import heap
from epd.runtime.loading import LoadedRank, load_rank
from epd.runtime.system import SystemClock
from epd.runtime.worker import open_transfers
from epd.transport.routing import data_host

if TYPE_CHECKING:
    from torch.distributed import Store

    from epd.engine.device.executor import DeviceExecutor
    from epd.engine.sharding import Shard

T = TypeVar("T")
SIOCGIFADDR = 0x8915  # linux/sockios.h


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where torch.distributed's ranks of one life of a group find each other.

    Of one host: a file without a name, `fd`, which its forks have.  Else a store of the leader at
    `address`, and its keys begin with the epoch; `fd` is the leader's socket then."""

    epoch: int
    fd: int = -1
    address: tuple[str, int] | None = None

    def store(self, rank: int, size: int, timeout: timedelta) -> Store:
        from torch import distributed

        if self.address is None:
            return distributed.FileStore(f"/proc/self/fd/{self.fd}", size)
        host, port = self.address
        leads = {"is_master": True, "master_listen_fd": self.fd} if not rank else {}
        served = distributed.TCPStore(
            host, port, size, timeout=timeout, wait_for_workers=False, **leads
        )
        return distributed.PrefixStore(str(self.epoch), served)


def open_shard(config: InstanceConfig, rank: int, meets: Rendezvous) -> Shard:
    """Meet the other ranks.  Those of one host need no network but its own."""
    from torch import distributed

    from epd.engine.sharding import ProcessGroupCollectives, Shard

    card = "lo" if meets.address is None else interface_of(data_host(config.endpoint))
    if card:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", card)
    if card and meets.address is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", card)
    size = config.num_ranks
    timeout = timedelta(seconds=config.timing.group_join_timeout_s)
    distributed.init_process_group(
        "gloo" if config.engine.device == "cpu" else "nccl",
        store=meets.store(rank, size, timeout),
        rank=rank,
        world_size=size,
        timeout=timeout,
    )
    world = distributed.group.WORLD
    assert world is not None
    return Shard(rank, size, ProcessGroupCollectives(world))


def limit_collectives(config: InstanceConfig) -> None:
    """All have loaded, and wait for each other no longer than for a step.  On one host the end of a
    process ends collectives; a cable that is cut does not."""
    if config.ranks_elsewhere:
        from torch import distributed

        world = distributed.group.WORLD
        assert world is not None
        world.set_timeout(timedelta(seconds=config.timing.group_step_timeout_s))


def listener(host: str, port: int) -> socket.socket:
    """Bound to this address alone.  Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host.strip("[]"), port), family=family)


def interface_of(host: str) -> str:
    """The network card whose first address of IPv4 this is; empty if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode())
                found = socket.inet_ntoa(fcntl.ioctl(asks, SIOCGIFADDR, request)[20:24])
                if found == socket.gethostbyname(host):
                    return name
    return ""


def _load(
    config: InstanceConfig, rank: int, meets: Rendezvous
) -> tuple[DeviceExecutor, LoadedRank]:
    """Both on one thread, since which device is current is a thread's own."""
    from epd.engine.factory import build_executor

    executor = build_executor(config.engine, 1 + len(config.rank_devices))
    return executor, load_rank(config, executor, open_shard(config, rank, meets))


async def follow(
    config: InstanceConfig,
    rank: int,
    meets: Rendezvous,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    *,
    on_present: Callable[[], None] = lambda: None,
) -> int:
    """Returns the exit status when the leader has ended, or asks for no more; or cannot load."""

    def tell(reply: Reply) -> None:
        if not writer.is_closing():
            writer.write(frame(reply))

    loading = in_thread(partial(_load, config, rank, meets), "load")
    first = asyncio.ensure_future(frame_of(reader))
    await asyncio.wait((loading, first), return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        first.exception()  # the leader has ended
        return 1
    if error := loading.exception():
        tell(Executed(0, explain(error)[1]))
        with contextlib.suppress(OSError):
            await writer.drain()
        return 1
    executor, own = loading.result()
    limit_collectives(config)
    transfers = open_transfers(config, rank_name(config.instance_id, rank), meets.epoch)
    engine = own.language.engine if own.language is not None else None
    prefills = config.prefill if "prefill" in config.roles else None
    part = RankPart(engine, transfers, prefills, takes_kv="decode" in config.roles)
    follower = Follower(
        own, lambda *executed: tell(Executed(*executed)), lambda: tell(Beat()), SystemClock(),
        config.timing.heartbeat_interval_s,
    )  # fmt: skip
    heap.keep()
    tell(Present(part.joined()))
    follower.beat()
    on_present()

    async def answer(asked: AskSent) -> None:
        tell(AskAnswered(asked.serial, await part.answer(asked.ask)))

    answering: set[asyncio.Task[None]] = set()
    with contextlib.suppress(EOFError, OSError):
        data = await first
        while True:
            order = decode_order(data)
            if isinstance(order, Numbered):
                follower.execute(order.number, order.command)
            else:
                task = asyncio.create_task(answer(order))
                answering.add(task)
                task.add_done_callback(answering.discard)
            data = await frame_of(reader)
    with contextlib.suppress(TimeoutError):  # a peer may be behind the same cable
        async with asyncio.timeout(END_S):
            await executor.close()
            await transfers.close()
    return 0
