"""ZmqBus outlives whatever it is sent: counted, dropped, and the next honest message arrives."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from epd.messages import PROTOCOL_VERSION, Address, Leave, Message
from epd.transport.bus.zmq import ZmqBus
from epd.transport.codec import Envelope, FrameLimits, FrameRejected, encode, unpack
from tests.contract.bus_kit import Inbox, close, note, rooms
from tests.fsm.tables import GRANT, REGION
from tests.patience import PATIENCE_S

LIMITS = FrameLimits(max_header_nbytes=1000, max_payload_nbytes=2000, max_payloads=3)


class Attacker:
    """A bare DEALER, and an honest peer to show that the victim still works."""

    def __init__(self, directory: Path) -> None:
        self.victim = ZmqBus("victim", 5, f"ipc://{directory}/victim.sock", limits=LIMITS)
        self.honest = ZmqBus("honest", 1, f"ipc://{directory}/honest.sock")
        self.inbox = Inbox()
        self.victim.start(self.inbox)
        self.honest.connect(self.victim.address)
        self._context: zmq.Context[Any] = zmq.Context()
        self._num_honest = 0

    def dealer(self) -> zmq.Socket[bytes]:
        dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 500)
        dealer.connect(self.victim.address.endpoint)
        return dealer

    def router(self) -> tuple[zmq.Socket[bytes], str]:
        """A bare one that others connect to, and its endpoint."""
        router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        endpoint = self.victim.address.endpoint.replace("victim", "evil")
        router.bind(endpoint)
        return router, endpoint

    async def until_dropped(self, count: int) -> dict[str, int]:
        async with asyncio.timeout(PATIENCE_S):
            while self.victim.dropped.total() < count:
                await asyncio.sleep(0.002)
        return dict(self.victim.dropped)

    async def check_victim_works(self) -> None:
        self._num_honest += 1
        assert self.honest.send("victim", note(self._num_honest))
        await self.inbox.wait_for(self._num_honest)
        assert self.inbox.rooms() == rooms(*range(1, self._num_honest + 1))

    async def close(self) -> None:
        await close(self.victim, self.honest)
        self._context.destroy(linger=0)


@pytest.fixture
async def attacker(private: Path) -> AsyncIterator[Attacker]:
    made = Attacker(private)
    yield made
    await made.close()


def header(
    source: str = "evil", epoch: int = 1, message: Message | None = None, **fields: Any
) -> bytes:
    version = fields.pop("version", PROTOCOL_VERSION)
    return encode(Envelope(version, source, epoch, message or Leave(), **fields))


def granting(slot_nbytes: int, num_slots: int) -> bytes:
    region = replace(REGION, slot_nbytes=slot_nbytes, num_slots=num_slots)
    return header(message=replace(GRANT, region=region, slots=()))


GOOD = header()
HOSTILE: list[tuple[str, list[bytes], str]] = [
    ("empty", [b""], "malformed"),
    ("not msgpack", [b"\xc1" * 10], "malformed"),
    ("truncated", [GOOD[:-1]], "malformed"),
    ("trailing bytes", [GOOD + b"\0"], "malformed"),
    ("unknown tag", [msgspec.msgpack.encode([1, "evil", 1, ["Evil"]])], "malformed"),
    ("wrong type", [msgspec.msgpack.encode([1, "evil", "one", ["Leave"]])], "malformed Leave"),
    (
        "missing field",
        [msgspec.msgpack.encode([1, "evil", 1, ["Commit", "r"]])],
        "malformed Commit",
    ),
    ("a map", [msgspec.msgpack.encode({"version": 1})], "malformed"),
    ("deep nesting", [GOOD.replace(b"\x95", b"\x96") + b"\x91" * 900], "malformed"),
    ("slots of no bytes", [granting(0, 1)], "malformed Grant"),
    ("a region without slots", [granting(1, -1)], "malformed Grant"),
    ("pickle", [b"\x80\x04\x95\x1b\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix"], "malformed"),
    ("other version", [header(version=PROTOCOL_VERSION + 1)], "version"),
    ("an earlier life of the victim", [header(target_epoch=4)], "stale_target"),
    ("big header", [bytes(1001)], "oversized_header"),
    ("big payload", [GOOD, bytes(2001)], "oversized_payload"),
    ("payloads big together", [GOOD, bytes(1500), bytes(501)], "oversized_payload"),
    ("many payloads", [GOOD, b"", b"", b"", b""], "too_many_frames"),
    ("very many payloads", [GOOD] + [b"x"] * 5000, "too_many_frames"),
]


@pytest.mark.parametrize(
    ("frames", "kind"), [row[1:] for row in HOSTILE], ids=[row[0] for row in HOSTILE]
)
async def test_hostile_frames_are_counted_and_dropped(
    attacker: Attacker, frames: list[bytes], kind: str
) -> None:
    evil = attacker.dealer()
    for _ in range(3):
        evil.send_multipart(frames)
    assert await attacker.until_dropped(3) == {kind: 3}
    await attacker.check_victim_works()
    evil.close()


async def test_a_frame_above_the_socket_limit_costs_the_connection(attacker: Attacker) -> None:
    evil = attacker.dealer()
    evil.send_multipart([GOOD, bytes(1 << 20)])
    await asyncio.sleep(0.05)
    await attacker.check_victim_works()
    assert attacker.inbox.received[0].source == "honest"
    assert not attacker.victim.dropped, "the bus had it in memory"
    evil.close()


async def test_a_peer_that_answers_at_length_loses_the_connection(attacker: Attacker) -> None:
    """Nothing is read from where messages leave, so nothing large may wait there."""
    evil, endpoint = attacker.router()
    attacker.honest.connect(Address("evil", 1, endpoint))
    assert attacker.honest.send("evil", Leave())
    who, *_ = await asyncio.to_thread(evil.recv_multipart)
    monitor = evil.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    evil.send_multipart([who, b"short"])
    assert not await asyncio.to_thread(monitor.poll, 200)
    evil.send_multipart([who, bytes(1 << 20)])
    assert await asyncio.to_thread(monitor.poll, PATIENCE_S * 1000)
    evil.disable_monitor()
    monitor.close()
    evil.close()


async def test_a_peer_that_is_not_zmq(attacker: Attacker) -> None:
    with socket.socket(socket.AF_UNIX) as plain:
        plain.connect(attacker.victim.address.endpoint.removeprefix("ipc://"))
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(4000))
        await attacker.check_victim_works()


frames = st.lists(
    st.one_of(
        st.binary(max_size=200),
        st.sampled_from([GOOD, header("honest"), GOOD[:5], b""]),
        st.builds(lambda cut, tail: GOOD[:cut] + tail, st.integers(0, 30), st.binary(max_size=30)),
    ),
    min_size=1,
    max_size=6,
)


@given(frame=st.one_of(st.binary(max_size=500), st.binary(max_size=60).map(lambda t: GOOD[:9] + t)))
@example(frame=b"\x91" * 100_000)
@example(frame=GOOD.replace(b"\x95", b"\x96") + b"\x91" * 100_000)  # RecursionError inside
@settings(max_examples=500, deadline=None)
def test_unpack_raises_nothing_but_a_rejection(frame: bytes) -> None:
    try:
        received = unpack(frame, (), 5, FrameLimits())
    except FrameRejected:
        return
    assert (received.source, received.epoch) == ("evil", 1)


@given(batch=st.lists(frames, max_size=20))
@settings(max_examples=20, deadline=None)
def test_random_frames_never_stop_a_bus(
    batch: list[list[bytes]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    async def attack() -> None:
        attacker = Attacker(tmp_path_factory.mktemp("bus"))
        evil = attacker.dealer()
        for message in batch:
            evil.send_multipart(message)
        evil.send_multipart([b"the end"])
        async with asyncio.timeout(PATIENCE_S):
            while attacker.victim.dropped.total() + len(attacker.inbox.received) <= len(batch):
                await asyncio.sleep(0.001)
        attacker.inbox.received.clear()
        await attacker.check_victim_works()
        evil.close()
        await attacker.close()

    asyncio.run(attack())
