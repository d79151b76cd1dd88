"""Named timers of one process: cheap to arm, to put off and to drop, because most never go off.

Theory of operation
-------------------
A request arms some twenty timers (deadlines, retries, clocks of silence), and where all goes well
every one of them is disarmed or put off.  So none is given to the event loop: they stand in a heap
of their own, and the loop has one timer, for the earliest.  Disarming marks; a marked entry goes
when it comes to the top, or when half of the heap is marked.  Putting a timer off changes its due
time only: its entry is looked at in its old place, and goes back into the heap then.

Equal times go off in the order in which they were armed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from epd.roles.mailbox import Mailbox
from epd.transport.base import Clock, TimerHandle

MIN_MARKED = 64  # entries, before the heap is swept


class _Timer:
    """When it is due and what it does then; no callback: it is marked."""

    __slots__ = ("callback", "due_s", "looks_s", "name")

    def __init__(self, name: str, due_s: float, callback: Callable[[], None]) -> None:
        self.name = name
        self.due_s = due_s
        self.looks_s = due_s  # its place in the heap
        self.callback: Callable[[], None] | None = callback


class Timers:
    """See the module's docstring.  What is due is one item of the inbox."""

    def __init__(self, clock: Clock, mailbox: Mailbox) -> None:
        self._clock = clock
        self._mailbox = mailbox
        self._armed: dict[str, _Timer] = {}
        self._heap: list[tuple[float, int, _Timer]] = []
        self.num_armed = 0  # since the start, each time that one was put off as well
        self._serial = 0
        self._num_marked = 0
        self._wakes_s = math.inf  # when the loop looks next; -inf: it is looking now
        self._handle: TimerHandle | None = None
        self._closed = False

    def arm(self, name: str, delay_s: float, callback: Callable[[], None]) -> None:
        """(Re)start the timer `name`; at the earliest in the loop's next turn."""
        self.num_armed += 1
        due_s = self._clock.now_s() + delay_s if delay_s > 0.0 else self._clock.now_s()
        timer = self._armed.get(name)
        if timer is not None:
            if timer.looks_s <= due_s:
                timer.due_s, timer.callback = due_s, callback
                return
            self._mark(timer)
        timer = self._armed[name] = _Timer(name, due_s, callback)
        self._serial += 1
        heappush(self._heap, (due_s, self._serial, timer))
        if due_s < self._wakes_s:
            self._look_at(due_s)

    def disarm(self, name: str) -> None:
        timer = self._armed.pop(name, None)
        if timer is not None:
            self._mark(timer)

    def close(self) -> None:
        """The process ends: nothing goes off any more."""
        self._closed = True
        for name in list(self._armed):
            self.disarm(name)
        if self._handle is not None:
            self._handle.cancel()

    def __contains__(self, name: str) -> bool:
        return name in self._armed

    def __iter__(self) -> Iterator[str]:
        return iter(self._armed)

    def _mark(self, timer: _Timer) -> None:
        timer.callback = None
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
            else:
                heappop(self._heap)
                self._go_off(timer, now_s)
        self._wakes_s = math.inf
        if self._heap:
            self._look_at(self._heap[0][0])

    def _go_off(self, timer: _Timer, now_s: float) -> None:
        """Or back into the heap, if it was put off."""
        if timer.due_s > now_s:
            timer.looks_s = timer.due_s
            self._serial += 1
            heappush(self._heap, (timer.due_s, self._serial, timer))
            return
        del self._armed[timer.name]
        callback, timer.callback = timer.callback, None
        assert callback is not None  # or it would be marked
        self._mailbox.do(timer.name, callback)
