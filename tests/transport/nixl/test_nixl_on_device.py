"""NIXL's engine on a GPU, whose memory is here the host's: what a write takes, and its regions."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest

from epd.transport.backend import BackendSettings, Exposes
from epd.transport.backends import chosen
from epd.transport.base import WriteFailed, Written
from epd.transport.checksum import crc32
from epd.transport.nixl.library import missing
from tests.transport.cuda.test_cuda_writes import Rows, Slots
from tests.transport.fake_device import NixlOnFakeDevice

SLOT = 1000


def test_device_memory_is_taken_where_nothing_else_moves_it() -> None:
    def on_device(transport: str, device: str) -> list[bool]:
        return [one.on_device for one in chosen(transport, "", "", device)]

    assert on_device("nixl,tcp", "cuda:1") == [True, False]
    assert on_device("cuda,nixl", "cuda:1") == [True, False]
    assert on_device("nixl", "cpu") == [False]


@pytest.fixture
async def two() -> AsyncIterator[list[NixlOnFakeDevice]]:
    if reason := missing():
        pytest.skip(reason)
    names = ("owner", "writer")
    made = [NixlOnFakeDevice(BackendSettings(name, 1, True, device="cuda:1")) for name in names]
    yield made
    for engine in reversed(made):
        await engine.close()


async def test_scattered_slots_and_rows_are_written_from_where_they_lie(
    two: list[NixlOnFakeDevice],
) -> None:
    owner, writer = two
    assert not isinstance(owner, Exposes)
    region = owner.allocate("kv", 40, SLOT)
    assert region.remote.locator.endswith("@1")
    fine = owner.recut(region, 2)
    memory = memoryview(bytearray(os.urandom(60 * SLOT)))
    wanted = b"".join(memory[slot * SLOT :][:SLOT] for slot in (6, 2, 4))
    assert await writer.write([Slots(memory, (6, 2, 4))], region.remote, (11, 1, 5)) == Written(
        len(wanted), crc32(wanted)
    )
    assert b"".join(region.views((11, 1, 5), len(wanted))) == wanted
    rows = Rows(memory[: 3 * SLOT // 2])
    assert isinstance(await writer.write([rows], fine.remote, (70, 3, 4)), Written)
    assert b"".join(fine.views((70, 3, 4), rows.nbytes)) == memory[: rows.nbytes]
    mixed = await writer.write([rows, bytes(SLOT)], region.remote, (0, 1, 2))
    assert isinstance(mixed, WriteFailed) and "host or of the device" in mixed.reason
    for one in (fine, region):
        owner.revoke(one)
    gone = await writer.write([rows], region.remote, (0, 1))
    assert isinstance(gone, WriteFailed)
