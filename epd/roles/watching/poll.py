"""One question of the gateway to every instance, and the answers that come in time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from epd.messages import Message
from epd.roles.base import Actor
from epd.roles.bell import Bell
from epd.roles.gateway.registry import Registry
from epd.transport.base import Received

A = TypeVar("A")


@dataclass(slots=True)
class _Asked(Generic[A]):
    """Instances that have not answered yet, and the answers so far."""

    waiting: set[str]
    told: dict[str, A] = field(default_factory=dict)
    news: Bell = field(default_factory=Bell)


class Poll(Generic[A]):
    """`A`: what one instance answers."""

    def __init__(self, actor: Actor, registry: Registry, timeout_s: float) -> None:
        self._actor = actor
        self._registry = registry
        self._timeout_s = timeout_s
        self._asked: dict[int, _Asked[A]] = {}
        self._serial = 0

    @property
    def num_open(self) -> int:
        """Questions that wait for answers."""
        return len(self._asked)

    async def ask(self, question: Callable[[int], Message]) -> tuple[dict[str, A], list[str]]:
        """The answers by instance, and who gave none.  `question` makes it from its number."""
        self._serial += 1
        serial = self._serial
        present = [i.info.address for i in self._registry.instances if i.present]
        asked = self._asked[serial] = _Asked[A]({address.instance_id for address in present})
        for address in present:
            self._actor.send(address, question(serial))
        self._actor.timers.call_later(self._timeout_s, asked.news.ring)
        try:
            if present:
                await asked.news
        finally:
            self._actor.timers.cancel_call(asked.news.ring)
            del self._asked[serial]
        return asked.told, sorted(asked.waiting)

    def answered(self, received: Received, serial: int, answer: A) -> None:
        """Answers that come late or twice change nothing."""
        asked = self._asked.get(serial)
        if asked is None or received.source not in asked.waiting:
            return
        asked.waiting.remove(received.source)
        asked.told[received.source] = answer
        if not asked.waiting:
            asked.news.ring()
