"""The contract of `Bus`: every implementation passes every check.

A check is a coroutine that gets a `BusNet`, which makes buses that can reach each other.  It uses
asyncio alone, so it runs on a virtual clock as well.  To plug in an implementation:

    @pytest.mark.parametrize("check", BUS_CHECKS, ids=name_of)
    async def test_contract(check): await check(MyNet())
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from epd.messages import Address, EncodeAccepted, Leave, MediaItem, PrefillRequest, SamplingParams
from epd.transport.base import Bus, Received
from tests.patience import PATIENCE_S

WAIT_S = PATIENCE_S
QUIET_S = 0.05  # how long to look for what must not come


class BusNet(Protocol):
    def make(self, instance_id: str, epoch: int = 1, *, max_queue: int = 1000) -> Bus:
        """A bus that has not been started.  A later epoch comes back at the same endpoint."""
        ...


Check = Callable[[Any], Awaitable[None]]


def name_of(check: Check) -> str:
    return check.__name__


class Inbox:
    """Collects what a bus delivers."""

    def __init__(self) -> None:
        self.received: list[Received] = []
        self._changed = asyncio.Event()

    def __call__(self, received: Received) -> None:
        self.received.append(received)
        self._changed.set()

    async def wait_for(self, count: int) -> list[Received]:
        async with asyncio.timeout(WAIT_S):
            while len(self.received) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.received

    def rooms(self, source: str | None = None) -> list[str]:
        chosen = [r for r in self.received if source in (None, r.source)]
        return [r.message.room for r in chosen if isinstance(r.message, EncodeAccepted)]


def note(index: int) -> EncodeAccepted:
    return EncodeAccepted(room=f"room-{index}", attempt=1)


def rooms(*indices: int) -> list[str]:
    return [f"room-{index}" for index in indices]


async def send_all(bus: Bus, peer: str, indices: Sequence[int]) -> None:
    """Send in order, waiting while the queue is full."""
    for index in indices:
        async with asyncio.timeout(WAIT_S):
            while not bus.send(peer, note(index)):
                await asyncio.sleep(0.001)


def meet(*buses: Bus) -> list[Inbox]:
    """Start all and connect each to each, itself included."""
    inboxes = [Inbox() for _ in buses]
    for bus, inbox in zip(buses, inboxes, strict=True):
        bus.start(inbox)
        for peer in buses:
            bus.connect(peer.address)
    return inboxes


async def close(*buses: Bus) -> None:
    for bus in buses:
        await bus.close()


async def in_order_and_once_per_peer(net: BusNet) -> None:
    a, b, c = net.make("a"), net.make("b"), net.make("c")
    _, _, inbox = meet(a, b, c)
    indices = range(600)
    await asyncio.gather(send_all(a, "c", indices), send_all(b, "c", indices))
    await inbox.wait_for(1200)
    await asyncio.sleep(QUIET_S)
    assert inbox.rooms("a") == rooms(*indices)
    assert inbox.rooms("b") == rooms(*indices)
    await close(a, b, c)


async def both_directions_and_itself(net: BusNet) -> None:
    a, b = net.make("a", 7), net.make("b", 9)
    inbox_a, inbox_b = meet(a, b)
    assert a.send("b", note(1)) and b.send("a", note(2)) and a.send("a", note(3))
    await inbox_a.wait_for(2)
    await inbox_b.wait_for(1)
    assert {(r.source, r.epoch) for r in inbox_a.received} == {("a", 7), ("b", 9)}
    assert [(r.source, r.epoch) for r in inbox_b.received] == [("a", 7)]
    await close(a, b)


async def a_rich_message_arrives_equal(net: BusNet) -> None:
    a, b = net.make("a"), net.make("b")
    _, inbox = meet(a, b)
    item = MediaItem(
        index=0,
        mm_hash="ab" * 32,
        offset=3,
        num_rows=64,
        grid_thw=(1, 16, 16),
        room="r/1/0",
        encoder=b.address,
    )
    message = PrefillRequest(
        request_id="r",
        attempt=1,
        token_ids=tuple(range(5000)),
        num_emitted=2,
        items=(item,),
        sampling=SamplingParams(max_tokens=5, logit_bias=((3, -1.5),)),
        decode=a.address,
        gateway=b.address,
        deadline_s=1e9 + 0.25,
    )
    assert a.send("b", message)
    await inbox.wait_for(1)
    assert inbox.received[0].message == message
    await close(a, b)


async def payloads_arrive_intact(net: BusNet) -> None:
    a, b = net.make("a"), net.make("b")
    _, inbox = meet(a, b)
    big = bytes(range(256)) * 8192  # 2 MiB
    batches: list[tuple[Any, ...]] = [
        (b"",),
        (b"x",),
        (big[:65535], big[1:65537], big[2:65539]),
        (big, b"", bytearray(b"small")),
        (memoryview(big)[5:500_000],),
    ]
    for payloads in batches:
        assert a.send("b", Leave(), payloads)
    await inbox.wait_for(len(batches))
    arrived = [[bytes(p) for p in r.payloads] for r in inbox.received]
    assert arrived == [[bytes(p) for p in payloads] for payloads in batches]
    await close(a, b)


async def unknown_or_forgotten_peer_is_false(net: BusNet) -> None:
    a, b = net.make("a"), net.make("b")
    _, inbox = meet(a, b)
    assert not a.send("nobody", note(1))
    a.disconnect("nobody")
    a.disconnect("b")
    assert not a.send("b", note(2))
    a.connect(b.address)
    assert a.send("b", note(3))
    await inbox.wait_for(1)
    await asyncio.sleep(QUIET_S)
    assert inbox.rooms() == rooms(3)
    await close(a, b)


async def full_queue_is_false_and_recovers(net: BusNet) -> None:
    a, b = net.make("a", max_queue=8), net.make("b", max_queue=8)
    a.start(Inbox())
    a.connect(b.address)  # b does not read yet
    num_accepted, refused = 0, False
    payload = (bytes(32 << 10),)
    while not refused and num_accepted < 5000:
        refused = not a.send("b", note(num_accepted), payload)
        num_accepted += not refused
    assert refused, "a queue without bound"
    inbox = Inbox()
    b.start(inbox)
    await inbox.wait_for(num_accepted)
    await send_all(a, "b", [num_accepted])
    await inbox.wait_for(num_accepted + 1)
    assert inbox.rooms() == rooms(*range(num_accepted + 1))
    await close(a, b)


async def one_full_peer_does_not_slow_another(net: BusNet) -> None:
    a, stuck, b = net.make("a", max_queue=8), net.make("stuck", max_queue=8), net.make("b")
    inbox = Inbox()
    a.start(Inbox())
    b.start(inbox)
    a.connect(stuck.address)
    a.connect(b.address)
    payload = (bytes(32 << 10),)
    while a.send("stuck", note(0), payload):
        pass
    await send_all(a, "b", range(100))
    await inbox.wait_for(100)
    assert inbox.rooms() == rooms(*range(100))
    await close(a, stuck, b)


async def a_new_life_gets_nothing_of_the_old(net: BusNet) -> None:
    a, b = net.make("a"), net.make("b", 1)
    inbox_a, _ = meet(a, b)
    await b.close()
    for index in range(5):
        a.send("b", note(index))  # meant for epoch 1: may be queued, must not reach epoch 2
    reborn = net.make("b", 2)
    inbox = Inbox()
    reborn.start(inbox)
    reborn.connect(a.address)
    a.send("b", note(5))  # a has not heard of epoch 2 yet
    await asyncio.sleep(QUIET_S)
    a.connect(reborn.address)
    await send_all(a, "b", [10])
    await inbox.wait_for(1)
    assert reborn.send("a", note(20))
    await inbox_a.wait_for(1)
    await asyncio.sleep(QUIET_S)
    assert inbox.rooms() == rooms(10)
    assert [(r.source, r.epoch) for r in inbox_a.received] == [("b", 2)]
    await close(a, reborn)


async def a_peer_can_be_dialled_before_its_epoch_is_known(net: BusNet) -> None:
    a, b = net.make("a"), net.make("b", 77)
    inbox = Inbox()
    a.start(Inbox())
    b.start(inbox)
    a.connect(Address("b", 0, b.address.endpoint, b.address.public_key))
    assert a.send("b", note(0))
    a.connect(b.address)  # met: what is queued stays queued
    assert a.send("b", note(1))
    await inbox.wait_for(2)
    assert inbox.rooms() == rooms(0, 1)
    await close(a, b)


async def connecting_again_changes_nothing(net: BusNet) -> None:
    a, b = net.make("a"), net.make("b")
    _, inbox = meet(a, b)
    for index in range(50):
        a.connect(b.address)
        assert a.send("b", note(index))
    await inbox.wait_for(50)
    assert inbox.rooms() == rooms(*range(50))
    await close(a, b)


async def a_link_can_be_opened_anew(net: BusNet) -> None:
    """What was sent before may be lost, what is sent later is not, and nothing comes twice."""
    a, b = net.make("a"), net.make("b")
    _, inbox = meet(a, b)
    for index in range(20):
        assert a.send("b", note(index))
        a.reopen("b")
        a.reopen("nobody")
    assert a.send("b", note(20))
    async with asyncio.timeout(WAIT_S):
        while rooms(20)[0] not in inbox.rooms():
            await asyncio.sleep(0.001)
    await asyncio.sleep(QUIET_S)
    assert len(set(inbox.rooms())) == len(inbox.rooms())
    await close(a, b)


async def delivery_is_never_re_entrant(net: BusNet) -> None:
    a = net.make("a")
    depth, deepest, seen = 0, 0, asyncio.Event()

    def deliver(received: Received) -> None:
        nonlocal depth, deepest
        depth += 1
        deepest = max(deepest, depth)
        assert isinstance(received.message, EncodeAccepted)
        index = int(received.message.room.removeprefix("room-"))
        if index < 20:
            assert a.send("a", note(index + 1))
        else:
            seen.set()
        depth -= 1

    a.start(deliver)
    a.connect(a.address)
    assert a.send("a", note(0))
    assert deepest == 0, "delivered from inside send"
    async with asyncio.timeout(WAIT_S):
        await seen.wait()
    assert deepest == 1
    await close(a)


async def a_failing_handler_costs_one_message(net: BusNet) -> None:
    a, b = net.make("a"), net.make("b")
    inbox = Inbox()

    def deliver(received: Received) -> None:
        if received.message == note(1):
            raise RuntimeError("a bug in a handler")
        inbox(received)

    a.start(Inbox())
    b.start(deliver)
    a.connect(b.address)
    await send_all(a, "b", range(4))
    await inbox.wait_for(3)
    assert inbox.rooms() == rooms(0, 2, 3)
    await close(a, b)


async def closing_is_idempotent_and_final(net: BusNet) -> None:
    a, b = net.make("a"), net.make("b")
    _, inbox = meet(a, b)
    started_s = asyncio.get_running_loop().time()
    await a.close()
    await a.close()
    assert asyncio.get_running_loop().time() - started_s < WAIT_S
    a.connect(b.address)
    assert not a.send("b", note(1))
    b.send("a", note(2))  # to nobody: no error
    await asyncio.sleep(QUIET_S)
    assert inbox.received == []
    await close(b)


async def closing_flushes_what_was_sent(net: BusNet) -> None:
    a, b = net.make("a"), net.make("b")
    _, inbox = meet(a, b)
    await send_all(a, "b", range(100))
    await a.close()
    await inbox.wait_for(100)
    assert inbox.rooms() == rooms(*range(100))
    await close(b)


BUS_CHECKS: list[Check] = [
    in_order_and_once_per_peer,
    both_directions_and_itself,
    a_rich_message_arrives_equal,
    payloads_arrive_intact,
    unknown_or_forgotten_peer_is_false,
    full_queue_is_false_and_recovers,
    one_full_peer_does_not_slow_another,
    a_new_life_gets_nothing_of_the_old,
    a_peer_can_be_dialled_before_its_epoch_is_known,
    connecting_again_changes_nothing,
    a_link_can_be_opened_anew,
    delivery_is_never_re_entrant,
    a_failing_handler_costs_one_message,
    closing_is_idempotent_and_final,
    closing_flushes_what_was_sent,
]
