"""A child that hangs, or is cut off: who is killed and replaced, and who is left alone."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from unittest import mock

import pytest

from epd.config import Timing
from epd.fsm.child import TABLE, AskDue, DeclaredLost, Do, S, StartDue
from epd.fsm.kernel import Event
from epd.runtime import supervisor
from epd.runtime.child import ChildSpec
from tests.patience import PATIENCE_S
from tests.runtime.stage import SHORT_S, Played, Stage
from tests.sim.mutants.planting import row

pytestmark = pytest.mark.usefixtures("swept")


async def falls_silent(at: Stage) -> Played:
    """It has been asked as often as one who serves may leave unanswered."""
    process = await at.serves()
    for _ in range(1 + at.child.machine.patience.silent):
        at.child.fire(AskDue())
    assert at.child.machine.state is S.SILENT
    assert process.stdin.write.call_args.args[0] == b"\n"
    return process


async def test_who_neither_answers_its_gateway_nor_us_is_killed_and_replaced() -> None:
    """Fault F79: lost alone is a cut, silent alone is a busy machine."""
    at = Stage()
    process = await falls_silent(at)
    at.child.fire(DeclaredLost())
    assert at.child.machine.state is S.REPLACING and process.signals == [signal.SIGKILL]
    await at.until(S.RESTARTING, 2)
    assert "hung killed, to be started again" in at.shown
    await at.serves()
    await at.child.stop(hurried=False)


async def test_who_answers_is_left_alone_whatever_its_gateway_says() -> None:
    at = Stage()
    process = await at.serves()
    at.child.fire(DeclaredLost())
    for _ in range(3 * at.child.machine.patience.hung):
        at.child.fire(AskDue())
        process.say("alive")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert at.child.machine.state is S.CUT_OFF and not process.signals
    for _ in range(1 + at.child.machine.patience.silent):
        at.child.fire(AskDue())
    assert at.child.machine.state is S.REPLACING and process.signals == [signal.SIGKILL]
    await at.child.stop(hurried=False)


async def test_who_is_silent_for_long_needs_no_word_of_a_gateway() -> None:
    """The gateway itself, or an instance whose gateway runs elsewhere."""
    at = Stage()
    process = await falls_silent(at)
    process.print(b"a library, not the loop\n")
    await asyncio.sleep(SHORT_S)
    assert at.child.machine.state is S.SILENT
    process.say("alive")
    await at.until(S.SERVING)
    assert at.shown[-1] == "serving" and not process.signals
    for _ in range(1 + at.child.machine.patience.hung):
        at.child.fire(AskDue())
    assert at.child.machine.state is S.REPLACING and process.signals == [signal.SIGKILL]
    await at.child.stop(hurried=False)


async def test_who_loads_has_long_to_answer() -> None:
    at = Stage()
    at.child.fire(StartDue())
    await at.until(S.STARTING, 1)
    for _ in range(2 * at.child.machine.patience.hung):
        at.child.fire(AskDue())
    assert at.child.machine.state is S.STARTING
    for _ in range(at.child.machine.patience.stuck):
        at.child.fire(AskDue())
    assert at.made[0].signals == [signal.SIGKILL]
    await at.child.stop(hurried=False)


async def test_questions_are_counted_not_seconds() -> None:
    """A supervisor that stood still has asked once meanwhile, and hears the answer first."""
    at = Stage(Timing(suspect_after_s=4 * SHORT_S, drain_timeout_s=0.0))
    await at.serves()
    time.sleep(20 * SHORT_S)
    at.made[0].say("alive")
    for _ in range(5):
        await asyncio.sleep(0)
    assert at.child.machine.state is S.SERVING and at.child.machine.num_unanswered <= 1
    async with asyncio.timeout(PATIENCE_S):
        while at.child.machine.state is not S.SILENT:
            await asyncio.sleep(SHORT_S)
    await at.child.stop(hurried=False)


def test_the_bounds_follow_from_the_settings() -> None:
    timing = Timing()
    patience = supervisor._patience(timing, timing.suspect_after_s / 4)
    asks_per_s = 4 / timing.suspect_after_s
    assert patience.silent / asks_per_s == timing.suspect_after_s < timing.lost_after_s
    assert patience.hung / asks_per_s == 2 * timing.lost_after_s < 15.0
    assert patience.stuck / asks_per_s == supervisor.STUCK_AFTER_S


async def test_only_the_process_that_a_gateway_names_is_lost() -> None:
    """By its id, so that a late word does not meet its successor; and by a gateway's word alone."""
    specs = [ChildSpec("g", gateway=mock.Mock(timing=Timing())), ChildSpec("e0"), ChildSpec("e1")]
    with mock.patch.object(supervisor.Supervisor, "_launch"):
        cluster = supervisor.Supervisor(specs, lambda child: None)
    gateway, e0, e1 = cluster.children.values()
    for number, child in enumerate((gateway, e0, e1), 1):
        child.pid = number
        child.machine._state = S.SERVING
    e1._take(b'{"state":"lost","detail":"2"}')
    gateway._take(b'{"state":"lost","detail":"0"}')
    gateway._take(b'{"state":"lost","detail":"three"}')
    assert [c.machine.state for c in cluster.children.values()] == [S.SERVING] * 3
    gateway._take(b'{"state":"lost","detail":"2"}')
    assert (e0.machine.state, e1.machine.state) == (S.CUT_OFF, S.SERVING)
    for child in (gateway, e0, e1):
        child._disarm()


Story = Callable[[], Awaitable[None]]
MUTANTS: dict[str, tuple[tuple[S, type[Event], S, tuple[Do, ...]], Story]] = {
    "F79: who hangs is left alone": (
        (S.SILENT, DeclaredLost, S.CUT_OFF, ()),
        test_who_neither_answers_its_gateway_nor_us_is_killed_and_replaced,
    ),
    "F79: who is cut off is killed": (
        (S.SERVING, DeclaredLost, S.REPLACING, (Do.SEND_KILL, Do.ARM_GONE)),
        test_who_answers_is_left_alone_whatever_its_gateway_says,
    ),
    "F79: a gateway that hangs is waited for": (
        (S.SILENT, AskDue, S.SILENT, (Do.ASK,)),
        test_who_is_silent_for_long_needs_no_word_of_a_gateway,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
async def test_a_bug_put_back_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cell, story = MUTANTS[name]
    for module in ("stage", "test_child_hangs"):
        monkeypatch.setattr(f"tests.runtime.{module}.PATIENCE_S", 0.3)
    with row(TABLE, *cell), pytest.raises((AssertionError, TimeoutError)):
        await story()
