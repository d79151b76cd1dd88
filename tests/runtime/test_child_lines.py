"""What a child prints and what is shown of it: neither ends anything, nor is waited for."""

from __future__ import annotations

import asyncio
import signal
from unittest import mock

import pytest

from epd.fsm.child import S, StartDue
from epd.runtime import lines, supervisor
from tests.patience import PATIENCE_S
from tests.runtime.stage import SHORT_S, Stage, pauses

pytestmark = pytest.mark.usefixtures("swept")


async def test_nothing_that_is_shown_keeps_an_effect_from_being_performed() -> None:
    """Fault F69: it was shown before it was armed, and who could not be shown was not restarted."""
    at = Stage()
    at.child._changed = mock.Mock(side_effect=BrokenPipeError)
    for _ in range(3):
        (await at.serves()).end(1)
        await at.until(S.RESTARTING)
    await at.until(S.RESTARTING, 4)
    at.made[-1].end(1)
    await at.until(S.PAUSED)
    await at.child.stop(hurried=False)
    assert at.child.machine.state is S.STOPPED


async def test_one_effect_that_fails_skips_no_other() -> None:
    at = Stage()
    at.child.fire(StartDue())
    await at.until(S.STARTING, 1)
    at.made[0].send_signal = mock.Mock(side_effect=OSError)
    with pauses(kill_s=SHORT_S):
        stopping = asyncio.ensure_future(at.child.stop(hurried=False))
        await at.until(S.KILLING)
        at.made[0].end(-9)
        await asyncio.wait_for(stopping, PATIENCE_S)


async def test_garbage_is_passed_on_and_ends_nobody(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    """Lines longer than any buffer, without an end, and what only resembles a status."""
    at = Stage()
    process = await at.serves()
    long = b"x" * (5 << 16)
    for garbage in (b"\xff\xfe\n", b'{"state":7}\n', b"[1]\n{}\n", long + b"\n", b"no end"):
        process.print(garbage)
    process.say("alive")
    process.say("draining")
    async with asyncio.timeout(PATIENCE_S):
        while "draining" not in at.shown:
            await asyncio.sleep(SHORT_S)
    assert at.child.machine.state is S.SERVING and not process.signals
    lines.flush(PATIENCE_S)
    assert b'"state":7}\n[1]\n{}\n' in (printed := capfdbinary.readouterr().err)
    assert printed.count(b"x") == len(long)
    await at.child.stop(hurried=False)


async def test_who_closes_its_stdout_serves_on_until_it_ends() -> None:
    at = Stage()
    process = await at.serves()
    assert process.stdout is not None
    process.stdout.feed_eof()
    await asyncio.sleep(SHORT_S)
    assert at.child.machine.state is S.SERVING
    process._ended.set_result(3)
    await at.until(S.RESTARTING, 2)
    await at.child.stop(hurried=False)


async def test_who_ends_is_followed_though_another_holds_its_stdout() -> None:
    with mock.patch.object(supervisor, "LAST_WORDS_S", SHORT_S):
        at = Stage()
        process = await at.serves()
        process._ended.set_result(3)
        await at.until(S.RESTARTING, 2)
        await at.child.stop(hurried=False)


async def test_a_fault_in_following_a_child_is_its_end() -> None:
    at = Stage()
    process = await at.serves()
    at.child._tell_lost = mock.Mock(side_effect=RuntimeError("of ours"))
    process.say("lost", "1")
    await at.until(S.RESTARTING, 2)
    assert process.signals == [signal.SIGKILL]
    at.made[1].send_signal(signal.SIGKILL)
    await at.until(S.PAUSED)
    at.lost = RuntimeError("of the launch")
    await at.until(S.RESTARTING)
    await at.until(S.PAUSED)
    assert at.shown[-1] == "restarting of the launch"
    await at.child.stop(hurried=False)
