"""The clocks of open generations, at the gateway.

Two clocks bound an attempt: the silence of its instances (an instance reports its queued requests
now and then), and the wait for their confirmation that the attempt is cancelled. Two bound what the
client sees: the wait for the next token, whatever instances report meanwhile, and the whole. Each
ends as an event of GENERATION.
"""

from __future__ import annotations

from functools import partial

from epd.config import Timing
from epd.fsm.generation import (
    AbortTimedOut,
    AttemptTimedOut,
    DeadlinePassed,
    Do,
    Generation,
    PlacementTimedOut,
    TokenTimedOut,
)
from epd.fsm.kernel import Event
from epd.messages import RequestInquiry
from epd.roles.base import Actor, Component, performs
from epd.roles.gateway.dispatch import DEADLINE_GRACE_S, Dispatcher


class GatewayTimers(Component[Generation]):
    """Performs the effects that arm; `owner` fires what the timers bring."""

    def __init__(
        self,
        actor: Actor,
        owner: Component[Generation],
        dispatcher: Dispatcher,
        timing: Timing,
    ) -> None:
        super().__init__(actor)
        self._owner = owner
        self._dispatcher = dispatcher
        self._timing = timing
        self._arm = actor.timers.arm

    @performs(Do.ARM_ATTEMPT)
    def arm_attempt(self, machine: Generation, event: Event) -> None:
        """Silence has a bound; an instance reports the requests in its queue, so a wait is none."""
        if machine.token_ids_of_attempt or machine.accepted:
            self._listen(machine, self._timing.stall_timeout_s)
        else:
            delay_s = self._timing.accept_timeout_s
            self._arm(machine, AttemptTimedOut, delay_s, partial(self._ignored, machine))

    def _listen(self, machine: Generation, left_s: float) -> None:
        """Counted by looks: a gateway that stood still has not listened meanwhile."""
        if left_s <= 0:
            self._stalled(machine)
            return
        delay_s = min(self._timing.accept_timeout_s, left_s)
        inquire = partial(self._inquire, machine, left_s - delay_s)
        self._arm(machine, AttemptTimedOut, delay_s, inquire)

    def _inquire(self, machine: Generation, left_s: float) -> None:
        """Ask its instances: its last message may be lost, or a step may just take long."""
        for address in dict.fromkeys(self._dispatcher.needed(machine)):
            self.actor.doubt(address)
            if machine.prompt.stage != "encode":  # whose images are offered until they are kept
                self.actor.send(
                    address, RequestInquiry(request_id=machine.key, attempt=machine.attempt)
                )
        self._listen(machine, left_s)

    def _stalled(self, machine: Generation) -> None:
        reason = f"no message of it arrived for {self._timing.stall_timeout_s:g} s"
        blamed = machine.placement.instances()
        self._owner.post(machine, AttemptTimedOut(reason, blamed=blamed))

    def _ignored(self, machine: Generation) -> None:
        ignorant = self._dispatcher.needed(machine)[0]
        self.actor.doubt(ignorant)
        reason = f"instance {ignorant.instance_id} did not accept the request"
        self._owner.fire(machine, AttemptTimedOut(reason, blamed={ignorant.instance_id}))

    @performs(Do.ARM_PATIENCE)
    def arm_patience(self, machine: Generation, event: Event) -> None:
        """Reports of instances do not extend it: a client sees tokens only."""
        limits = machine.limits
        patience_s = limits.token_s if machine.token_ids else limits.first_token_s
        too_late = partial(self._too_late, machine, patience_s)
        self._arm(machine, TokenTimedOut, patience_s, too_late)

    def _too_late(self, machine: Generation, patience_s: float) -> None:
        which = "no further token" if machine.token_ids else "no token"
        self._owner.fire(machine, TokenTimedOut(f"{which} came within {patience_s:g} s"))

    @performs(Do.ARM_DEADLINE)
    def arm_deadline(self, machine: Generation, event: Event) -> None:
        """A little later than its instances, which end it with all that there is."""
        self._owner.arm(machine, machine.limits.total_s + DEADLINE_GRACE_S, DeadlinePassed())

    @performs(Do.ARM_TOPOLOGY)
    def arm_topology(self, machine: Generation, event: Event) -> None:
        self._owner.arm(machine, self._timing.topology_timeout_s, PlacementTimedOut())

    @performs(Do.ARM_ABORT)
    def arm_abort(self, machine: Generation, event: Event) -> None:
        self._owner.arm(machine, self._timing.abort_timeout_s, AbortTimedOut())
