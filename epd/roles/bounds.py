"""Several bounds of one thing behind one named timer, for those that are put off again and again.

A stream that goes well puts off the same two bounds with each of its tokens.  Here that is an
assignment: the timer looks at the earliest bound there was, finds it put off, and looks again when
the earliest there is may be due.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from epd.roles.base import Actor


class Bounds:
    """Of one machine; `close` when it has ended."""

    __slots__ = ("_actor", "_bounds", "_looks_s", "_name")

    def __init__(self, actor: Actor, name: str) -> None:
        self._actor = actor
        self._name = name
        self._bounds: dict[str, tuple[float, Callable[[], None]]] = {}
        self._looks_s = math.inf

    def __contains__(self, what: str) -> bool:
        return what in self._bounds

    def put(self, what: str, delay_s: float, callback: Callable[[], None]) -> None:
        """From now on the bound `what` is so far away; it is called once, then it is none."""
        due_s = self._actor.clock.now_s() + delay_s
        self._bounds[what] = (due_s, callback)
        if due_s < self._looks_s:
            self._look_at(due_s)

    def close(self) -> None:
        self._bounds.clear()
        self._actor.disarm(self._name)

    def _look_at(self, due_s: float) -> None:
        self._looks_s = due_s
        self._actor.arm(self._name, due_s - self._actor.clock.now_s(), self._look)

    def _look(self) -> None:
        """Whoever is called may put bounds, and close them all; who raises takes none along."""
        self._looks_s, now_s = math.inf, self._actor.clock.now_s()
        try:
            for what, bound in list(self._bounds.items()):
                if bound[0] <= now_s and self._bounds.get(what) is bound:
                    del self._bounds[what]
                    bound[1]()
        finally:
            earliest_s = min((due_s for due_s, _ in self._bounds.values()), default=math.inf)
            if earliest_s < self._looks_s:
                self._look_at(earliest_s)
