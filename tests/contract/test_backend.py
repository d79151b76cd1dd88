"""A transfer backend by its name passes the contract; without one named, the example does.

    EPD_BACKEND=my_package.my_module:MyConnector EPD_BACKEND_OPTIONS='{"key": "value"}' \\
        pytest tests/contract/test_backend.py

`{tmp}` in the options is replaced by an empty directory of each test's own.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from epd.messages import Address
from epd.transport import foreign
from epd.transport.backend import BackendSettings
from epd.transport.backends import named
from epd.transport.base import TransferEngine, TransportError
from epd.transport.host import this_host_id
from epd.transport.local import LocalMemory
from epd.transport.routing import RoutingTransferEngine
from tests.contract.transfer_kit import (
    TRANSFER_CHECKS,
    Check,
    heads_land_where_slots_are_cut_into_them,
    name_of,
    pattern,
)

NAME = os.environ.get("EPD_BACKEND", "tests.contract.example_backend:MappedFiles")
OPTIONS = os.environ.get("EPD_BACKEND_OPTIONS", '{"directory": "{tmp}"}')
CASUALTY = """
import json, os, signal, sys
from epd.transport import foreign
from epd.transport.backend import BackendSettings
name, options = sys.argv[1], json.loads(sys.argv[2])
engine = foreign.make(name, BackendSettings("casualty", 3, True, name=name, options=options))
engine.allocate("pool", 2, 4096)
os.kill(os.getpid(), signal.SIGKILL)
"""


class World:
    """Engines of the named backend, and data planes over them."""

    transport = NAME

    def __init__(self, tmp: Path) -> None:
        self.options: dict[str, Any] = json.loads(OPTIONS.replace("{tmp}", str(tmp)))
        self._engines: list[TransferEngine] = []

    def engine(self, instance_id: str, epoch: int = 1) -> TransferEngine:
        settings = BackendSettings(
            instance_id, epoch, checksums=True, name=NAME, options=self.options
        )
        engine = foreign.make(NAME, settings)
        self._engines.append(engine)
        return engine

    def producer(self, instance_id: str) -> RoutingTransferEngine:
        settings = BackendSettings(instance_id, 1, options=self.options)
        plane = RoutingTransferEngine(settings, LocalMemory(), [named(NAME)], checksums="always")
        self._engines.append(plane)
        return plane

    def consumer(self) -> RoutingTransferEngine:
        return self.producer("consumer")

    async def dead_peer(self) -> tuple[Address, str, int]:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CASUALTY, NAME, json.dumps(self.options),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip
        await child.wait()
        return Address("casualty", 3, ""), this_host_id(), child.pid

    async def close(self) -> None:
        for engine in self._engines:
            await engine.close()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    yield made
    await made.close()


@pytest.mark.parametrize("check", TRANSFER_CHECKS, ids=name_of)
async def test_transfer_contract(world: World, check: Check) -> None:
    await check(world)


async def test_heads_land_where_slots_are_cut(world: World) -> None:
    await heads_land_where_slots_are_cut_into_them(world)


async def test_instances_offer_it_and_reach_each_other(world: World) -> None:
    """What it allocates is found by its name; an equal domain is what makes a pair."""
    producer, consumer = world.producer("producer"), world.consumer()
    assert producer.offers[1] == consumer.offers[1]
    assert producer.offers[1].name == NAME
    region = consumer.allocate("rows", 4, 4096)
    assert consumer.descriptor(region, NAME).backend == NAME
    data = pattern(10_000)
    await producer.write([data], region.remote, (2, 0, 3))
    assert b"".join(region.views((2, 0, 3), 10_000)) == data


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no.such.module:It", "cannot be imported"),
        ("tests.contract.example_backend:Nothing", "has no factory Nothing"),
        ("tests.contract.example_backend:NAME", "has no factory NAME"),
        ("tests.contract.example_backend:MappedFiles", "needs a directory"),
        ("builtins:repr", "has no allocate, write, settle, fence, domain"),
        ("plain", "package.module:factory"),
    ],
)
def test_what_is_no_backend_is_one_sentence(name: str, words: str) -> None:
    with pytest.raises(TransportError, match=words):
        foreign.make(name, BackendSettings("e0", 1, name=name))
