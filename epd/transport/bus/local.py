"""`Bus` within one process: no sockets, same promises as between machines.

A hub is the wire: buses find each other there by instance id.  A bus that is created under an id
already present takes its place, as a restarted process takes its endpoint.  A message goes into the
receiver's inbox and is delivered from the loop, never from inside `send`, so a handler may send and
is never re-entered.  Objects are passed as they are; with `codec=True` they really become bytes and
back, for tests.  Payloads are passed by reference: as with ZMQ, the sender must not change them
after `send`.

A message that reaches no bus (the peer was replaced, or closed) is counted by the sender in
`dropped`. `send` is True all the same, as of a socket to a dead peer."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence

from epd.messages import Address, Message
from epd.transport.base import Buffer, Received, Unsendable
from epd.transport.codec import FrameLimits, FrameRejected, check_instance_id, frames_of, unpack

log = logging.getLogger(__name__)

MAX_MESSAGES_PER_WAKE = 256


class LocalBusHub(dict[str, "LocalBus"]):
    """The buses of one process, by instance id."""


class LocalBus:
    def __init__(
        self,
        hub: LocalBusHub,
        instance_id: str,
        epoch: int,
        *,
        codec: bool = False,
        max_queue: int = 4096,
    ) -> None:
        check_instance_id(instance_id)
        self.address = Address(instance_id, epoch, f"local:{instance_id}")
        self.dropped: Counter[str] = Counter()
        self._hub = hub
        self._codec = codec
        self._limits = FrameLimits()
        self._max_queue = max_queue  # per sender
        self._peers: dict[str, Address] = {}
        self._inbox: deque[Received] = deque()
        self._queued: Counter[tuple[str, int]] = Counter()  # of the inbox, by sender
        self._deliver: Callable[[Received], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context = contextvars.copy_context()
        self._scheduled = False
        self._closed = False
        hub[instance_id] = self

    def connect(self, peer: Address) -> None:
        """Learn a peer; its endpoint is its name in the hub."""
        known = self._peers.get(peer.instance_id)
        if known is not None and known.epoch not in (0, peer.epoch):
            self.disconnect(peer.instance_id)
        self._peers[peer.instance_id] = peer

    def disconnect(self, instance_id: str) -> None:
        if self._peers.pop(instance_id, None) is not None:
            bus = self._hub.get(instance_id)
            if bus is not None:
                bus._discard_from(self.address)

    def reopen(self, instance_id: str) -> None:
        """There is no connection that could be mute."""

    def send(self, instance_id: str, message: Message, payloads: Sequence[Buffer] = ()) -> bool:
        peer = self._peers.get(instance_id)
        if peer is None or self._closed:
            return False
        received = self._received(peer, message, tuple(payloads))
        bus = self._hub.get(instance_id)
        if bus is None or peer.epoch not in (0, bus.address.epoch):
            self.dropped["stale_target"] += 1
            return True
        sent = bus._enqueue(received)
        if not sent:
            self.dropped["queue_full"] += 1
        return sent

    def start(self, deliver: Callable[[Received], None]) -> None:
        """Deliver from now on, on the running loop; what came earlier has waited in the inbox."""
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        self._context = contextvars.copy_context()  # handlers run as this bus, not as the sender
        self._schedule()

    async def close(self) -> None:
        """Leave the hub.  What this bus has sent is already with its receivers."""
        self._closed = True
        if self._hub.get(self.address.instance_id) is self:
            del self._hub[self.address.instance_id]
        self._inbox.clear()
        self._queued.clear()
        self._deliver = None

    def _received(self, peer: Address, message: Message, payloads: tuple[Buffer, ...]) -> Received:
        if not self._codec:
            return Received(self.address.instance_id, self.address.epoch, message, payloads)
        try:
            header, _ = frames_of(self.address, peer.epoch, message, payloads, self._limits)
            views = tuple(memoryview(payload).cast("B") for payload in payloads)
            return unpack(header, views, peer.epoch, self._limits)
        except FrameRejected as error:
            self.dropped["unsendable"] += 1
            raise Unsendable(f"{type(message).__name__} cannot be sent: {error}") from None
        except Unsendable:
            self.dropped["unsendable"] += 1
            raise

    def _enqueue(self, received: Received) -> bool:
        sender = (received.source, received.epoch)
        if self._queued[sender] >= self._max_queue:
            return False
        self._queued[sender] += 1
        self._inbox.append(received)
        self._schedule()
        return True

    def _discard_from(self, sender: Address) -> None:
        key = (sender.instance_id, sender.epoch)
        self._inbox = deque(r for r in self._inbox if (r.source, r.epoch) != key)
        self._queued.pop(key, None)

    def _schedule(self) -> None:
        if self._loop is None or self._scheduled or not self._inbox:
            return
        self._scheduled = True
        self._loop.call_soon(self._drain, context=self._context)

    def _drain(self) -> None:
        self._scheduled = False
        for _ in range(min(MAX_MESSAGES_PER_WAKE, len(self._inbox))):
            if not self._inbox or self._deliver is None:  # a handler closed or discarded
                break
            received = self._inbox.popleft()
            self._forget_one((received.source, received.epoch))
            try:
                self._deliver(received)
            except Exception:
                self.dropped["handler_error"] += 1
                log.exception("handler of %s failed", type(received.message).__name__)
        self._schedule()

    def _forget_one(self, sender: tuple[str, int]) -> None:
        self._queued[sender] -= 1
        if self._queued[sender] <= 0:
            del self._queued[sender]
