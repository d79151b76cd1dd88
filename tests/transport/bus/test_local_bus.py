"""LocalBus passes the contract of Bus, with and without real encoding."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from epd.messages import Leave
from epd.transport.base import Bus, TransportError, Unsendable
from epd.transport.bus.local import LocalBus, LocalBusHub
from tests.contract.bus_kit import BUS_CHECKS, BusNet, Check, close, meet, name_of


class LocalNet:
    def __init__(self, codec: bool) -> None:
        self._hub = LocalBusHub()
        self._codec = codec

    def make(self, instance_id: str, epoch: int = 1, *, max_queue: int = 1000) -> Bus:
        return LocalBus(self._hub, instance_id, epoch, codec=self._codec, max_queue=max_queue)


@pytest.mark.parametrize("codec", [False, True], ids=["objects", "codec"])
@pytest.mark.parametrize("check", BUS_CHECKS, ids=name_of)
async def test_contract(check: Check, codec: bool) -> None:
    net: BusNet = LocalNet(codec)
    await check(net)


async def test_codec_finds_what_would_not_survive_the_wire() -> None:
    hub = LocalBusHub()
    a, b = LocalBus(hub, "a", 1, codec=True), LocalBus(hub, "b", 1, codec=True)
    _, inbox = meet(a, b)
    for message, payloads in ((object(), []), (Leave(), [b""] * 17)):
        with pytest.raises(Unsendable, match="cannot be sent"):
            a.send("b", message, payloads)  # type: ignore[arg-type]
    assert a.dropped == {"unsendable": 2}
    assert inbox.received == []
    await close(a, b)


async def test_messages_to_a_closed_peer_are_counted() -> None:
    hub = LocalBusHub()
    a, b = LocalBus(hub, "a", 1), LocalBus(hub, "b", 1)
    meet(a, b)
    await b.close()
    assert a.send("b", Leave())
    assert a.dropped == {"stale_target": 1}
    await a.close()


async def test_what_a_life_has_not_received_the_next_one_does_not() -> None:
    hub = LocalBusHub()
    a, b = LocalBus(hub, "a", 1), LocalBus(hub, "b", 1)
    _, inbox = meet(a, b)
    assert a.send("b", Leave())
    a.connect(b.address)  # the same life
    a.connect(msgspec.structs.replace(b.address, epoch=2))
    await asyncio.sleep(0.01)
    assert inbox.received == []
    await close(a, b)


def test_an_instance_id_that_could_be_a_path_is_refused() -> None:
    with pytest.raises(TransportError, match="letters, digits"):
        LocalBus(LocalBusHub(), "../etc", 1)
