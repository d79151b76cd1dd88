"""ZmqBus passes the contract of Bus over ipc and tcp, and outlives whatever it is sent."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from pathlib import Path

import pytest

from epd.messages import Address, Leave
from epd.transport.base import Bus, Received
from epd.transport.bus.curve import ClusterKey
from epd.transport.bus.zmq import MAX_MESSAGES_PER_WAKE, ZmqBus
from tests.contract.bus_kit import BUS_CHECKS, Check, Inbox, name_of, note, rooms
from tests.patience import PATIENCE_S


class IpcNet:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def make(self, instance_id: str, epoch: int = 1, *, max_queue: int = 1000) -> Bus:
        endpoint = f"ipc://{self._directory}/{instance_id}.sock"
        return ZmqBus(instance_id, epoch, endpoint, max_queue=max_queue)


class TcpNet:
    """A later life of an instance listens at the port of the earlier one."""

    def __init__(self, key: ClusterKey | None = None) -> None:
        self._key = key
        self._endpoints: dict[str, str] = {}

    def make(self, instance_id: str, epoch: int = 1, *, max_queue: int = 1000) -> Bus:
        endpoint = self._endpoints.get(instance_id, "tcp://127.0.0.1:0")
        bus = ZmqBus(instance_id, epoch, endpoint, cluster_key=self._key, max_queue=max_queue)
        self._endpoints[instance_id] = bus.address.endpoint
        return bus


@pytest.mark.parametrize("check", BUS_CHECKS, ids=name_of)
async def test_contract_over_ipc(check: Check, private: Path) -> None:
    await check(IpcNet(private))
    assert os.listdir(private) == []


@pytest.mark.parametrize("check", BUS_CHECKS, ids=name_of)
async def test_contract_over_tcp(check: Check) -> None:
    await check(TcpNet())


@pytest.mark.parametrize("check", BUS_CHECKS, ids=name_of)
async def test_contract_over_curve(check: Check) -> None:
    await check(TcpNet(ClusterKey.generate()))


@pytest.mark.parametrize("check", BUS_CHECKS, ids=name_of)
def test_contract_under_uvloop(check: Check, private: Path) -> None:
    uvloop = pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(check(IpcNet(private)))


async def test_a_flood_does_not_hold_the_loop(private: Path) -> None:
    """However much waits, other work of the loop has its turn after a bounded number."""
    a = ZmqBus("a", 1, f"ipc://{private}/a.sock", max_queue=5000)
    turn, num_per_turn, arrived = 0, Counter[int](), asyncio.Event()
    loop = asyncio.get_running_loop()

    def tick() -> None:
        nonlocal turn
        turn += 1
        if not arrived.is_set():
            loop.call_soon(tick)

    def deliver(received: Received) -> None:
        num_per_turn[turn] += 1
        if received.message == note(4999):
            arrived.set()

    a.connect(a.address)
    assert all(a.send("a", note(index)) for index in range(5000))
    await asyncio.sleep(0.2)  # all of it waits in the socket
    tick()
    a.start(deliver)
    async with asyncio.timeout(PATIENCE_S):
        await arrived.wait()
    assert num_per_turn.total() == 5000
    assert max(num_per_turn.values()) <= 2 * MAX_MESSAGES_PER_WAKE  # a wake, and one rescheduled
    await a.close()


async def test_a_dead_peer_costs_bounded_memory(private: Path) -> None:
    a = ZmqBus("a", 1, f"ipc://{private}/a.sock", max_queued_nbytes=10 << 20)
    a.connect(Address("b", 1, f"ipc://{private}/nobody.sock"))
    payload = bytes(1 << 20)
    assert [a.send("b", Leave(), [payload]) for _ in range(14)] == [True] * 10 + [False] * 4
    assert a.send("b", Leave())  # small ones go by the count
    assert a.dropped == {"queue_full": 4}
    started_s = time.perf_counter()
    await a.close()
    assert time.perf_counter() - started_s < PATIENCE_S


async def test_a_second_connection_of_one_life_silences_neither(private: Path) -> None:
    """F48: no connection has a name that another could take over."""
    peer = ZmqBus("b", 1, f"ipc://{private}/b.sock")
    inbox = Inbox()
    peer.start(inbox)
    one, other = (ZmqBus("a", 1, f"ipc://{private}/{name}.sock") for name in ("a", "again"))
    for bus in (one, other):
        bus.connect(peer.address)
    for index in range(50):
        assert one.send("b", note(index)) and other.send("b", note(100 + index))
        await asyncio.sleep(0.002)
    await inbox.wait_for(100)
    assert sorted(inbox.rooms()) == sorted(rooms(*range(50), *range(100, 150)))
    for bus in (one, other, peer):
        await bus.close()
