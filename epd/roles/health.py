"""The health of an instance: what it waits for, its self-test, and the end of a life that is stuck.

The gateway gets the waits with each heartbeat, and places nothing where one is beyond its bound
(INSTANCE).  A device that nobody asks anything is tested now and then, so that who stands still is
found before a request is.  A wait that is ENDS times its bound, and longer than a stream may stand
still, ends the process: its supervisor starts another life.  A device that is asked for work by
nobody but the transport (KV that lands) is tested, too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Never, Protocol

from epd.config import Timing
from epd.messages import SelfTest, SelfTestResult
from epd.observed import Wait
from epd.roles.base import Actor, Component, receives
from epd.roles.links import Links
from epd.roles.progress import Work, WorkPatience
from epd.transport.base import Received

PATIENCE = 2.0  # times `suspect_after_s`
ENDS = 5.0

Probe = Callable[[], Awaitable[object]]


class LoopTurns(Protocol):
    """Of a step loop."""

    is_awake: bool  # one is to come
    num_turns: int


class Health(Component[Never]):
    """`probe`: a small work of the device, done when it returns; raises EngineError."""

    def __init__(self, actor: Actor, timing: Timing, probe: Probe, links: Links) -> None:
        super().__init__(actor)
        self._progress = actor.progress
        self._timing = timing
        self.probe = probe
        self._links = links
        self.turns: LoopTurns | None = None
        work_s = PATIENCE * timing.suspect_after_s
        write_s = work_s + 2 * timing.link_timeout_s
        self._patience = WorkPatience(work_s, write_s, timing.first_token_timeout_s)
        self._asked: tuple[str, int] | None = None  # who waits for a self-test, and its number

    def start(self) -> None:
        self._look()

    def waits(self) -> tuple[Wait, ...]:
        return self._progress.waits(self._patience, self._links.silent())

    def _look(self) -> None:
        progress, turns = self._progress, self.turns
        if turns is not None:
            progress.turns.look(turns.num_turns, is_due=turns.is_awake)
        for peer in progress.writes.late_peers(self._patience.work_s):
            self.actor.doubt(peer)
        if over := next((wait for wait in self.waits() if self._is_over(wait)), None):
            self._end(over)
            return
        moved_s = max(progress.device.moved_s, progress.tests.moved_s)
        if self.clock.now_s() - moved_s > self._timing.lost_after_s:
            self._test()
        self.actor.timers.call_later(self._timing.heartbeat_interval_s, self._look)

    def _is_over(self, wait: Wait) -> bool:
        return wait.for_s > max(ENDS * wait.bound_s, self._timing.stall_timeout_s)

    def _end(self, wait: Wait) -> None:
        reason = f"no progress: {wait.what} for {wait.for_s:.1f} s (bound {wait.bound_s:.1f} s)"
        self.actor.counters["device_hangs"] += 1
        self.actor.mailbox.post("no progress", self.actor.on_device_lost, reason)

    # --- the self-test ----------------------------------------------------------------------------

    @receives(SelfTest)
    def on_self_test(self, received: Received) -> None:
        self._asked = received.source, received.message.serial
        self._test()

    def _test(self) -> None:
        """One at a time; who asks meanwhile gets its outcome."""
        if not self._progress.tests:
            self.actor.spawn("self-test", self._run(self._progress.tests.begin(0.0)), self._tested)

    async def _run(self, work: Work) -> str:
        try:
            await self.probe()
        except Exception as error:
            self.actor.fault("self-test", error)
            return str(error) or repr(error)
        finally:
            self._progress.tests.end(work)
        return ""

    def _tested(self, reason: str) -> None:
        if self._asked is not None:
            (source, serial), self._asked = self._asked, None
            self.actor.send(source, SelfTestResult(serial=serial, reason=reason))
