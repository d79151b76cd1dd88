"""Who may listen where, who may call whom, and with which key."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from epd.messages import Address, Leave
from epd.transport.base import TransportError
from epd.transport.bus.curve import ClusterKey
from epd.transport.bus.zmq import ZmqBus
from tests.contract.bus_kit import Inbox, close, meet, note

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
        ("ipc:///nonexistent/run/epd/a.sock", "create it"),
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


async def test_a_wildcard_is_no_address_to_be_dialled_by() -> None:
    with pytest.raises(TransportError, match="tcp://ADDRESS:0"):
        ZmqBus("a", 1, "tcp://0.0.0.0:0", cluster_key=ClusterKey.generate())


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


async def test_what_an_earlier_run_has_just_removed_is_made_again(private: Path) -> None:
    """Both directories, between planning a run and binding its sockets."""
    directory = private / "epd" / "8000"
    a = ZmqBus("a", 1, f"ipc://{directory}/a.sock")
    assert [d.stat().st_mode & 0o777 for d in (directory.parent, directory)] == [0o700, 0o700]
    await a.close()


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
