"""A vLLM server's instance that an operator takes out or gives other roles; HTTP is a fake's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from epd.cli.configure.model_check import bundled_model
from epd.config import GatewayConfig, InstanceConfig
from epd.model_files.fingerprint import model_fingerprint
from epd.roles.compose import Gateway
from epd.runtime.front import _within
from epd.runtime.worker import make_ports, new_epoch
from epd.transport.bus.zmq import ZmqBus
from epd.transport.local import LocalMemory
from epd.vllm import instance as vllm_instance
from epd.vllm.instance import InstanceThread, ServerEngine
from epd.vllm.server import EngineServer
from epd.vllm.shelf import Shelf
from tests.api import wire
from tests.patience import PATIENCE_S
from tests.vllm.fake_server import fake_server
from tests.vllm.test_requests import CONTRACT, ROLES

until = partial(wire.until, timeout_s=PATIENCE_S)


@contextlib.asynccontextmanager
async def joined(directory: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gateway]:
    monkeypatch.setattr(vllm_instance, "RETRY_S", 0.3)
    at = f"ipc://{directory}/gateway.sock"
    model = str(bundled_model())
    config = InstanceConfig(
        instance_id="pd", roles=ROLES, model_dir=model, transport_directory=str(directory),
        endpoint=f"ipc://{directory}/pd.sock", gateway_endpoint=at,
    )  # fmt: skip
    ports = make_ports(
        ZmqBus("gateway", new_epoch(), at), _within("gateway", 1, LocalMemory(), "never")
    )
    gateway = Gateway(ports, GatewayConfig(), model_fingerprint(model, ""))
    gateway.start()
    async with fake_server() as fake:
        server = EngineServer(fake.url, lambda grid: "grid")
        thread = InstanceThread(config, ServerEngine(CONTRACT, 64, Shelf(CONTRACT), server))
        try:
            await until(lambda: any(one.present for one in gateway.registry.instances))
            yield gateway
        finally:
            await asyncio.to_thread(thread.close)
            await gateway.close()


async def test_who_was_taken_out_stays_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with joined(tmp_path, monkeypatch) as gateway:
        gateway.role.drain("pd", 0.0, forced=True, restarts=False)
        await until(lambda: not gateway.registry.instances[0].present)
        await asyncio.sleep(1.5)  # five times as long as until it would try again
        (one,) = gateway.registry.instances
        assert not one.present


async def test_its_roles_are_those_of_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with joined(tmp_path, monkeypatch) as gateway:
        first = gateway.registry.instances[0].info.address.epoch
        gateway.role.drain("pd", 0.0, forced=True, restarts=True, roles=("decode",))
        await until(lambda: gateway.registry.instances[0].info.address.epoch != first)
        await until(lambda: gateway.registry.instances[0].present)
        info = gateway.registry.instances[0].info
        assert info.roles == ROLES
        assert "start it anew" in info.kept_roles
