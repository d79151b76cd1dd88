"""The gateways that asked an encoder for rooms, and the reports that they get besides rows.

The message that ends a room may be lost. So the encoder reports open rooms to their gateway now and
then, and the gateway answers for rooms that are over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from epd.config import Timing
from epd.engine.base import HoldsAdapters
from epd.failure import Failure, FailureKind
from epd.fsm.kernel import Machine
from epd.messages import Address, EncodeAccepted, StageReport
from epd.roles.adapter_objection import adapter_objection
from epd.roles.base import Actor
from epd.transport.base import Received


@dataclass(frozen=True, slots=True)
class Asker:
    """Of one room."""

    request_id: str
    attempt: int
    gateway: Address
    mm_hash: str
    reports: bool
    keeps: bool  # nobody takes the rows: they stay in the cache


class Askers:
    """By room, while it is open."""

    def __init__(self, actor: Actor, timing: Timing) -> None:
        self._actor = actor
        self._tell_every_s = timing.stall_timeout_s / 3
        self._askers: dict[str, Asker] = {}

    def __len__(self) -> int:
        return len(self._askers)

    def __contains__(self, room: str) -> bool:
        return room in self._askers

    def refusal(
        self, received: Received, max_queue: int, tower: HoldsAdapters | None
    ) -> Failure | None:
        """Of a request, if it is refused; `tower`: None where rows can only be found."""
        asked = received.source, "encode", len(self), max_queue, "images"
        if refusal := self._actor.refusal(*asked):
            return refusal
        consumer, adapter = received.message.consumer, received.message.adapter
        if consumer is not None and self._actor.is_lost(consumer):
            gone = "the prefill instance was lost"
            return Failure(FailureKind.BUSY, gone, consumer.instance_id)
        if len(received.payloads) != 1:
            return Failure(FailureKind.BUSY, "the request came without its image")
        return adapter_objection(tower, adapter) if tower is not None else None

    def add(self, room: str, asker: Asker) -> None:
        self._askers[room] = asker
        if not self._actor.timers.will_call(self._tell):
            self._arm()

    def keeper(self, room: str) -> Asker | None:
        """Who asked for a room without a consumer; None if it has one."""
        asker = self._askers.get(room)
        return asker if asker is not None and asker.keeps else None

    def of(self, gateway: Address) -> Iterator[tuple[str, Asker]]:
        """Rooms that this life of a gateway has asked for."""
        life = (gateway.instance_id, gateway.epoch)
        for room, asker in list(self._askers.items()):
            if (asker.gateway.instance_id, asker.gateway.epoch) == life:
                yield room, asker

    def closed(self, room: str, *machines: Machine | None) -> None:
        """The room has ended: its timeline goes to the gateway that asked for reports."""
        asker = self._askers.pop(room, None)
        if asker is not None and asker.reports and machines[0] is not None:
            spans = self._actor.spans(*machines, gateway=asker.gateway.instance_id)
            report = StageReport(request_id=asker.request_id, attempt=asker.attempt, spans=spans)
            self._actor.send(asker.gateway, report)

    def _arm(self) -> None:
        self._actor.timers.call_later(self._tell_every_s, self._tell)

    def _tell(self) -> None:
        for room, asker in self._askers.items():
            self._actor.send(asker.gateway, EncodeAccepted(room=room, attempt=asker.attempt))
        if self._askers:
            self._arm()
