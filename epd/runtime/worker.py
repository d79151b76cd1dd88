"""One serving process: engines, ports, roles, and an orderly end.

Engines are loaded before the instance joins, so that what the gateway sees is what can serve.
Ways to end: SIGTERM (or the supervisor's word) drains, a second one or SIGINT closes at once; an
instance whose epoch was declared lost closes with `EXIT_EXPELLED`, one whose device does not work
any more with `EXIT_DEVICE_LOST`, for its supervisor to start anew. Whatever the way, sockets, ipc
files and shared memory are removed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from collections.abc import Callable
from functools import partial

from epd.config import InstanceConfig
from epd.engine.base import Progress, no_progress
from epd.fsm.story import RecordingJournal
from epd.messages import Address
from epd.roles.base import Ports
from epd.roles.compose import Engines, Instance
from epd.runtime.logs import LoggingLog
from epd.runtime.system import SystemClock, SystemRandom
from epd.scheduling.slots import CACHE_ROWS, POOL_ROWS, sized
from epd.transport.backend import Backend, BackendSettings
from epd.transport.backends import chosen
from epd.transport.base import Bus, Storage
from epd.transport.curve import ClusterKey
from epd.transport.device import STAGING_NBYTES
from epd.transport.file_store import FileStore
from epd.transport.host import this_host_id
from epd.transport.local import LocalMemory
from epd.transport.mooncake_store import MooncakeStore
from epd.transport.routing import RoutingTransferEngine, data_host
from epd.transport.storage import ThreadedStorage
from epd.transport.zmq_bus import ZmqBus

logger = logging.getLogger(__name__)
EXIT_DEVICE_LOST = 74  # EX_IOERR
EXIT_EXPELLED = 75  # EX_TEMPFAIL: this life is over, a new one may join

Status = Callable[[str, str], None]  # state, detail


def new_epoch() -> int:
    """This life of the process: later starts are greater, unless the clock was set back."""
    return time.time_ns() // 1_000_000


def backends_of(config: InstanceConfig) -> tuple[Backend, ...]:
    """By which it moves bytes.  Raises TransportError."""
    where = (config.endpoint, config.transport_directory, config.engine.device)
    return chosen(config.transport, *where)


def mirrored_nbytes(config: InstanceConfig, row_nbytes: int) -> int:
    """Device memory that the data plane takes when the instance starts, behind the plan."""
    if not any(backend.on_device for backend in backends_of(config)):
        return 0
    rows = sized(config.prefill.pool_nbytes, POOL_ROWS, row_nbytes)
    rows_nbytes = rows if "prefill" in config.roles else 0
    kv_nbytes = config.engine.kv_landing_nbytes if "decode" in config.roles else 0
    return STAGING_NBYTES + rows_nbytes + kv_nbytes


def load_engines(config: InstanceConfig, progress: Progress = no_progress) -> Engines:
    """Load the stages that these roles need; blocks for seconds.  Raises ModelError.

    `progress` is told how much of a stage's weights has been read.
    """
    from epd.engine.factory import build_executor, build_language, build_vision

    executor = build_executor(config.engine)
    engines = Engines(close=executor.close)
    if "encode" in config.roles:
        engines.vision = vision = build_vision(
            config.model_dir,
            config.engine,
            executor,
            max_batch_patches=config.encode.max_batch_patches,
            progress=progress,
        )
        tier = sized(config.encode.cache_device_nbytes, CACHE_ROWS, vision.contract.row_nbytes)
        vision.reserve(tier, config.encode.cache_host_nbytes)
    if "prefill" in config.roles or "decode" in config.roles:
        sends = "decode" not in config.roles  # what it prefills is decoded elsewhere
        engines.language = build_language(
            config.model_dir,
            config.engine,
            executor,
            config.decode.max_running,
            kv_leaving_nbytes=config.engine.kv_landing_nbytes if sends else 0,
            mirrored_nbytes=partial(mirrored_nbytes, config),
            progress=progress,
        )
    if config.profile_dir:
        from epd.engine.profiling import TorchProfiler

        engines.profiler = TorchProfiler(executor, config.profile_dir, config.instance_id)
    return engines


def make_ports(bus: Bus, transfers: RoutingTransferEngine, storage: Storage | None = None) -> Ports:
    """The real ports of one instance."""
    clock = SystemClock()
    return Ports(
        clock=clock,
        bus=bus,
        random=SystemRandom(),
        transfers=transfers,
        journal=RecordingJournal(clock.now_s),
        log=LoggingLog(),
        storage=storage,
    )


def open_storage(config: InstanceConfig) -> Storage | None:
    """Where encoders keep rows beyond their memory, and prefill instances find those in files.

    Raises TransportError.
    """
    encode, encodes = config.encode, "encode" in config.roles
    if encode.cache_store and encodes:
        host = data_host(config.endpoint)
        return ThreadedStorage(
            MooncakeStore(encode.cache_store, host, encode.cache_store_nbytes, config.mooncake)
        )
    if encode.cache_dir and (encodes or "prefill" in config.roles):
        return ThreadedStorage(FileStore(encode.cache_dir, encode.cache_disk_nbytes))
    return None


def load_cluster_key(path: str) -> ClusterKey | None:
    return ClusterKey.load(path) if path else None


class Ending:
    """How a process is asked to end; the first word drains, a second or an interrupt closes."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.now = asyncio.Event()
        self.exit_status = 0

    def ask(self) -> None:
        (self.now if self.drain.is_set() else self.drain).set()
        self.drain.set()

    def at_once(self, exit_status: int) -> None:
        self.exit_status = exit_status
        self.drain.set()
        self.now.set()

    def watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.ask)
        loop.add_signal_handler(signal.SIGINT, self.at_once, 130)


async def serve_instance(
    config: InstanceConfig, engines: Engines, fingerprint: str, ending: Ending, status: Status
) -> int:
    """Join the gateway over the network and serve until asked to end; returns the exit status."""
    epoch = new_epoch()
    key = load_cluster_key(config.cluster_key)
    backends = backends_of(config)
    bus = ZmqBus(config.instance_id, epoch, config.endpoint, cluster_key=key)
    try:
        settings = BackendSettings(
            config.instance_id,
            epoch,
            host=data_host(config.endpoint),
            secret=key.data_plane_secret() if key is not None else b"",
            directory=config.transport_directory,
            mooncake=config.mooncake,
            options=json.loads(config.transport_options or "{}"),
            device=config.engine.device,
        )
        transfers = RoutingTransferEngine(
            settings, LocalMemory(), backends, checksums=config.engine.checksums
        )
        ports = make_ports(bus, transfers, open_storage(config))
    except BaseException:
        await bus.close()
        raise
    names = ", ".join(backend.name for backend in backends)
    logger.info("offers %s (transport %s)", names, config.transport)
    public_key = key.server_public if key is not None else ""
    gateway = Address("gateway", 0, config.gateway_endpoint, public_key)
    try:
        instance = Instance(
            ports, config, engines, gateway, fingerprint, this_host_id(), os.getpid()
        )
    except BaseException:
        await bus.close()
        await ports.transfers.close()
        raise

    def on_rejected(reason: str) -> None:
        status("refused", reason)
        ending.at_once(1)

    def on_expelled(reason: str) -> None:
        status("expelled", reason)
        ending.at_once(EXIT_EXPELLED)

    instance.member.on_rejected = on_rejected
    instance.member.on_expelled = on_expelled
    end_with_device(instance, ending, status)
    instance.member.on_welcome = lambda: status("serving", "")
    status("joining", config.gateway_endpoint)
    try:
        instance.start()
        await ending.drain.wait()
        if not ending.now.is_set():
            status("draining", "")
            await _drain(instance, ending)
    finally:
        await instance.close()
    return ending.exit_status


def end_with_device(instance: Instance, ending: Ending, status: Status) -> None:
    """Have the process end when its device does not work any more (fault F49)."""

    def on_device_lost(reason: str) -> None:
        status("device lost", reason)
        ending.at_once(EXIT_DEVICE_LOST)

    instance.actor.on_device_lost = on_device_lost


async def _drain(instance: Instance, ending: Ending) -> None:
    """Until nothing is open, or until asked a second time."""
    drained = asyncio.ensure_future(instance.drain())
    asked = asyncio.ensure_future(ending.now.wait())
    await asyncio.wait((drained, asked), return_when=asyncio.FIRST_COMPLETED)
    for task in (drained, asked):
        if not task.done():
            task.cancel()
    await asyncio.gather(drained, asked, return_exceptions=True)
