"""The cache event stream: encoders send their gateways changes of the rows they hold.

`CachePublisher` is a part of an encode instance. The owner of the rows reports `stored` when a hash
is first held in memory of this encoder, and `evicted` when no memory of it holds the rows. Moves
between tiers are not reported. Every encoder finds the rows of a storage there, so only instances
that cannot encode report them (`finder`). Changes are sent in numbered batches, at most one per
`PUBLISH_DELAY_S`.

`CacheDirectory` is a part of the gateway.  It applies batches in order and asks for everything when
one is missing. A lost or late batch costs at most one encode: `epd.scheduling.residency` has the
rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Never

from epd.fsm.instance import Instance
from epd.messages import Address, CacheEvents, CacheEventsWanted
from epd.roles.base import Actor, Component, receives
from epd.roles.gateway.registry import Registry
from epd.scheduling.residency import MAX_TRACKED, Batch, CacheIndex, CacheLog
from epd.transport.base import Received

PUBLISH_DELAY_S = 0.02


class CachePublisher(Component[Never]):
    """An encoder's side."""

    def __init__(self, actor: Actor) -> None:
        super().__init__(actor)
        self.log = CacheLog()
        self._in_memory: dict[str, None] = {}
        self._in_storage: dict[str, None] = {}

    @property
    def sequence(self) -> int:
        """Of the last batch, for heartbeats."""
        return self.log.sequence

    def stored(self, mm_hash: str) -> None:
        """The rows are in memory of this encoder; saying so again is no news."""
        self._in_memory[mm_hash] = None
        self.log.stored(mm_hash)
        self._publish_soon()

    def evicted(self, mm_hash: str) -> None:
        """The rows are in no memory of this encoder any more."""
        self._in_memory.pop(mm_hash, None)
        self._forget(mm_hash)

    def in_storage(self, mm_hashes: Sequence[str]) -> None:
        """All hashes in storage now; the last `MAX_TRACKED` are published."""
        before, told = self._in_storage, mm_hashes[-MAX_TRACKED:]
        self._in_storage = dict.fromkeys(told)
        for mm_hash in before:
            self._forget(mm_hash)
        for mm_hash in told:
            self.log.stored(mm_hash)
        self._publish_soon()

    def not_in_storage(self, mm_hash: str) -> None:
        """It was looked for there, and not found."""
        self._in_storage.pop(mm_hash, None)
        self._forget(mm_hash)

    def _forget(self, mm_hash: str) -> None:
        if mm_hash not in self._in_memory and mm_hash not in self._in_storage:
            self.log.evicted(mm_hash)
            self._publish_soon()

    def _publish_soon(self) -> None:
        if self.log.has_news and not self.actor.timers.will_call(self._publish):
            self.actor.timers.call_later(PUBLISH_DELAY_S, self._publish)

    def _publish(self) -> None:
        batch = self.log.take()
        self.actor.tell_gateways(
            CacheEvents(
                sequence=batch.sequence, full=batch.full, stored=batch.stored, evicted=batch.evicted
            )
        )

    @receives(CacheEventsWanted)
    def on_wanted(self, received: Received) -> None:
        """A gateway missed a batch, or is a new one."""
        self.log.owe_full()
        self._publish_soon()


class CacheDirectory(Component[Never]):
    """The gateway's side."""

    def __init__(self, actor: Actor, registry: Registry) -> None:
        super().__init__(actor)
        self.index = CacheIndex()
        self._registry = registry
        self.on_stored: Callable[[str, str], None] = lambda instance_id, mm_hash: None
        registry.heartbeat_listeners += (self._on_heartbeat,)

    @receives(CacheEvents)
    def on_events(self, received: Received) -> None:
        if not self._registry.is_present(received.source, received.epoch):
            return  # a life that is over, or not welcomed yet: its heartbeats bring it back
        message: CacheEvents = received.message
        batch = Batch(message.sequence, message.full, message.stored, message.evicted)
        if not self.index.apply(received.source, received.epoch, batch):
            self._ask(received.source)
        for mm_hash in batch.stored:
            self.on_stored(received.source, mm_hash)

    def _on_heartbeat(self, instance: Instance) -> None:
        """Sent after the batch of that number: what is not here by now is lost."""
        address: Address = instance.info.address
        if not self.index.is_current(
            address.instance_id, address.epoch, instance.load.cache_sequence
        ):
            self._ask(address.instance_id)

    def _ask(self, instance_id: str) -> None:
        self.actor.counters["cache_events_missed"] += 1
        self.actor.send(instance_id, CacheEventsWanted())

    def peer_lost(self, peer: Address) -> None:
        self.index.forget(peer.instance_id, peer.epoch)
