"""Bugs of health by progress put back: waits, self-tests, and what follows from them (F87)."""

from __future__ import annotations

import asyncio
from typing import Any

from epd.fsm.instance import Instance, S
from epd.messages import SelfTestResult
from epd.observed import Wait
from epd.roles import progress
from epd.roles.base import Actor
from epd.roles.health import Health
from epd.roles.progress import WorkPatience, Works
from epd_lab.sim.engine.device import SimDevice
from tests.sim.mutants.planting import Planted, mutant, patched


@mutant
def a_beat_is_progress() -> Planted:
    """F87: what the event loop does counts as progress of the device."""
    wait = Works.wait

    def looked_at(self: Works, *asked: Any) -> Wait | None:
        told = wait(self, *asked)
        self.moved_s = self._now_s()
        return told

    return patched(Works, "wait", looked_at)


@mutant
def the_stuck_get_work() -> Planted:
    """F87: health says that all is well, and work is placed on a dead engine (vLLM 36451)."""
    return patched(
        Instance, "takes_work", property(lambda self: self.state in (S.HEALTHY, S.STUCK))
    )


@mutant
def the_stuck_live_on() -> Planted:
    """F87: nobody ends a process whose device never answers again."""
    return patched(Health, "_is_over", lambda self, wait: False)


@mutant
def a_self_test_without_the_device() -> Planted:
    """F87: the self-test passes on the event loop."""

    def passes(self: SimDevice) -> asyncio.Future[None]:
        done: asyncio.Future[None] = self._loop.create_future()
        done.set_result(None)
        return done

    return patched(SimDevice, "probe", passes)


@mutant
def a_self_test_is_not_answered() -> Planted:
    """F87: who was stuck for a moment never gets work again."""
    send = Actor.send

    def but_results(self: Actor, to: Any, message: Any, *more: Any) -> bool:
        return True if type(message) is SelfTestResult else send(self, to, message, *more)

    return patched(Actor, "send", but_results)


def _blind(*whats: str) -> Planted:
    wait = Works.wait

    def but(self: Works, *asked: Any) -> Wait | None:
        return None if self._what in whats else wait(self, *asked)

    return patched(Works, "wait", but)


@mutant
def turns_are_not_looked_at() -> Planted:
    """F87: a step loop that is woken and takes no turn is seen by nobody."""
    return _blind("turn of the step loop", "step")


@mutant
def writes_are_not_looked_at() -> Planted:
    """F87: the thread that copies stands still, and work is placed there on and on."""
    return _blind("write")


@mutant
def all_have_one_bound() -> Planted:
    """F87: long steps are taken for a wedge, whatever such steps were measured to take."""
    return patched(progress, "STALL", 0.0)


@mutant
def the_unmeasured_are_stuck() -> Planted:
    """F87: a first step, which compiles, is taken for a wedge."""

    def impatient(work_s: float, write_s: float, unmeasured_s: float) -> WorkPatience:
        return WorkPatience(work_s, write_s, 0.0)

    from epd.roles import health

    return patched(health, "WorkPatience", impatient)
