"""Timers of one process: cheap to arm, to postpone and to drop, because most never fire.

Theory of operation
-------------------
A machine has one timer for each event: arming it again postpones it. It fires as that event, or is
dropped when the machine enters a state in which it does not run (`epd.fsm.kernel`): no role disarms
it. A housekeeping timer belongs to no machine and is identified by the function that it calls.

A request arms some twenty timers (deadlines, retries, clocks of silence), and where all goes well
every one of them is dropped or put off.  So none is given to the event loop: they stand in a heap
of their own, and the loop has one timer, for the earliest.  Dropping marks; a marked entry goes
when it comes to the top, or when half of the heap is marked.  Putting a timer off changes its due
time only: its entry is looked at in its old place, and goes back into the heap then.

Equal times go off in the order in which they were armed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator
from heapq import heapify, heappop, heappush, heapreplace

from epd.fsm.kernel import Event, Machine
from epd.roles.mailbox import Mailbox
from epd.transport.base import Clock, TimerHandle

MIN_MARKED = 64  # entries, before the heap is swept

Callback = Callable[[], object]


class _Timer:
    """When it is due and what it does then; no callback: it is marked."""

    __slots__ = ("callback", "due_s", "key", "looks_s", "owner")

    def __init__(
        self, owner: Machine | None, key: object, due_s: float, callback: Callback
    ) -> None:
        self.owner = owner
        self.key = key
        self.due_s = due_s
        self.looks_s = due_s  # its place in the heap
        self.callback: Callback | None = callback


class Timers:
    """See the module's docstring.  What is due is one item of the inbox."""

    def __init__(self, clock: Clock, mailbox: Mailbox) -> None:
        self._clock = clock
        self._mailbox = mailbox
        self._armed: dict[Machine | None, dict[object, _Timer]] = {None: {}}  # None: housekeeping
        self._heap: list[tuple[float, int, _Timer]] = []
        self.num_armed = 0  # since the start, each time that one was put off as well
        self._serial = 0
        self._num_marked = 0
        self._wakes_s = math.inf  # when the loop looks next; -inf: it is looking now
        self._handle: TimerHandle | None = None
        self._closed = False

    def arm(self, machine: Machine, event: type[Event], delay_s: float, callback: Callback) -> None:
        """(Re)start the machine's timer of this event, at the earliest for the loop's next turn;
        `callback` fires it."""
        self._arm(machine, event, delay_s, callback)

    def call_later(self, delay_s: float, callback: Callback) -> None:
        """(Re)start housekeeping."""
        self._arm(None, callback, delay_s, callback)

    def _arm(self, owner: Machine | None, key: object, delay_s: float, callback: Callback) -> None:
        self.num_armed += 1
        due_s = self._clock.now_s() + delay_s if delay_s > 0.0 else self._clock.now_s()
        if (armed := self._armed.get(owner)) is None:
            armed = self._armed[owner] = {}
        if (timer := armed.get(key)) is not None:
            if timer.looks_s <= due_s:
                timer.due_s, timer.callback = due_s, callback
                return
            self._mark(timer)
        timer = armed[key] = _Timer(owner, key, due_s, callback)
        self._serial += 1
        heappush(self._heap, (due_s, self._serial, timer))
        if due_s < self._wakes_s:
            self._look_at(due_s)

    def runs(self, machine: Machine, event: type[Event]) -> bool:
        return event in self._armed.get(machine, ())

    def due_s(self, machine: Machine, events: Container[object]) -> float:
        """When the first of these goes off; inf: none of them runs."""
        armed = self._armed.get(machine)
        if armed is None:
            return math.inf
        return min((one.due_s for event, one in armed.items() if event in events), default=math.inf)

    def will_call(self, callback: Callback) -> bool:
        return callback in self._armed[None]

    def cancel_call(self, callback: Callback) -> None:
        self._drop(None, callback)

    def keep(self, machine: Machine, running: Container[object]) -> None:
        """The machine has entered a state in which only these of its timers run."""
        for event in list(self._armed.get(machine, ())):
            if event not in running:
                self._drop(machine, event)

    def _drop(self, owner: Machine | None, key: object) -> None:
        if (timer := self._armed.get(owner, {}).get(key)) is not None:
            self._take_out(timer)
            self._mark(timer)

    def _take_out(self, timer: _Timer) -> None:
        armed = self._armed[timer.owner]
        del armed[timer.key]
        if not armed and timer.owner is not None:
            del self._armed[timer.owner]

    def close(self) -> None:
        """The process ends: nothing goes off any more."""
        self._closed = True
        self._armed = {None: {}}
        self._heap.clear()
        if self._handle is not None:
            self._handle.cancel()

    def __iter__(self) -> Iterator[str]:
        """What is armed, in words."""
        for armed in self._armed.values():
            yield from map(_name, armed.values())

    def _mark(self, timer: _Timer) -> None:
        timer.callback = timer.owner = None  # a request that has ended takes its images with it
        self._num_marked += 1
        if self._num_marked > MIN_MARKED and 2 * self._num_marked > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].callback is not None]
            heapify(self._heap)
            self._num_marked = 0

    def _look_at(self, when_s: float) -> None:
        if self._handle is not None:
            self._handle.cancel()
        if not self._closed:
            self._wakes_s = when_s
            self._handle = self._clock.call_at(when_s, self._due)

    def _due(self) -> None:
        self._mailbox.put("timers", self._look)

    def _look(self) -> None:
        """Run what is due, and ask the loop to look again when the next one is."""
        self._wakes_s, self._handle = -math.inf, None
        now_s, last = self._clock.now_s(), self._serial
        while self._heap:
            looks_s, serial, timer = self._heap[0]
            if timer.callback is None:
                heappop(self._heap)
                self._num_marked -= 1
            elif looks_s > now_s or serial > last:  # armed just now: in the next turn
                break
            elif looks_s < timer.due_s:  # it was put off
                timer.looks_s = timer.due_s
                heapreplace(self._heap, (timer.due_s, serial, timer))
            else:
                heappop(self._heap)
                self._take_out(timer)
                self._mailbox.do(_name(timer), timer.callback)
                self._mailbox.finish()  # which may drop the next
        self._wakes_s = math.inf
        if self._heap:
            self._look_at(self._heap[0][0])


def _name(timer: _Timer) -> str:
    name = str(getattr(timer.key, "__qualname__", timer.key))
    return name if timer.owner is None else f"{timer.owner.table.name} {timer.owner.key} {name}"
