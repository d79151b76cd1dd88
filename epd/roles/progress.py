"""What an instance waits for: works under way, since when, and how long each may take (fault F87).

Theory of operation
-------------------
A heart beats on the event loop, so it goes on when a thread of the device stands still.  So works
are counted where they are asked for: one begins when it is handed to a device or a transport, and
ends when its outcome arrives from there.  Nothing else is progress, above all no heartbeat.

Works of one *lane* share a device or the links.  One that ends shows that its lane moves, so those
of other kinds, which wait behind it, are not held against it: until a client would wait no longer.
What a lane may take is its patience, and STALL times the measured cost of all that is under way
there.  A work that was never measured (a first step, which compiles) may take as long as a client
waits for a first token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator
from itertools import chain
from typing import NamedTuple

from epd.observed import Wait
from epd.records import Address
from epd.scheduling.step_cost import STALL


class WorkPatience(NamedTuple):
    """Seconds, besides measured costs."""

    work_s: float
    write_s: float  # longer: until it is known whether the peer answers
    unmeasured_s: float


class WorkLane:
    """A device, or the links: works of several kinds."""

    def __init__(self) -> None:
        self.moved_s = 0.0  # one of any kind has ended
        self.kinds: tuple[Works, ...] = ()

    def works(self) -> Iterator[Work]:
        """All that is under way."""
        return chain.from_iterable(self.kinds)


class Work(NamedTuple):
    serial: int
    began_s: float
    expected_s: float | None  # None: it was never measured
    peer: Address | None  # that must do its part


class Works:
    """Works of one kind."""

    def __init__(
        self, what: str, lane: WorkLane, now_s: Callable[[], float], *, is_work: bool = True
    ) -> None:
        """`is_work`: others wait behind it; not so behind a self-test, which is behind them."""
        self._what = what
        self._lane = lane
        self._now_s = now_s
        self._works: dict[int, Work] = {}
        self._serial = 0
        self.moved_s = 0.0  # one has ended
        self._is_work = is_work
        self._mark = 0
        lane.kinds += (self,)

    def __len__(self) -> int:
        return len(self._works)

    def __iter__(self) -> Iterator[Work]:
        return iter(self._works.values())

    def begin(self, expected_s: float | None, peer: Address | None = None) -> Work:
        """Handed over, until `end`."""
        self._serial += 1
        work = Work(self._serial, self._now_s(), expected_s, peer)
        self._works[work.serial] = work
        return work

    def end(self, work: Work) -> None:
        """Its outcome is here, from where the work was done."""
        del self._works[work.serial]
        self.moved_s = self._now_s()
        if self._is_work:
            self._lane.moved_s = self.moved_s

    @contextlib.contextmanager
    def work(self, expected_s: float | None, peer: Address | None = None) -> Iterator[Work]:
        """For as long as its outcome is waited for."""
        work = self.begin(expected_s, peer)
        try:
            yield work
        finally:
            self.end(work)

    def look(self, mark: int, *, is_due: bool) -> None:
        """At what is not handed over: whether it is due, and a mark that changes when it moves."""
        if not is_due or mark != self._mark:
            self._works.clear()
        if is_due and not self._works:
            self.begin(0.0)
        self._mark = mark

    def late_peers(self, patience_s: float) -> list[Address]:
        """Whom works wait for that are under way for longer."""
        since_s = self._now_s() - patience_s
        late = (work.peer for work in self._works.values() if work.began_s < since_s)
        return [peer for peer in late if peer is not None]

    def wait(self, patience: WorkPatience, silent: Container[str] = ()) -> Wait | None:
        """None: it waits for nothing.  What `silent` peers hold up is not its own."""
        works = [
            work
            for work in self._works.values()
            if work.peer is None or work.peer.instance_id not in silent
        ]
        if not works:
            return None
        since_s = max(min(work.began_s for work in works), self.moved_s)
        shared = list(self._lane.works())
        most_s = STALL * sum(work.expected_s or 0.0 for work in shared)
        most_s += patience.write_s if works[0].peer is not None else patience.work_s
        if any(work.expected_s is None for work in shared):
            most_s += patience.unmeasured_s
        moved_s = min(max(0.0, self._lane.moved_s - since_s), patience.unmeasured_s)
        for_s = self._now_s() - since_s
        return Wait(what=self._what, for_s=for_s, bound_s=moved_s + most_s)


class InstanceProgress:
    """Of one instance."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        device, links, loop = WorkLane(), WorkLane(), WorkLane()
        self.device = device
        self.steps = Works("step", device, now_s)
        self.batches = Works("vision batch", device, now_s)
        self.tests = Works("self-test", device, now_s, is_work=False)
        self.writes = Works("write", links, now_s)
        self.turns = Works("turn of the step loop", loop, now_s)
        self._all = (self.steps, self.batches, self.tests, self.writes, self.turns)

    def waits(self, patience: WorkPatience, silent: Container[str]) -> tuple[Wait, ...]:
        waits = (watch.wait(patience, silent) for watch in self._all)
        return tuple(wait for wait in waits if wait is not None)
