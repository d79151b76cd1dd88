"""Both ends of a question about machines: the gateway's and an instance's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Never

from epd.frontend import Refused
from epd.later import later
from epd.messages import ObserveReport, ObserveRequest
from epd.observed import Memory, Observed, Query, StageLoad
from epd.roles.base import Actor, Component, receives
from epd.roles.gateway.registry import Registry
from epd.roles.watching.poll import Poll
from epd.transport.base import Received

ANSWER_TIMEOUT_S = 2.0
MAX_OPEN = 16  # questions at a time
_observe = later("epd.roles.watching.observation:observe")


class Observable(Component[Never]):
    """An instance that answers the gateway."""

    def __init__(self, actor: Actor, memory: Callable[[], Iterator[Memory]]) -> None:
        super().__init__(actor)
        self._memory = memory

    @receives(ObserveRequest)
    def on_request(self, received: Received) -> None:
        message: ObserveRequest = received.message
        observed = _observe(self.actor, message.query, tuple(self._memory()))
        self.actor.send(received.source, ObserveReport(serial=message.serial, observed=observed))


class Observatory(Component[Never]):
    """The gateway's side."""

    def __init__(
        self, actor: Actor, registry: Registry, loads: Callable[[], tuple[StageLoad, ...]]
    ) -> None:
        super().__init__(actor)
        self._loads = loads
        self._registry = registry
        self._poll = Poll[Observed](actor, registry, ANSWER_TIMEOUT_S)

    async def ask(self, query: Query) -> tuple[dict[str, Observed], list[str]]:
        """By process, this one too; and the instances that did not answer.  Raises Refused."""
        if self._poll.num_open >= MAX_OPEN:
            raise Refused(429, f"{MAX_OPEN} others are looking at the cluster; ask again soon")
        told, silent = await self._poll.ask(
            lambda serial: ObserveRequest(serial=serial, query=query)
        )
        gone = [one for one in self._registry.instances if one.terminal]
        own = _observe(self.actor, query, loads=self._loads(), gone=gone)
        return {self.actor.address.instance_id: own, **told}, silent

    @receives(ObserveReport)
    def on_report(self, received: Received) -> None:
        message: ObserveReport = received.message
        self._poll.answered(received, message.serial, message.observed)
