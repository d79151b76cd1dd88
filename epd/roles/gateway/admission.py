"""Who gets a place at this gateway, whose request goes out next, and what would be too late.

A request is refused before any work if all places are taken, or if its first token would come too
late by all that waits before it.  When its prompt is ready, its own size counts, too.  Then keys
take turns (`FairQueue`): a request goes out when instances have less than `WINDOW_S` of waiting
work, and a place in a batch of decodes.  What is at an instance is in the instance's own order, so
that window is what a flood of one key costs another.  As long as only one key has ever asked, there
are no turns to take, and all goes out at once.

With nothing before it no request is refused, whatever its size: costs may be mistaken, and work
alone measures them again.
"""

from __future__ import annotations

from epd.config import Limits
from epd.frontend import Refused, TimeLimits
from epd.fsm.generation import Do, Generation, LateFound, TurnCame
from epd.fsm.kernel import Event
from epd.roles.base import Actor, Component, performs
from epd.roles.gateway.dispatch import Dispatcher
from epd.scheduling.admission.comebacks import SHARE, Comebacks
from epd.scheduling.admission.fairness import FairQueue, cost_s
from epd.scheduling.predicted_rule import Outlook

WINDOW_S = 1.0
SURE = 0.75  # of the time that it has: a prediction leaves some for what it cannot foresee
TICK_S = 1.0  # Retry-After has whole seconds: who comes back in one comes in one moment
MIN_S = 0.1
FEW = 4  # prompts at an instance, while nobody knows what they cost
PRIORITY_S = 10.0  # as at instances


class AdmissionControl(Component[Generation]):
    """Of one gateway."""

    def __init__(
        self,
        actor: Actor,
        owner: Component[Generation],
        opened: dict[str, Generation],
        dispatcher: Dispatcher,
        limits: Limits,
        max_running: int,
    ) -> None:
        """`owner` fires what comes of it; `opened`: its open requests; `max_running`: sequences of
        a batch of decodes."""
        super().__init__(actor)
        self._owner = owner
        self._open = opened
        self._dispatcher = dispatcher
        self._max_open = limits.max_open_requests
        self._max_running = max_running
        self._comebacks = Comebacks()
        self._queue = FairQueue()
        self._last: str | None = None  # who got a place,
        self._has_others = False  # and whether it was ever somebody else
        self._own_s = 0.0  # of a request, usually

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def is_full(self) -> bool:
        """Whether there is no place, promised or not."""
        return len(self._open) >= self._max_open

    def refusal(self, who: str, limits: TimeLimits) -> Refused | None:
        """Why there is no place for one more request; None: there is."""
        now_s = self.clock.now_s()
        if not self._comebacks.admits(who, self._max_open - len(self._open), now_s):
            taken_s = (machine.admitted_s for machine in self._open.values())
            work_s = self._before_s(self._dispatcher.outlook(with_images=False))
            wait_s = self._comebacks.refused(who, taken_s, now_s, work_s)
            told = f"the gateway has {self._max_open} requests open or promised, its limit"
            return Refused(429, f"{told}; try again in {wait_s} s", wait_s)
        if self._dispatcher.is_vacant():
            return Refused(503, "no instance has joined the gateway; wait until /ready answers 200")
        left_s = min(limits.first_token_s, limits.total_s)
        outlook = self._dispatcher.outlook(with_images=False)
        if late := self._late(who, outlook, left_s, self._queue.cost_s(outlook.prices), 0.0):
            return Refused(429, late.reason, late.retry_after_s)
        self._has_others |= self._last not in (None, who)
        self._last = who
        return None

    def _late(
        self, who: str, outlook: Outlook, left_s: float, queued_s: float, own_s: float
    ) -> LateFound | None:
        first_token_s = outlook.first_token_s(queued_s, own_s)
        is_ahead = outlook.is_measured and outlook.waits_s + queued_s > 0
        room_s = SURE * left_s
        if not is_ahead or first_token_s <= room_s:
            return None
        if not outlook.is_sure and max(own_s, outlook.waits_s / max(1, outlook.num_ahead)) > room_s:
            return None  # one request alone would be too late: a step was held up, and no more
        before_s = self._before_s(outlook) * max(1.0, TICK_S / max(room_s, MIN_S))
        late_s = first_token_s - max(0.0, room_s - TICK_S) + before_s
        wait_s = self._comebacks.refused(who, (), self.clock.now_s(), late_s)
        self.actor.counters["late_refused"] += 1
        return LateFound(
            f"its first token would come in {first_token_s:.1f} s, and it has {left_s:.1f} s; try "
            f"again in {wait_s} s, or give it more time (X-EPD-First-Token-Timeout)",
            wait_s,
        )

    def _before_s(self, outlook: Outlook) -> float:
        """Work of those who were promised a place, and have none yet."""
        return self._own_s * self._comebacks.num_promised / outlook.parallel

    def freed(self, machine: Generation) -> None:
        """Its place came back."""
        self._comebacks.freed(self.clock.now_s() - machine.admitted_s)
        self.go_on()

    # --- turns ------------------------------------------------------------------------------------

    @performs(Do.QUEUE)
    def queue(self, machine: Generation, event: Event) -> None:
        amounts = self._dispatcher.amounts(machine)
        if late := self._late_one(machine, amounts, is_next=False):
            self._owner.post(machine, late)
            return
        rank = machine.admitted_s + PRIORITY_S * machine.prompt.sampling.priority
        self._queue.join(machine.key, machine.who, rank, amounts)
        self.go_on()
        if machine.key in self._queue:
            self.actor.counters["waited_for_a_turn"] += 1

    @performs(Do.LEAVE_QUEUE)
    def leave_queue(self, machine: Generation, event: Event) -> None:
        self._queue.leave(machine.key)
        self.go_on()

    def go_on(self) -> None:
        """Something has changed: the next one goes out, if it may."""
        if not self._queue:
            return
        outlook = self._dispatcher.outlook(with_images=True)
        if self._has_room(outlook) and (key := self._queue.take(outlook.prices)) is not None:
            machine = self._open[key]
            late = self._late_one(machine, self._dispatcher.amounts(machine), is_next=True)
            self._owner.post(machine, late or TurnCame())

    def _has_room(self, outlook: Outlook) -> bool:
        if not self._has_others:
            return True
        is_short = outlook.waits_s < WINDOW_S and (outlook.is_measured or outlook.num_ahead < FEW)
        return is_short and self._dispatcher.num_least_decoding() < self._max_running

    def _late_one(
        self, machine: Generation, amounts: tuple[float, float], *, is_next: bool
    ) -> LateFound | None:
        """If it is; `is_next`: nobody in the queue is before it."""
        limits = machine.limits
        outlook = self._dispatcher.outlook(with_images=amounts[0] > 0)
        due_s = machine.admitted_s + min(limits.first_token_s, limits.total_s)
        own_s, left_s = cost_s(amounts, outlook.prices), due_s - self.clock.now_s()
        queued_s = 0.0 if is_next else self._queue.cost_s(outlook.prices)
        if outlook.is_measured:
            self._own_s += SHARE * (own_s - self._own_s) if self._own_s else own_s
        return self._late(machine.who, outlook, left_s, queued_s, own_s)
