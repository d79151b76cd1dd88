"""`Bus` between processes and hosts: ZMQ sockets read by the event loop itself.

Theory of operation
-------------------
One bound ROUTER receives from all peers; one DEALER per peer sends.  Nothing is ever sent back over
the ROUTER, so no send depends on who happens to be connected.  A DEALER has no routing id: the
ROUTER names each connection itself, also one that libzmq makes again.  With an id of our own and
ROUTER_HANDOVER, a new connection could stay mute for good while the old one was being given up
(fault F48).  A new life of a peer gets a new DEALER, and each header names the life it is meant
for.  So messages for a dead process never reach its successor at the same endpoint (fault F44).  A
link that its user takes for mute is opened anew by `reopen`.

Receiving: the sockets are plain ones and the loop watches the ROUTER's FD, which costs a fourth of
zmq.asyncio's round trips.  That FD is edge-triggered, so each wake reads until EAGAIN: at most 256
messages, and the rest after the loop's other work.  Only reads move the ROUTER's edge here, because
sends go out through other sockets.

Sending never blocks: a full queue is False.  The queue of a peer is bounded in messages by the high
water mark, and in bytes of big payloads by a count of those that libzmq still holds.

All methods belong to the thread of the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import zmq

from epd.dropped import DropLog
from epd.messages import Address, Message
from epd.transport.base import Buffer, Received, TransportError, Unsendable
from epd.transport.bus.zmq_sockets import MessageReader, Outbox
from epd.transport.codec import FrameLimits, FrameRejected, check_instance_id, frames_of, unpack
from epd.transport.endpoint import check_reach, ipc_path, is_tcp, prepare_ipc, split_own

if TYPE_CHECKING:
    from epd.transport.bus.curve import ClusterKey, PeerAdmission

log = logging.getLogger(__name__)

MAX_MESSAGES_PER_WAKE = 256
MAX_FRAMES_PER_WAKE = 1024
CLOSE_LINGER_MS = 300
CLOSE_TIMEOUT_S = 0.9


class ZmqBus:
    """The control plane of one instance.

    `endpoint`: `ipc:///PRIVATE_DIR/NAME.sock`, or `tcp://HOST:PORT` (port 0 or *: any free one).
    `dropped` counts what was not let in or not sent, by kind.  Raises TransportError for one that
    it cannot use."""

    def __init__(
        self,
        instance_id: str,
        epoch: int,
        endpoint: str,
        *,
        cluster_key: ClusterKey | None = None,
        max_queue: int = 1000,
        max_queued_nbytes: int = 256 << 20,
        limits: FrameLimits | None = None,
    ) -> None:
        check_instance_id(instance_id)
        self.dropped: Counter[str] = Counter()
        self._drops = DropLog(_warn, time.monotonic)
        self._key = cluster_key
        self._limits = limits or FrameLimits()
        self._max_queue = max_queue
        self._max_queued_nbytes = max_queued_nbytes
        self._outboxes: dict[str, Outbox] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deliver: Callable[[Received], None] | None = None
        self._closed = False
        self._rescheduled = False
        self._reader = MessageReader(self._limits)
        check_reach(endpoint, encrypted=cluster_key is not None)
        self._context: zmq.Context[Any] = zmq.Context()
        try:
            self._admission = self._open_admission(endpoint)
            self._router = self._open_router()
            bound = _bind(self._router, endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._ipc_file = _FileIdentity(ipc_path(bound))
        encrypted = cluster_key is not None and is_tcp(bound)
        public_key = cluster_key.server_public if cluster_key and encrypted else ""
        self.address = Address(instance_id, epoch, bound, public_key)

    def connect(self, peer: Address) -> None:
        """Learn how to reach a peer.  Never raises: a peer that may not be dialled is counted
        under `refused_peer`, and sends to it are False."""
        known = self._outboxes.get(peer.instance_id)
        if self._closed or (known is not None and known.learn(peer)):
            return
        self.disconnect(peer.instance_id)
        try:
            self.check_peer(peer)
            self._outboxes[peer.instance_id] = self._open_outbox(peer)
        except (TransportError, zmq.ZMQError, UnicodeError) as error:
            self.dropped["refused_peer"] += 1
            log.error("cannot connect to %s at %r: %s", peer.instance_id, peer.endpoint, error)

    def check_peer(self, peer: Address) -> None:
        """Raises TransportError, with a remedy, if `connect` would refuse this peer."""
        check_reach(peer.endpoint, encrypted=self._key is not None)
        if peer.public_key and (self._key is None or peer.public_key != self._key.server_public):
            raise TransportError(
                f"{peer.instance_id} belongs to a cluster with another key: "
                "pass the same --cluster-key FILE to every instance"
            )

    def disconnect(self, instance_id: str) -> None:
        outbox = self._outboxes.pop(instance_id, None)
        if outbox is not None:
            outbox.close(linger_ms=0)

    def reopen(self, instance_id: str) -> None:
        outbox = self._outboxes.get(instance_id)
        if outbox is not None:
            self.disconnect(instance_id)
            self.connect(outbox.peer)

    def send(self, instance_id: str, message: Message, payloads: Sequence[Buffer] = ()) -> bool:
        """Queue a message; see `Bus.send`.  Big payloads are not copied: leave them unchanged."""
        outbox = self._outboxes.get(instance_id)
        if outbox is None or self._closed:
            return False
        try:
            header, nbytes = frames_of(
                self.address, outbox.peer.epoch, message, payloads, self._limits
            )
            sent = outbox.send(header, payloads, nbytes)
        except zmq.Again:
            sent = False
        except Unsendable:
            self.dropped["unsendable"] += 1
            raise
        except Exception as error:  # the socket is gone: the contract says False
            self.dropped["unsendable"] += 1
            log.error("%s to %s was not sent: %s", type(message).__name__, instance_id, error)
            return False
        if not sent:
            self.dropped["queue_full"] += 1
        return sent

    def start(self, deliver: Callable[[Received], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        self._loop.add_reader(self._router.FD, self._drain)
        self._loop.call_soon(self._drain)  # the edge may be behind us already
        if self._admission is not None:
            self._loop.add_reader(self._admission.socket.FD, self._admission.answer_pending)
            self._loop.call_soon(self._admission.answer_pending)

    async def close(self) -> None:
        """Flush for at most 0.3 s, close all sockets, remove the ipc file.  Idempotent."""
        if self._closed:
            return
        self._closed = True
        sockets = [self._router] + ([self._admission.socket] if self._admission else [])
        for sock in sockets:
            if self._loop is not None:
                self._loop.remove_reader(sock.FD)
            sock.close(linger=0)
        for outbox in self._outboxes.values():
            outbox.close(linger_ms=CLOSE_LINGER_MS)
        self._outboxes.clear()
        self._reader.reset()
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await loop.run_in_executor(None, self._context.term)
        self._ipc_file.remove()

    def _open_admission(self, endpoint: str) -> PeerAdmission | None:
        if self._key is None or not is_tcp(endpoint):
            return None
        from epd.transport.bus.curve import PeerAdmission

        return PeerAdmission(self._context, self._key, self.dropped)

    def _open_router(self) -> zmq.Socket[bytes]:
        router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.RCVHWM, self._max_queue)
        router.setsockopt(zmq.BACKLOG, 256)
        limits = self._limits
        router.setsockopt(
            zmq.MAXMSGSIZE, limits.max_header_nbytes + limits.max_payload_nbytes
        )  # a bigger frame costs its sender the connection, before memory is taken for it
        if self._admission is not None and self._key is not None:
            self._key.protect_listener(router)
        return router

    def _open_outbox(self, peer: Address) -> Outbox:
        dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        try:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.SNDHWM, self._max_queue)
            dealer.setsockopt(zmq.RCVHWM, 1)  # nothing is ever read from here
            dealer.setsockopt(zmq.MAXMSGSIZE, 1024)
            dealer.setsockopt(zmq.RECONNECT_IVL, 50)
            dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            dealer.setsockopt(zmq.IPV6, int("[" in peer.endpoint))
            if self._key is not None and is_tcp(peer.endpoint):
                self._key.protect_caller(dealer)
            dealer.connect(peer.endpoint)
        except BaseException:
            dealer.close(linger=0)
            raise
        return Outbox(dealer, peer, self._max_queued_nbytes)

    def _drain(self) -> None:
        """Read until EAGAIN, or until it is the turn of others."""
        budget = MAX_MESSAGES_PER_WAKE
        for _ in range(MAX_FRAMES_PER_WAKE):
            if self._closed or not budget:
                break
            try:
                frame = self._router.recv(zmq.NOBLOCK, copy=False)
            except zmq.ZMQError:  # Again: all is read
                return
            if not frame.more:
                budget -= 1
            self._receive(frame)
        if self._loop is not None and not self._closed and not self._rescheduled:
            self._rescheduled = True
            self._loop.call_soon(self._drain_more)

    def _drain_more(self) -> None:
        self._rescheduled = False
        if not self._closed:
            self._drain()

    def _receive(self, frame: zmq.Frame) -> None:
        try:
            parts = self._reader.add(frame)
            if parts is None:
                return
            received = unpack(*parts, self.address.epoch, self._limits)
        except FrameRejected as rejected:
            self.dropped[rejected.kind] += 1
            self._drops.note(rejected.kind, rejected.message, rejected.source, rejected.detail)
            return
        if self._deliver is None:
            return
        try:
            self._deliver(received)
        except Exception:
            self.dropped["handler_error"] += 1
            log.exception("handler of %s failed", type(received.message).__name__)


class _FileIdentity:
    """The ipc socket file that this bus made; a successor's file of the same name is not ours."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._inode = os.lstat(path).st_ino if path else 0

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self._path and os.lstat(self._path).st_ino == self._inode:
                os.unlink(self._path)


def _warn(text: str, **fields: object) -> None:
    log.warning("%s: %s", text, ", ".join(f"{name} {value}" for name, value in fields.items()))


def _bind(router: zmq.Socket[bytes], endpoint: str) -> str:
    """Bind; returns what peers dial.  Raises TransportError."""
    path, host = ipc_path(endpoint), ""
    if path:
        prepare_ipc(path)
    else:
        host, port = split_own(endpoint)
        router.setsockopt(zmq.IPV6, int("[" in host))
        endpoint = f"tcp://{host}:{'*' if port in ('0', '*') else port}"
    try:
        router.bind(endpoint)
    except zmq.ZMQError as error:
        raise TransportError(
            f"cannot listen on {endpoint}: {error.strerror}; choose another port or host"
        ) from None
    bound = router.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
    return bound if path else f"tcp://{host}:{bound.rpartition(':')[2]}"
