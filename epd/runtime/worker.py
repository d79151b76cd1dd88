"""One serving process: engines, ports, roles, and an orderly end.

Engines are loaded before the instance joins, so that what the gateway sees is what can serve. Ways
to end: SIGTERM, SIGHUP or an operator's word by the gateway drains; a second SIGTERM, SIGINT or the
supervisor's end closes. An instance that has lost a rank closes with `EXIT_EXPELLED`, one whose
device does not work any more with `EXIT_DEVICE_LOST`; its supervisor starts it anew.  One that an
operator took out closes with `EXIT_DRAINED`, and stays out.  Whatever the way, sockets, ipc files
and shared memory are removed.

A life whose epoch was declared lost, or that is to have other roles, ends within the process, and
another one begins with its weights (`roles/holding.py`).  All else is made anew: sockets,
registered memory, roles.  It begins when nothing that the former began moves a byte any more. Where
that is not certain, the process ends: with a group's rank, and with mooncake and nixl, whose
engines stay.  The next process has the new roles then."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING

from epd.config import InstanceConfig
from epd.fsm.instance import named
from epd.fsm.kernel import Journal
from epd.fsm.story import RecordingJournal
from epd.messages import Address, InstanceInfo
from epd.roles.compose import Engines, Instance
from epd.roles.holding import Holding
from epd.roles.ports import Ports
from epd.runtime import heap
from epd.runtime.joins import Joins
from epd.runtime.lag import watch_lag
from epd.runtime.loading import backends_of, lacks_of
from epd.runtime.logs import LoggingLog
from epd.runtime.system import SystemClock, SystemRandom
from epd.scheduling.placement import lacking
from epd.transport.backend import BackendSettings
from epd.transport.base import Bus, DataPlane, Storage, TransportError
from epd.transport.bus.zmq import ZmqBus
from epd.transport.endpoint import is_tcp
from epd.transport.host import is_process_dead, this_host_id
from epd.transport.local import LocalMemory
from epd.transport.routing import RoutingTransferEngine, data_host

if TYPE_CHECKING:
    from epd.transport.bus.curve import ClusterKey

logger = logging.getLogger(__name__)
EXIT_DRAINED = 79  # behind the last of sysexits.h: an operator took it out, no life is to follow
EXIT_DEVICE_LOST = 74  # EX_IOERR
EXIT_EXPELLED = 75  # EX_TEMPFAIL: this life is over, a new one may join

Status = Callable[[str, str], None]  # state, detail
ALIVE = "alive"  # a state that is an answer, and no change
MEETING = "meeting"  # its configuration is right, and it waits for ranks of other hosts
LOST = "lost"  # of another process: the gateway's word; the detail is its id
ROLES = "roles"  # that its later processes are to have, too


def new_epoch() -> int:
    """This life of the process: later starts are greater, unless the clock was set back."""
    return time.time_ns() // 1_000_000


def make_ports(
    bus: Bus, transfers: DataPlane, storage: Storage | None = None, journal: Journal | None = None
) -> Ports:
    """The real ports of one instance; `journal`: one that has a machine of it already."""
    clock = SystemClock()
    return Ports(
        clock=clock,
        bus=bus,
        random=SystemRandom(),
        transfers=transfers,
        journal=journal or RecordingJournal(clock.now_s),
        log=LoggingLog(),
        storage=storage,
    )


def open_transfers(config: InstanceConfig, name: str, epoch: int) -> RoutingTransferEngine:
    """The data plane of an instance, or of one rank of it.  Raises TransportError."""
    key = load_cluster_key(config.cluster_key)
    settings = BackendSettings(
        name,
        epoch,
        host=data_host(config.endpoint),
        secret=key.data_plane_secret() if key is not None else b"",
        directory=config.transport_directory,
        mooncake=config.mooncake,
        options=json.loads(config.transport_options or "{}"),
        device=config.engine.device,
    )
    checksums = config.engine.checksums
    backends = backends_of(config)
    return RoutingTransferEngine(
        settings, LocalMemory(), backends, checksums=checksums, lacks=lacks_of(config)
    )


def open_storage(config: InstanceConfig) -> Storage | None:
    """Where encoders keep rows beyond their memory, and prefill instances find those in files.

    Raises TransportError.
    """
    encode, encodes = config.encode, "encode" in config.roles
    if encode.cache_store and encodes:
        from epd.transport.mooncake.store import MooncakeStore
        from epd.transport.storage import ThreadedStorage

        host = data_host(config.endpoint)
        return ThreadedStorage(
            MooncakeStore(encode.cache_store, host, encode.cache_store_nbytes, config.mooncake)
        )
    if encode.cache_dir and (encodes or "prefill" in config.roles):
        from epd.transport.files.store import FileStore
        from epd.transport.storage import ThreadedStorage

        return ThreadedStorage(FileStore(encode.cache_dir, encode.cache_disk_nbytes))
    return None


def load_cluster_key(path: str) -> ClusterKey | None:
    if not path:
        return None
    from epd.transport.bus.curve import ClusterKey

    return ClusterKey.load(path)


class Ending:
    """How a process is asked to end; the first SIGTERM drains, a second or an interrupt closes."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.now = asyncio.Event()
        self.exit_status = 0
        self.num_asked = 0  # times, by signals

    def ask(self) -> None:
        self.num_asked += 1
        (self.now if self.num_asked > 1 else self.drain).set()
        self.drain.set()

    def hang_up(self) -> None:
        """A terminal that closes sends several of these: they count as one."""
        self.num_asked = max(1, self.num_asked)
        self.drain.set()

    def at_once(self, exit_status: int) -> None:
        self.exit_status = exit_status
        self.drain.set()
        self.now.set()

    def watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.ask)
        loop.add_signal_handler(signal.SIGINT, self.at_once, 130)
        on_hang_up(self.hang_up)


def on_hang_up(work: Callable[[], object]) -> None:
    """At SIGHUP, of which a terminal that closes sends several; not under nohup."""
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, work)


async def serve_instance(
    config: InstanceConfig, engines: Engines, fingerprint: str, ending: Ending, status: Status
) -> int:
    """Join the gateway over the network and serve until asked to end; returns the exit status.

    A life that was declared lost is followed by another one, with the same engines; one that is to
    have other roles, with those that these need."""
    epoch = first_epoch = engines.epoch or new_epoch()
    held = Holding(config, engines)
    heap.keep()  # the engines, and not what a life adds
    goes_on = True
    while goes_on:
        try:
            goes_on = await _live(held, fingerprint, ending, status, epoch)
        except TransportError as error:
            if epoch == first_epoch:
                raise
            if not held.is_on_trial:
                status("expelled", f"no memory for another life: {error}")
                return EXIT_EXPELLED
            held.fail(str(error))
        if goes_on:
            await _any_of(held.renew(), ending.drain.wait())
            heap.let_go()
            if reason := held.config.kept_roles:
                logger.warning("%s", reason)
            goes_on = not ending.drain.is_set()
            epoch = max(new_epoch(), epoch + 1)
    return ending.exit_status


async def _open_instance(
    config: InstanceConfig,
    engines: Engines,
    fingerprint: str,
    gateways: Sequence[Address],
    bus: Bus,
) -> Instance:
    """Of the epoch of this bus.  Raises TransportError."""
    name, epoch = bus.address.instance_id, bus.address.epoch
    transfers: DataPlane = open_transfers(config, name, epoch)
    if engines.ranks is not None:
        from epd.groups.data import GroupDataPlane

        transfers = GroupDataPlane(transfers, engines.ranks)
    ports = make_ports(bus, transfers, open_storage(config), engines.journal)
    names = ", ".join(offer.name for offer in transfers.offers)
    logger.info("offers %s (transport %s)", names, config.transport)
    place = this_host_id(), os.getpid()
    try:
        kind = engines.kind or Instance
        return kind(ports, config, engines, gateways, fingerprint, *place)
    except BaseException:
        await transfers.close()
        raise


async def _live(
    held: Holding, fingerprint: str, ending: Ending, status: Status, epoch: int
) -> bool:
    """One epoch of the instance; whether another one may follow it in this process: nothing that
    this one began moves any more."""
    config, engines = held.config, held.engines
    key = load_cluster_key(config.cluster_key)
    bus = ZmqBus(config.instance_id, epoch, config.endpoint, cluster_key=key)
    public_key = key.server_public if key is not None else ""
    joins = Joins(config.gateway_endpoint, public_key)
    try:
        gateways = await joins.first()
        instance = await _open_instance(config, engines, fingerprint, gateways, bus)
    except BaseException:
        await bus.close()
        raise
    over = follow_membership(instance, ending, status, held)
    end_with_device(instance, ending, status)
    show_cluster(instance, config.gateway_endpoint, ending, status, held)
    status("joining", config.gateway_endpoint)
    join = partial(instance.actor.mailbox.put, "gateways", instance.member.join)
    watching = [
        asyncio.create_task(watch_lag(instance.actor.times.note_lag)),
        asyncio.create_task(joins.watch(join)),
    ]
    try:
        await _begin(instance, held, over)
        await _any_of(ending.drain.wait(), over.wait())
        if (ending.drain.is_set() or held.asked) and not ending.now.is_set():
            status("switching" if held.asked else "draining", ", ".join(held.asked))
            await _any_of(instance.drain(), ending.now.wait())
    except BaseException:
        await instance.close()
        raise
    finally:
        for task in watching:
            task.cancel()
    if ending.drain.is_set():
        await instance.close()
        return False
    may_follow = engines.rest is not None and await instance.end_life()
    if not may_follow:
        if held.asked:
            status(ROLES, "+".join(held.asked))
        status("expelled", "bytes of its last life may still move")
        ending.exit_status = EXIT_EXPELLED
    return may_follow and not ending.drain.is_set()


async def _begin(instance: Instance, held: Holding, over: asyncio.Event) -> None:
    """With a self-test.  Raises EngineError and TimeoutError, but for roles that are on trial."""
    try:
        await instance.test()
    except Exception as error:
        if not held.is_on_trial:
            raise
        held.fail(f"its self-test failed: {error}")
        over.set()
    else:
        instance.start()


def follow_membership(
    instance: Instance, ending: Ending, status: Status, held: Holding
) -> asyncio.Event:
    """Have the process end, or show itself, as its membership does.  The event: this life is over,
    by the gateway's word, or because it is to have other roles."""
    over = asyncio.Event()

    def on_drain_asked(restarts: bool, roles: tuple[str, ...]) -> None:
        if roles and not ending.drain.is_set():
            held.ask(roles)
            over.set()
            return
        ending.exit_status = 0 if restarts else EXIT_DRAINED
        ending.drain.set()

    def on_rejected(reason: str) -> None:
        status("refused", reason)
        if held.is_on_trial:
            held.fail(reason)
            over.set()
        else:
            ending.at_once(1)

    def on_expelled(reason: str) -> None:
        status("expelled", reason)
        if held.engines.rest is None or ending.drain.is_set():
            ending.at_once(EXIT_EXPELLED)
        over.set()

    def on_waiting(holder: InstanceInfo) -> None:
        status("waiting", f"another has the name and may be dead: {named(holder)}")

    instance.member.is_gone = is_gone
    instance.member.on_drain_asked = on_drain_asked
    instance.member.on_waiting = on_waiting
    instance.member.on_rejected = on_rejected
    instance.member.on_expelled = on_expelled
    return over


def show_cluster(
    instance: Instance, gateway: str, ending: Ending, status: Status, held: Holding
) -> None:
    """Have an instance show that it serves; where its gateway may be on another host, also which
    that is, and the roles that the cluster still lacks."""
    lacks = ""

    def show() -> None:
        status("serving", "; ".join(filter(None, (gateway, lacks))) if is_tcp(gateway) else "")

    def on_list(members: Sequence[InstanceInfo]) -> None:
        nonlocal lacks
        sees = any(member.row_contract is not None for member in members)
        before, lacks = lacks, lacking(members, with_images=sees, finds=True)
        if is_tcp(gateway) and lacks != before and not ending.drain.is_set():
            show()

    def on_welcome() -> None:
        if held.settle():
            status(ROLES, "+".join(held.config.roles))
        show()

    instance.member.on_welcome, instance.member.on_list = on_welcome, on_list


def end_with_device(instance: Instance, ending: Ending, status: Status) -> None:
    """Have the process end when its device does not work any more (fault F49), or another rank of
    it is lost: never half a group (F29)."""

    def on_device_lost(reason: str) -> None:
        status("device lost", reason)
        ending.at_once(EXIT_DEVICE_LOST)

    def on_group_lost(lost: asyncio.Future[str]) -> None:
        status("group lost", lost.result())
        ending.at_once(EXIT_EXPELLED)

    instance.actor.on_device_lost = on_device_lost
    if instance.leader is not None:
        instance.leader.lost.add_done_callback(on_group_lost)


def is_gone(other: InstanceInfo) -> bool:
    """The kernel has an answer only for processes of this host and this namespace of pids."""
    return other.host_id == this_host_id() and is_process_dead(other.pid)


async def _any_of(*works: Coroutine[object, None, object]) -> None:
    """Until one of them is done; the others are given up.  Raises what that one raises."""
    tasks = [asyncio.ensure_future(work) for work in works]
    done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    for task in done:
        task.result()
