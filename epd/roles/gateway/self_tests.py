"""Instances that make no progress, and the self-test that they pass before they get work again."""

from __future__ import annotations

from collections.abc import Callable

from epd.fsm.instance import Do, Instance, ProbeFailed, ProbePassed
from epd.fsm.kernel import Event
from epd.messages import SelfTest, SelfTestResult
from epd.roles.base import Actor, Component, performs, receives
from epd.transport.base import Received


class SelfTests(Component[Instance]):
    """The registry's part: `of` is the life that sent a message, `apply` fires an event on it."""

    def __init__(
        self,
        actor: Actor,
        of: Callable[[Received], Instance | None],
        apply: Callable[[Instance, Event], None],
    ) -> None:
        super().__init__(actor)
        self._of = of
        self._apply_to = apply

    @receives(SelfTestResult)
    def on_result(self, received: Received) -> None:
        if (instance := self._of(received)) is not None:
            serial, reason = received.message.serial, received.message.reason
            event = ProbeFailed(serial, reason) if reason else ProbePassed(serial)
            self._apply_to(instance, event)

    @performs(Do.SEND_SELF_TEST)
    def send(self, instance: Instance, event: Event) -> None:
        self.actor.send(instance.info.address, SelfTest(serial=instance.num_probes))

    @performs(Do.TELL_STUCK)
    def tell_stuck(self, instance: Instance, event: Event) -> None:
        self.actor.counters["instances_stuck"] += 1
        warn = self.actor.log.warning
        warn("an instance gets no new work", instance=instance.key, why=instance.reason)
