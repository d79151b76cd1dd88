"""A supervised child over its lives: what is started, told, waited for and killed."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Awaitable, Callable
from unittest import mock

import pytest

from epd.config import Timing
from epd.fsm.child import (
    TABLE,
    Do,
    Ended,
    HurryRequested,
    KillDue,
    Launched,
    LaunchFailed,
    S,
    StartDue,
)
from epd.fsm.kernel import Event
from epd.runtime import supervisor
from epd.runtime.worker import EXIT_DRAINED
from epd.runtime.zygote import ZygoteLost
from tests.patience import PATIENCE_S
from tests.runtime.stage import SHORT_S, Played, Stage, of_endpoint, pauses
from tests.sim.mutants.planting import row

pytestmark = pytest.mark.usefixtures("swept")


async def test_who_ends_before_it_served_is_not_started_again() -> None:
    at = Stage()
    at.child.fire(StartDue())
    await at.until(S.STARTING, 1)
    at.made[0].say("failed", "there is no such model")
    at.made[0].end(2)
    await at.until(S.FAILED)
    assert at.child.ended.is_set() and not at.child.served.is_set()
    assert at.shown[-1] == "failed there is no such model" and at.child.starts == 1


async def test_who_says_nothing_before_it_ends_is_told_by_its_exit_status() -> None:
    at = Stage()
    at.child.fire(StartDue())
    await at.until(S.STARTING, 1)
    at.made[0].end(139)
    await at.until(S.FAILED)
    assert at.shown == ["starting", "failed ended with exit status 139"]


async def test_what_cannot_be_made_at_first_says_why() -> None:
    at = Stage()
    at.lost = ZygoteLost()
    at.child.fire(StartDue())
    await at.until(S.FAILED)
    assert "the process that forks workers ended" in at.child.detail


async def test_who_was_drained_by_an_operator_is_not_started_again() -> None:
    at = Stage()
    process = await at.serves()
    process.end(EXIT_DRAINED)
    await at.until(S.STOPPED)
    assert at.child.ended.is_set() and at.shown[-1] == "stopped" and at.child.starts == 1


def roles_of(process: Played) -> list[str]:
    """That it was started with."""
    said = process.stdin.write.call_args_list[0].args[0]
    roles: list[str] = json.loads(said)["instance"]["roles"]
    return roles


async def test_later_processes_have_the_roles_of_the_last_one_that_served() -> None:
    with pauses():
        at = Stage()
        at.child.spec = of_endpoint("ipc:///nowhere/e0.sock", Timing())
        first = await at.serves()
        first.say("roles", "prefill+decode")
        first.say("serving")
        first.end(1)
        await at.until(S.RESTARTING)
        second = await at.serves()
        second.end(1)
        third = await at.serves()
        assert [roles_of(one) for one in at.made] == [["encode"], *[["prefill", "decode"]] * 2]
        third.say("roles", "decode")
        third.end(75)
        await at.until(S.RESTARTING, 4)
        at.made[3].end(1)  # it could not load what they need
        await at.serves()
        assert [roles_of(one) for one in at.made[3:]] == [["decode"], ["prefill", "decode"]]


async def test_who_served_is_started_again_at_once() -> None:
    with pauses(first_s=60.0):
        at = Stage()
        for life in range(3):
            process = await at.serves()
            assert at.child.pid == process.pid == life + 1
            assert process.stdin.write.call_args_list[0].args[0].startswith(b'{"name":"e0"')
            process.end(1)
            await at.until(S.RESTARTING)
            process.stdin.close.assert_called_once()
        assert at.shown.count("restarting ended with exit status 1") == 3
        assert supervisor.sweep.call_count == 3
        await at.until(S.RESTARTING, 4)
        at.made[3].end(1)  # it served before, so this is no mistake in the configuration
        await at.until(S.PAUSED)
        await at.child.stop(hurried=False)
        assert at.child.machine.state is S.STOPPED and at.shown[-1] == "stopped"


async def test_what_fails_to_start_is_tried_again_after_pauses_that_grow() -> None:
    with pauses(), mock.patch.object(supervisor, "MAX_BACKOFF_S", 2.5 * SHORT_S):
        at = Stage()
        process = await at.serves()
        armed: list[float] = []
        arm = at.child._arm
        at.child._arm = lambda delay_s, event: (armed.append(delay_s), arm(delay_s, event))
        at.lost = OSError("no more processes")
        process.end(1)
        async with asyncio.timeout(PATIENCE_S):
            while at.shown.count("restarting no more processes") < 3:
                await asyncio.sleep(SHORT_S)
        pauses_s = [delay_s for delay_s in armed if delay_s != at.child._ask_s]
        assert pauses_s[:3] == [SHORT_S, 2 * SHORT_S, 2.5 * SHORT_S]
        await at.child.stop(hurried=False)


async def test_who_serves_and_dies_again_and_again_is_paused_until_a_life_is_long() -> None:
    with pauses():
        at = Stage()
        armed: list[float] = []
        arm = at.child._arm
        at.child._arm = lambda delay_s, event: (armed.append(delay_s), arm(delay_s, event))
        most = at.child.machine.patience.short_lives
        for _ in range(most):
            (await at.serves()).end(1)
            await at.until(S.RESTARTING)
        for n in range(2):
            (await at.serves()).end(1)
            await at.until(S.PAUSED, most + 1 + n)
            await at.until(S.RESTARTING, most + 2 + n)
        ends = [delay_s for delay_s in armed if delay_s != at.child._ask_s]
        assert ends == [4 * SHORT_S] * 2, "a pause does not grow while it serves in between"
        process = await at.serves()
        for _ in range(at.child.machine.patience.long_life):
            process.say("alive")
        async with asyncio.timeout(PATIENCE_S):
            while at.child.machine.num_short_lives:
                await asyncio.sleep(0)
        process.end(1)
        await at.until(S.RESTARTING)
        await at.child.stop(hurried=False)


# --- being stopped --------------------------------------------------------------------------------


async def test_who_is_stopped_drains_and_is_killed_if_it_does_not_end() -> None:
    with pauses(kill_s=SHORT_S):
        at = Stage()
        process = await at.serves()
        process.dies_of = ()
        stopping = asyncio.ensure_future(at.child.stop(hurried=False))
        await at.until(S.KILLING)
        async with asyncio.timeout(PATIENCE_S):
            while process.signals.count(signal.SIGKILL) < 2:
                await asyncio.sleep(SHORT_S)
        assert process.signals[:2] == [signal.SIGTERM, signal.SIGKILL] and not stopping.done()
        process.end(-9)
        await asyncio.wait_for(stopping, PATIENCE_S)
        assert at.child.machine.state is S.STOPPED and at.child._clock is not None
        assert at.child._clock.cancelled()


async def test_who_is_hurried_is_interrupted_once_it_was_asked_to_stop() -> None:
    at = Stage()
    process = await at.serves()
    at.child.fire(HurryRequested())
    assert not process.signals
    process.dies_of = (signal.SIGINT,)
    await at.child.stop(hurried=True)
    assert process.signals == [signal.SIGTERM, signal.SIGINT]


async def test_whose_process_is_still_being_made_is_told_when_it_is() -> None:
    at = Stage()
    at.may_launch.clear()
    at.child.fire(StartDue())
    await at.child.stop(hurried=False)
    assert at.child.machine.state is S.STOPPING, "nobody waits for it"
    at.may_launch.set()
    await asyncio.wait_for(at.child.over(), PATIENCE_S)
    assert at.made[0].signals == [signal.SIGTERM] and at.child.machine.state is S.STOPPED


async def test_what_is_not_made_any_more_is_stopped() -> None:
    at = Stage()
    at.may_launch.clear()
    at.child.fire(StartDue())
    await at.child.stop(hurried=False)
    at.lost = ZygoteLost()
    at.may_launch.set()
    await asyncio.wait_for(at.child.over(), PATIENCE_S)
    assert at.child.machine.state is S.STOPPED and not at.made


Story = Callable[[], Awaitable[None]]
MUTANTS: dict[str, tuple[tuple[S, type[Event], S, tuple[Do, ...]], Story]] = {
    "who served fails for good": (
        (S.SERVING, Ended, S.FAILED, (Do.TELL_FAILED,)),
        test_who_served_is_started_again_at_once,
    ),
    "who served is started again after a pause": (
        (S.SERVING, Ended, S.PAUSED, (Do.ARM_PAUSE,)),
        test_who_served_is_started_again_at_once,
    ),
    "what fails to start is started at once": (
        (S.RESTARTING, LaunchFailed, S.RESTARTING, (Do.LAUNCH,)),
        test_what_fails_to_start_is_tried_again_after_pauses_that_grow,
    ),
    "who is to end is not told when it is made": (
        (S.STOPPING, Launched, S.STOPPING, ()),
        test_whose_process_is_still_being_made_is_told_when_it_is,
    ),
    "who does not drain is not killed": (
        (S.STOPPING, KillDue, S.STOPPING, (Do.ARM_KILL,)),
        test_who_is_stopped_drains_and_is_killed_if_it_does_not_end,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
async def test_a_bug_put_back_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cell, story = MUTANTS[name]
    for module in ("stage", "test_child"):
        monkeypatch.setattr(f"tests.runtime.{module}.PATIENCE_S", 0.3)
    with row(TABLE, *cell), pytest.raises((AssertionError, TimeoutError)):
        await story()
