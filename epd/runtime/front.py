"""The gateway process, and everything in one process.

Imports neither torch nor transformers: the gateway renders templates, tokenizes and reads image
headers, and leaves models to the workers.
"""

from __future__ import annotations

import asyncio
import math
import os
from pathlib import Path

from epd.api.server import ApiServer
from epd.config import GatewayConfig, InstanceConfig
from epd.frontend import Refused
from epd.model_files.fingerprint import model_fingerprint
from epd.roles.compose import Engines, Gateway, Instance
from epd.runtime import heap
from epd.runtime.claim import claims_in
from epd.runtime.lag import watch_lag
from epd.runtime.worker import (
    LOST,
    Ending,
    Status,
    end_with_device,
    load_cluster_key,
    make_ports,
    new_epoch,
    open_storage,
)
from epd.transport.backend import BackendSettings
from epd.transport.bus.zmq import ZmqBus
from epd.transport.endpoint import ipc_path
from epd.transport.host import this_host_id
from epd.transport.local import LocalMemory
from epd.transport.routing import RoutingTransferEngine

DRAIN_CHECK_S = 0.05


async def serve_gateway(config: GatewayConfig, ending: Ending, status: Status) -> int:
    """The OpenAI front over the network until asked to end; returns the exit status."""
    epoch = new_epoch()
    bus = ZmqBus(
        config.instance_id, epoch, config.endpoint, cluster_key=load_cluster_key(config.cluster_key)
    )
    ports = make_ports(bus, _within(config.instance_id, epoch, LocalMemory(), "never"))
    fingerprint = model_fingerprint(config.model_dir, config.engine.quantization)
    gateway = Gateway(ports, config, fingerprint)
    return await _serve(gateway, None, config, ending, status)


async def serve_all(
    config: GatewayConfig,
    instance_config: InstanceConfig,
    engines: Engines,
    ending: Ending,
    status: Status,
) -> int:
    """Gateway and one instance of all roles in this process, without sockets between stages."""
    from epd.transport.bus.local import LocalBus, LocalBusHub

    hub, memory, epoch = LocalBusHub(), LocalMemory(), new_epoch()
    fingerprint = model_fingerprint(config.model_dir, config.engine.quantization)
    gateway_ports = make_ports(
        LocalBus(hub, config.instance_id, epoch),
        _within(config.instance_id, epoch, memory, "never"),
    )
    gateway = Gateway(gateway_ports, config, fingerprint)
    name = instance_config.instance_id
    ports = make_ports(
        LocalBus(hub, name, epoch),
        _within(name, epoch, memory, instance_config.engine.checksums),
        open_storage(instance_config),
        engines.journal,
    )
    instance = Instance(
        ports,
        instance_config,
        engines,
        [gateway.actor.address],
        fingerprint,
        this_host_id(),
        os.getpid(),
    )
    return await _serve(gateway, instance, config, ending, status)


def _within(name: str, epoch: int, memory: LocalMemory, checksums: str) -> RoutingTransferEngine:
    """A data plane that no other process reaches."""
    return RoutingTransferEngine(BackendSettings(name, epoch), memory, checksums=checksums)


async def _serve(
    gateway: Gateway,
    instance: Instance | None,
    config: GatewayConfig,
    ending: Ending,
    status: Status,
) -> int:
    server = ApiServer(gateway.role, config)
    url = config.base_url

    lost: set[int] = set()

    def tell() -> None:
        nonlocal lost
        told, lost = lost, _lost_here(gateway)
        for pid in lost - told:
            status(LOST, str(pid))  # its supervisor may find that it hangs
        readiness = gateway.role.ready()
        status("serving" if readiness.ok else "waiting", url if readiness.ok else readiness.reason)

    aside = [
        asyncio.create_task(heap.give_back_now_and_then()),
        asyncio.create_task(watch_lag(gateway.actor.times.note_lag)),
    ]
    try:
        gateway.dispatcher.first_join_within_s = await asyncio.to_thread(
            _first_join_within_s, config
        )
        gateway.start()
        if instance is not None:
            end_with_device(instance, ending, status)
            gateway.role.drain = _refuse_drain
            await instance.test()
            instance.start()
        await server.start()
        heap.keep()
        gateway.registry.on_change = tell  # not earlier: serving means that HTTP answers
        tell()
        await ending.drain.wait()
        if not ending.now.is_set():
            status("draining", "")
            server.drain()
            await _finish_open(gateway, config, ending)
    finally:
        for task in aside:
            task.cancel()
        await server.close()
        if instance is not None:
            await instance.close()
        await gateway.close()
    return ending.exit_status


def _refuse_drain(name: str, *asked: object, **how: object) -> None:
    """Raises Refused."""
    alone = f"{name} is this gateway's own process (--role all), and would take it along"
    raise Refused(409, f"{alone}; end it with Ctrl-C or SIGTERM, or start it with --topology 1epd")


def _first_join_within_s(config: GatewayConfig) -> float:
    """How long after its start a first instance may come: always of its own command, and until the
    members of a former gateway miss that one.  On one host those are seen; else nobody comes."""
    if config.starts_instances:
        return math.inf
    socket = ipc_path(config.endpoint)
    if socket and not claims_in(Path(socket).parent).keys() - {config.instance_id}:
        return 0.0
    return config.timing.lost_after_s


def _lost_here(gateway: Gateway) -> set[int]:
    """Other processes of this host that are declared lost and have no successor."""
    host = this_host_id()
    found = (one.info for one in gateway.registry.instances if one.was_lost)
    return {info.pid for info in found if info.host_id == host} - {os.getpid()}


async def _finish_open(gateway: Gateway, config: GatewayConfig, ending: Ending) -> None:
    """Open requests may end; new ones are refused meanwhile."""
    give_up_s = gateway.actor.clock.now_s() + config.timing.drain_timeout_s
    while gateway.is_busy() and not ending.now.is_set():
        if gateway.actor.clock.now_s() > give_up_s:
            return
        await asyncio.sleep(DRAIN_CHECK_S)
