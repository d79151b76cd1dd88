"""ZmqBus passes the contract of Bus over ipc and tcp, and outlives whatever it is sent."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import example, given, settings
from hypothesis import strategies as st

from epd.messages import PROTOCOL_VERSION, Address, Envelope, Leave, encode
from epd.transport.base import Bus, TransportError
from epd.transport.codec import FrameLimits, FrameRejected, unpack
from epd.transport.curve import ClusterKey
from epd.transport.zmq_bus import ZmqBus
from tests.contract.bus_kit import BUS_CHECKS, Check, Inbox, close, meet, name_of, note, rooms

LIMITS = FrameLimits(max_header_nbytes=1000, max_payload_nbytes=2000, max_payloads=3)


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


@pytest.fixture
def private(tmp_path: Path) -> Path:
    os.chmod(tmp_path, 0o700)
    return tmp_path


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


# --- hostile input --------------------------------------------------------------------------------


class Attacker:
    """A bare DEALER under any name, and an honest peer to show that the victim still works."""

    def __init__(self, directory: Path) -> None:
        self.victim = ZmqBus("victim", 5, f"ipc://{directory}/victim.sock", limits=LIMITS)
        self.honest = ZmqBus("honest", 1, f"ipc://{directory}/honest.sock")
        self.inbox = Inbox()
        self.victim.start(self.inbox)
        self.honest.connect(self.victim.address)
        self._context: zmq.Context[Any] = zmq.Context()
        self._num_honest = 0

    def dealer(self, name: bytes) -> zmq.Socket[bytes]:
        dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 500)
        dealer.setsockopt(zmq.ROUTING_ID, name)
        dealer.connect(self.victim.address.endpoint)
        return dealer

    async def until_dropped(self, count: int) -> dict[str, int]:
        async with asyncio.timeout(5):
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


def header(source: str = "evil", epoch: int = 1, **fields: Any) -> bytes:
    version = fields.pop("version", PROTOCOL_VERSION)
    return encode(Envelope(version, source, epoch, Leave(), **fields))


GOOD = header()
HOSTILE: list[tuple[str, list[bytes], str]] = [
    ("empty", [b""], "malformed"),
    ("not msgpack", [b"\xc1" * 10], "malformed"),
    ("truncated", [GOOD[:-1]], "malformed"),
    ("trailing bytes", [GOOD + b"\0"], "malformed"),
    ("unknown tag", [msgspec.msgpack.encode([1, "evil", 1, ["Evil"]])], "malformed"),
    ("wrong type", [msgspec.msgpack.encode([1, "evil", "one", ["Leave"]])], "malformed"),
    ("missing field", [msgspec.msgpack.encode([1, "evil", 1, ["Commit", "r"]])], "malformed"),
    ("a map", [msgspec.msgpack.encode({"version": 1})], "malformed"),
    ("deep nesting", [b"\x95\x01\xa4evil\x01\x91\xa5Leave" + b"\x91" * 900], "malformed"),
    ("pickle", [b"\x80\x04\x95\x1b\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix"], "malformed"),
    ("other version", [header(version=PROTOCOL_VERSION + 1)], "version"),
    ("another's name", [header("honest")], "spoofed_source"),
    ("another life", [header(epoch=2)], "spoofed_source"),
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
    evil = attacker.dealer(b"evil:1")
    for _ in range(3):
        evil.send_multipart(frames)
    assert await attacker.until_dropped(3) == {kind: 3}
    await attacker.check_victim_works()
    evil.close()


async def test_a_frame_above_the_socket_limit_costs_the_connection(attacker: Attacker) -> None:
    evil = attacker.dealer(b"evil:1")
    evil.send_multipart([GOOD, bytes(1 << 20)])
    await asyncio.sleep(0.05)
    await attacker.check_victim_works()
    assert attacker.inbox.received[0].source == "honest"
    evil.close()


async def test_a_peer_that_is_not_zmq(attacker: Attacker) -> None:
    with socket.socket(socket.AF_UNIX) as plain:
        plain.connect(attacker.victim.address.endpoint.removeprefix("ipc://"))
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(4000))
        await attacker.check_victim_works()


async def test_a_flood_does_not_hold_the_loop(attacker: Attacker) -> None:
    evil = attacker.dealer(b"evil:1")
    longest_s, flooding = 0.0, True

    async def watch() -> None:
        nonlocal longest_s
        while flooding:
            before_s = time.perf_counter()
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.perf_counter() - before_s)

    watcher = asyncio.create_task(watch())
    for _ in range(30):
        await asyncio.to_thread(_flood, evil, 1000)
    await attacker.check_victim_works()
    flooding = False
    await watcher
    assert longest_s < 0.25  # 256 messages take about 3 ms; the rest is other load on the machine
    evil.close()


def _flood(dealer: zmq.Socket[bytes], count: int) -> None:
    for _ in range(count):
        dealer.send(b"\xc1")


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
@example(frame=b"\x95\x01\xa4evil\x01\x91\xa5Leave" + b"\x91" * 100_000)
@settings(max_examples=500, deadline=None)
def test_unpack_raises_nothing_but_a_rejection(frame: bytes) -> None:
    try:
        received = unpack(b"evil:1", frame, (), 5, FrameLimits())
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
        evil = attacker.dealer(b"evil:1")
        for message in batch:
            evil.send_multipart(message)
        evil.send_multipart([b"the end"])
        async with asyncio.timeout(5):
            while attacker.victim.dropped.total() + len(attacker.inbox.received) <= len(batch):
                await asyncio.sleep(0.001)
        assert all(r.source == "evil" for r in attacker.inbox.received)
        attacker.inbox.received.clear()
        await attacker.check_victim_works()
        evil.close()
        await attacker.close()

    asyncio.run(attack())


# --- keys -----------------------------------------------------------------------------------------


async def _arrives(sender: ZmqBus, receiver: ZmqBus) -> bool:
    inbox = Inbox()
    receiver.start(inbox)
    sender.connect(Address("b", 1, receiver.address.endpoint))
    sender.send("b", note(1))
    for _ in range(30):
        await asyncio.sleep(0.01)
        if inbox.received:
            break
    await close(sender, receiver)
    return bool(inbox.received)


async def test_only_holders_of_the_cluster_key_get_in() -> None:
    key, other = ClusterKey.generate(), ClusterKey.generate()
    half = ClusterKey(  # knows the listener's public key and has a client key of its own
        key.server_public, other.server_secret, other.client_public, other.client_secret
    )
    here = "tcp://127.0.0.1:0"
    for callers_key, admitted in [(key, True), (other, False), (half, False), (None, False)]:
        receiver = ZmqBus("b", 1, here, cluster_key=key)
        sender = ZmqBus("a", 1, here, cluster_key=callers_key)
        assert await _arrives(sender, receiver) is admitted
        assert receiver.dropped["unauthorised"] == 0 or callers_key is half
        assert callers_key is not half or receiver.dropped["unauthorised"] > 0


async def test_a_peer_of_another_cluster_is_not_dialled() -> None:
    a = ZmqBus("a", 1, "tcp://127.0.0.1:0", cluster_key=ClusterKey.generate())
    b = ZmqBus("b", 1, "tcp://127.0.0.1:0", cluster_key=ClusterKey.generate())
    a.connect(b.address)
    assert not a.send("b", Leave())
    assert a.dropped == {"refused_peer": 1}
    with pytest.raises(TransportError, match="--cluster-key"):
        a.check_peer(b.address)
    await close(a, b)


def test_key_file(tmp_path: Path) -> None:
    path = str(tmp_path / "cluster.key")
    key = ClusterKey.generate()
    key.save(path)
    assert ClusterKey.load(path) == key
    assert os.stat(path).st_mode & 0o777 == 0o600
    with pytest.raises(TransportError, match="cannot be written"):
        key.save(path)
    os.chmod(path, 0o644)
    with pytest.raises(TransportError, match="chmod 600"):
        ClusterKey.load(path)
    os.chmod(path, 0o600)
    for text in ("", "{}", "[]", '{"server_public": 1}', path):
        Path(path).write_text(text)
        with pytest.raises(TransportError, match="not a key file"):
            ClusterKey.load(path)
    with pytest.raises(TransportError, match="cannot be read"):
        ClusterKey.load(str(tmp_path / "absent"))


# --- endpoints ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "remedy"),
    [
        ("tcp://0.0.0.0:0", "--cluster-key"),
        ("tcp://10.1.2.3:0", "--cluster-key"),
        ("tcp://example.org:99", "--cluster-key"),
        ("tcp://127.0.0.1", "HOST:PORT"),
        ("tcp://127.0.0.1:99999", "HOST:PORT"),
        ("inproc://x", "HOST:PORT"),
        ("nonsense", "HOST:PORT"),
        ("ipc://relative", "shorter run directory"),
        ("ipc:///tmp/" + "x" * 100, "shorter run directory"),
        ("ipc:///nonexistent/a.sock", "create it"),
        ("ipc:///tmp/a.sock", "chmod 700"),
    ],
)
def test_an_unusable_endpoint_is_one_clear_error(endpoint: str, remedy: str) -> None:
    with pytest.raises(TransportError, match=remedy):
        ZmqBus("a", 1, endpoint)


async def test_a_port_in_use_is_one_clear_error() -> None:
    a = ZmqBus("a", 1, "tcp://127.0.0.1:0")
    with pytest.raises(TransportError, match="choose another port"):
        ZmqBus("b", 1, a.address.endpoint)
    await a.close()


async def test_a_wildcard_needs_a_name_to_be_dialled_by() -> None:
    key = ClusterKey.generate()
    with pytest.raises(TransportError, match="--advertise-host"):
        ZmqBus("a", 1, "tcp://0.0.0.0:0", cluster_key=key)
    a = ZmqBus("a", 1, "tcp://0.0.0.0:0", cluster_key=key, advertise_host="node7")
    assert a.address.endpoint.startswith("tcp://node7:")
    assert a.address.public_key == key.server_public
    await a.close()


async def test_an_ipc_socket_in_use_is_not_taken_over(private: Path) -> None:
    endpoint = f"ipc://{private}/a.sock"
    a = ZmqBus("a", 1, endpoint)
    with pytest.raises(TransportError, match="in use"):
        ZmqBus("b", 1, endpoint)
    b = ZmqBus("b", 1, f"ipc://{private}/b.sock")
    [_, inbox] = meet(b, a)
    assert b.send("a", note(1))
    await inbox.wait_for(1)
    await close(a, b)


async def test_the_socket_of_a_dead_process_is_replaced(private: Path) -> None:
    path = str(private / "a.sock")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    assert os.path.exists(path)
    a = ZmqBus("a", 1, f"ipc://{path}")
    await a.close()
    assert not os.path.exists(path)
    Path(path).write_text("mine")
    with pytest.raises(TransportError, match="not a socket"):
        ZmqBus("a", 1, f"ipc://{path}")
    assert Path(path).read_text() == "mine"


HOSTILE_PEERS = ["inproc://x", "ipc://../x", "tcp://[:1", "\udc80", "", "tcp://10.0.0.1:5555"]


@pytest.mark.parametrize("endpoint", HOSTILE_PEERS)
async def test_connect_never_raises(private: Path, endpoint: str) -> None:
    a = ZmqBus("a", 1, f"ipc://{private}/a.sock")
    a.connect(Address("b", 1, endpoint))
    assert a.dropped == {"refused_peer": 1}
    assert not a.send("b", Leave())
    await a.close()


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) <= before + 8  # pyzmq's own collector, once


async def test_a_dead_peer_costs_bounded_memory(private: Path) -> None:
    a = ZmqBus("a", 1, f"ipc://{private}/a.sock", max_queued_nbytes=10 << 20)
    a.connect(Address("b", 1, f"ipc://{private}/nobody.sock"))
    payload = bytes(1 << 20)
    assert [a.send("b", Leave(), [payload]) for _ in range(14)] == [True] * 10 + [False] * 4
    assert a.send("b", Leave())  # small ones go by the count
    started_s = time.perf_counter()
    await a.close()
    assert time.perf_counter() - started_s < 1.0
