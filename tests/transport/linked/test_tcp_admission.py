"""Who gets in at the TCP data plane, and what a stranger can do there: nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from epd.messages import Address
from epd.transport.backend import BackendSettings
from epd.transport.base import TransportError, WriteFailed, WriteOutcome, WriteUnknown, Written
from epd.transport.linked import links
from epd.transport.linked.frames import Challenge, Hello, WriteFrame, decode
from epd.transport.linked.wire import LENGTH, MAX_FRAME_NBYTES, Wire
from epd.transport.tcp import TcpTransferEngine
from tests.contract.transfer_kit import GUARD, guard, pattern
from tests.patience import PATIENCE_S
from tests.transport.linked.test_wire import frame

OWNER = Address("owner", 1, "")
KEY = b"k" * 32


class Room:
    """Engines that are closed in the end."""

    def __init__(self) -> None:
        self._engines: list[TcpTransferEngine] = []

    def engine(self, name: str, epoch: int = 1, **settings: Any) -> TcpTransferEngine:
        self._engines.append(TcpTransferEngine(BackendSettings(name, epoch, True, **settings)))
        return self._engines[-1]

    async def close(self) -> None:
        for engine in self._engines:
            await engine.close()


@pytest.fixture
async def room() -> AsyncIterator[Room]:
    made = Room()
    yield made
    await made.close()


async def read_frame(reader: asyncio.StreamReader) -> Any:
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return decode(memoryview(await reader.readexactly(length)))


async def knock(locator: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = locator.split(":")
    return await asyncio.open_connection(host, int(port))


UNASKED_WRITE = WriteFrame(
    number=1, region_id="pool", slot_nbytes=64, num_slots=1, slots=(0,), nbytes=64, checksum=False
)


@pytest.mark.parametrize(("theirs", "admitted"), [(KEY, True), (b"other" * 8, False), (b"", False)])
async def test_only_who_holds_the_key_gets_in(room: Room, theirs: bytes, admitted: bool) -> None:
    region = room.engine("owner", secret=KEY).allocate("pool", 1, 64)
    outcome = await room.engine("writer", secret=theirs).write([b"x" * 64], region.remote, (0,))
    assert isinstance(outcome, Written if admitted else WriteFailed)
    if not admitted:
        assert "--cluster-key" in outcome.reason
        assert bytes(region.buffer) == bytes(64)


async def written_to(
    listener: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    room: Room,
    secret: bytes = b"",
) -> WriteOutcome:
    """What becomes of a write when somebody else listens where its owner did."""
    remote = room.engine("owner", secret=secret).allocate("pool", 1, 64).remote
    async with await asyncio.start_server(listener, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        forged = msgspec.structs.replace(remote, locator=f"127.0.0.1:{port}")
        return await room.engine("writer", secret=secret).write([b"x" * 64], forged, (0,))


async def test_an_owner_that_cannot_prove_the_key_gets_nothing(room: Room) -> None:
    """A listener that took over an address accepts everybody; the caller notices."""

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frame(Challenge(nonce=b"n" * 32)))
        await read_frame(reader)
        writer.write(frame(links.Accepted(host_id="h", proof=b"p" * 32)))
        assert await reader.read() == b""  # not a byte of payload
        writer.close()

    outcome = await written_to(impostor, room, secret=KEY)
    assert isinstance(outcome, WriteFailed) and "did not prove" in outcome.reason


@pytest.mark.parametrize("said", [UNASKED_WRITE, links.Accepted(host_id="h", proof=b"p" * 32)])
async def test_a_listener_that_does_not_challenge_is_no_instance(room: Room, said: Any) -> None:
    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frame(said))
        assert await reader.read() == b""
        writer.close()

    outcome = await written_to(other, room)
    assert isinstance(outcome, WriteFailed) and "as an instance does" in outcome.reason


async def test_beyond_loopback_nothing_goes_without_a_key(room: Room) -> None:
    with pytest.raises(TransportError, match="--cluster-key"):
        room.engine("owner", host="10.0.0.7")
    with pytest.raises(TransportError, match="name the address"):
        room.engine("owner", host="0.0.0.0", secret=KEY)
    remote = room.engine("owner").allocate("pool", 1, 64).remote
    far = msgspec.structs.replace(remote, locator="10.0.0.7:4000")
    outcome = await room.engine("writer").write([bytes(64)], far, (0,))
    assert isinstance(outcome, WriteFailed) and "--cluster-key" in outcome.reason


FORGED_HELLO = Hello(
    version=1,
    instance_id="writer",
    epoch=1,
    to_instance_id="owner",
    to_epoch=1,
    succeeds=False,
    host_id="h",
    nonce=b"n" * 32,
    proof=b"p" * 32,
)


@pytest.mark.parametrize(
    "said",
    [
        os.urandom(4096),
        LENGTH.pack(MAX_FRAME_NBYTES + 1),
        LENGTH.pack(0),
        LENGTH.pack(5) + b"\xc1nope",
        frame(UNASKED_WRITE) + bytes(64),
        frame(FORGED_HELLO) + frame(UNASKED_WRITE) + bytes(64),
    ],
    ids=["noise", "endless", "empty", "not-msgpack", "unasked", "forged"],
)
async def test_a_stranger_is_hung_up_on_and_moves_nothing(room: Room, said: bytes) -> None:
    region = room.engine("owner", secret=KEY).allocate("pool", 1, 64)
    guard(region)
    reader, writer = await knock(region.remote.locator)
    async with asyncio.timeout(PATIENCE_S):
        assert isinstance(await read_frame(reader), Challenge)
        writer.write(said)
        with contextlib.suppress(ConnectionError):  # cut off, or
            await reader.read()  # at most a refusal, then the end
    writer.close()
    assert bytes(region.buffer) == bytes([GUARD]) * 64
    outcome = await room.engine("writer", secret=KEY).write([bytes(64)], region.remote, (0,))
    assert isinstance(outcome, Written)


async def test_a_silent_stranger_is_hung_up_on(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "HANDSHAKE_TIMEOUT_S", 0.05)
    region = room.engine("owner").allocate("pool", 1, 64)
    reader, writer = await knock(region.remote.locator)
    async with asyncio.timeout(PATIENCE_S):
        await read_frame(reader)
        assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize("fenced", [True, False])
async def test_a_broken_connection_is_unknown_until_the_owner_has_let_go(
    room: Room, fenced: bool
) -> None:
    owner, writer = room.engine("owner"), room.engine("writer")
    region = owner.allocate("pool", 1, 32 << 20)
    assert isinstance(await writer.write([b"warm"], region.remote, (0,)), Written)
    under_way = asyncio.create_task(writer.write([pattern(32 << 20)], region.remote, (0,)))
    while region.buffer[1 << 20] == 0:
        await asyncio.sleep(0)
    for wire in list(owner._links._inbound[("writer", 1)]):
        assert wire._transport is not None
        wire._transport.abort()  # as a network may do; the owner does not know why
    assert isinstance(await under_way, WriteUnknown)
    assert await (writer.fence(OWNER, "", 0) if fenced else writer.settle(OWNER))
    guard(region)
    await asyncio.sleep(0.05)
    assert set(bytes(region.buffer)) == {GUARD}
    again = await writer.write([b"again"], region.remote, (0,))
    assert isinstance(again, WriteFailed if fenced else Written)


async def test_a_connection_severs_the_ones_that_it_succeeds(room: Room) -> None:
    """What was lost for the writer alone may still carry bytes."""
    owner, writer = room.engine("owner"), room.engine("writer")
    target, life = owner.allocate("pool", 1, 64).remote, (OWNER.instance_id, OWNER.epoch)
    assert isinstance(await writer.write([b"x"], target, (0,)), Written)
    (former,) = owner._links._inbound["writer", 1]
    writer._links._outbound.clear()
    (await writer._links._call(life, target.locator, succeeds=False)).sever()
    assert not former.severed, "what is asked apart disturbs nothing"
    assert await writer._links.succeed(life, target.locator) and former.severed


async def test_a_doubt_does_not_settle_while_the_owner_says_nothing(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, writer = room.engine("owner"), room.engine("writer")
    region = owner.allocate("pool", 1, 32 << 20)
    under_way = asyncio.create_task(writer.write([pattern(32 << 20)], region.remote, (0,)))
    while region.buffer[1 << 20] == 0:
        await asyncio.sleep(0)
    for task in writer._links._outbound.values():
        task.result().sever()
    assert isinstance(await under_way, WriteUnknown)
    monkeypatch.setattr(links, "SETTLE_TIMEOUT_S", 0.05)
    hear = owner._links._hear_stranger
    monkeypatch.setattr(owner._links, "_hear_stranger", lambda wire, frame: None)
    assert not await writer.settle(OWNER)  # however often: time is no answer (F7)
    assert not await writer.settle(OWNER)
    monkeypatch.setattr(owner._links, "_hear_stranger", hear)
    writer._links._outbound.clear()
    assert await writer.settle(OWNER)


async def test_other_bytes_than_sent_are_a_failure(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, writer = room.engine("owner"), room.engine("writer")
    region = owner.allocate("pool", 1, 64)

    async def flipped(views: Any) -> int:
        return 4711

    monkeypatch.setattr(owner._copier, "checksum", flipped)
    outcome = await writer.write([bytes(64)], region.remote, (0,))
    assert isinstance(outcome, WriteFailed) and "checksums differ" in outcome.reason


def hold(owner: TcpTransferEngine, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What lands at the owner is not answered."""
    held: list[Any] = []
    monkeypatch.setattr(owner, "_landed", lambda *its: held.append(its))
    return held


async def test_what_was_not_answered_in_time_is_settled_by_another_connection(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On this one the payload may still be on its way."""
    owner, writer = room.engine("owner"), room.engine("writer")
    held, writer._answer_timeout_s = hold(owner, monkeypatch), 0.1
    region = owner.allocate("pool", 1, 64)
    assert isinstance(await writer.write([b"x"], region.remote, (0,)), WriteUnknown)
    ((lost, *_),) = held
    assert await writer.settle(OWNER) and lost.severed


async def test_an_owner_reads_no_further_while_it_owes_too_many_answers(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And goes on when it has paid one."""
    monkeypatch.setattr("epd.transport.linked.wire.MAX_UNANSWERED", 4)
    owner, writer = room.engine("owner"), room.engine("writer")
    region, held = owner.allocate("pool", 1, 64), hold(owner, monkeypatch)
    writes = [writer.write([b"x"], region.remote, (0,)) for _ in range(9)]
    under_way = asyncio.gather(*writes)
    async with asyncio.timeout(PATIENCE_S):
        while len(held) < 3:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        assert len(held) == 3, "the payload of the fourth is left where it is"
        while not under_way.done():
            for its in held[:]:
                TcpTransferEngine._landed(owner, *its)
                held.remove(its)
            await asyncio.sleep(0)
    assert {type(outcome) for outcome in under_way.result()} == {Written}


IMPOSSIBLE = {
    "minus one": (LENGTH.pack(2**32 - 1), "frame_length"),
    "more than may be": (LENGTH.pack(MAX_FRAME_NBYTES + 1), "frame_length"),
    "none": (LENGTH.pack(0), "frame_length"),
    "negative payload": (UNASKED_WRITE, -1),
    "endless payload": (UNASKED_WRITE, 1 << 62),
    "payload beyond its slots": (UNASKED_WRITE, 65),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
async def test_a_length_that_cannot_be_ends_the_connection_of_a_member_too(
    room: Room, name: str
) -> None:
    owner = room.engine("owner")
    region = owner.allocate("pool", 1, 64)
    wire = await room.engine("writer")._links.to(("owner", 1), region.remote.locator)
    said, what = IMPOSSIBLE[name]
    if isinstance(what, int):
        body = msgspec.to_builtins(said)
        body[-2] = what
        packed = msgspec.msgpack.encode(body)
        said, what = LENGTH.pack(len(packed)) + packed, "malformed_frame"
    assert wire._transport is not None and isinstance(said, bytes)
    wire._transport.write(said)
    async with asyncio.timeout(PATIENCE_S):
        while not wire.severed:
            await asyncio.sleep(0.001)
    assert owner.refused == {what: 1}
    outcome = await room.engine("another").write([bytes(64)], region.remote, (0,))
    assert isinstance(outcome, Written)


def test_a_stranger_is_given_no_memory_by_what_it_announces() -> None:
    wire = Wire(lambda wire, frame: None, lambda wire: None)
    head = wire.get_buffer(-1)
    head[:] = LENGTH.pack(MAX_FRAME_NBYTES)
    wire.buffer_updated(LENGTH.size)
    assert wire.severed and wire.refused == {"frame_length": 1}
