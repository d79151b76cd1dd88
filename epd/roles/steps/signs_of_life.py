"""Open requests are reported to the gateway now and then: silence means that a message was lost.

A request in a queue sends nothing for as long as it waits, and the gateway must not take it for
lost. The first report is not immediate, because the first token usually makes it unnecessary. One
timer checks all requests.
"""

from __future__ import annotations

from collections.abc import Callable

from epd.config import Timing
from epd.roles.base import Actor


class SignsOfLife:
    """Of the requests of an instance; `tell` is called with the key of who may have been silent."""

    def __init__(self, actor: Actor, timing: Timing, tell: Callable[[str], None]) -> None:
        self._actor = actor
        self._tell = tell
        self._every_s = min(timing.stall_timeout_s, timing.token_timeout_s) / 3
        self._look_s = min(timing.accept_timeout_s / 4, self._every_s)
        self._due_s: dict[str, float] = {}

    def opened(self, key: str) -> None:
        """For the first time within two looks, which is half of what the gateway waits."""
        self._due_s[key] = self._actor.clock.now_s() + self._look_s
        if not self._actor.timers.will_call(self._look):
            self._actor.timers.call_later(self._look_s, self._look)

    def closed(self, key: str) -> None:
        self._due_s.pop(key, None)
        if not self._due_s:
            self._actor.timers.cancel_call(self._look)

    def _look(self) -> None:
        """The next look comes whatever this one raises."""
        self._actor.timers.call_later(self._look_s, self._look)
        now_s = self._actor.clock.now_s()
        for key, due_s in list(self._due_s.items()):
            if due_s <= now_s:
                self._due_s[key] = now_s + self._every_s
                self._tell(key)
