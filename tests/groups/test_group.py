"""A leader and its followers over channels and engines that a test plays: GROUP in use."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from epd.config import Timing
from epd.engine.base import (
    DeviceLost,
    EncodeFailure,
    EngineError,
    Patches,
    StepResult,
    StepSequence,
)
from epd.fsm.group import CommandExecuted, RankBeat, RankEnded, RankJoined, S
from epd.fsm.kernel import NULL_JOURNAL
from epd.groups.asks import RankLost
from epd.groups.engines import Encoded, GroupLanguageEngine, GroupVisionEngine
from epd.groups.leader import Batch, Command, Encode, GoOn, Leader, Probe, Step
from epd.roles.compose import Engines
from epd.runtime.system import SystemClock
from epd_lab.bench.gateway.null_engine import NullLanguage, NullVision
from tests.patience import PATIENCE_S
from tests.roles.test_timers import ManualClock

TIMING = Timing()
IMAGES = [Patches(None, (1, 4, 4), 16, 4)]
FAILED = EncodeFailure("not finite")
ALONE: Any = None  # the other ranks are asked nothing
BATCH = [StepSequence("r/1", [1, 2], 0, [0], None)]


class Played:
    """The ports `Ranks` and a leader's own engine: steps end when a test says so."""

    def __init__(self, size: int = 3, **timing: float) -> None:
        self.sent: list[tuple[int, Command]] = []
        self.ended = False
        self.killed = False
        self.own: list[asyncio.Future[StepResult]] = []
        self.leader = Leader(
            "pd0",
            size,
            self,
            SystemClock(),
            msgspec.structs.replace(TIMING, **timing),
            NULL_JOURNAL,
        )
        self.engine = GroupLanguageEngine(NullLanguage(), self.run, self.leader, ALONE)

    def send(self, number: int, command: Command) -> None:
        self.sent.append((number, command))

    def end(self) -> None:
        self.ended = True

    def kill(self) -> None:
        self.killed = True

    def run(self, batch: Batch, on_layers: object) -> asyncio.Future[StepResult]:
        self.own.append(asyncio.get_running_loop().create_future())
        return self.own[-1]

    def joined(self) -> Played:
        for rank in sorted(self.leader.machine.others):
            self.leader.fire(RankJoined(rank))
        return self

    def step(self) -> asyncio.Future[StepResult]:
        return asyncio.ensure_future(self.engine.step(BATCH))

    def answer(self, number: int, *ranks: int, failed: bool = False) -> None:
        for rank in ranks:
            self.leader.fire(CommandExecuted(rank, number, failed))

    @property
    def state(self) -> object:
        return self.leader.machine.state


async def settled() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_it_is_ready_when_all_ranks_have_joined() -> None:
    group = Played()
    group.leader.fire(RankJoined(2))
    assert group.state is S.FORMING and not group.leader.ready.done()
    with pytest.raises(EngineError, match="takes no commands"):
        group.engine.step(BATCH)
    group.leader.fire(RankJoined(1))
    assert group.state is S.READY and group.leader.ready.done()


async def test_who_asks_a_group_that_was_lost_is_told_so() -> None:
    group = Played().joined()
    group.leader.fire(RankEnded(1, "killed"))
    with pytest.raises(RankLost, match="the group was lost: rank 1: killed"):
        group.engine.step(BATCH)


async def test_a_step_is_over_when_every_rank_has_executed_it() -> None:
    group = Played().joined()
    step = group.step()
    assert group.sent == [(1, Step(BATCH))]
    group.answer(1, 2)
    group.own[0].set_result(StepResult([None], 0.5))
    await settled()
    assert not step.done() and group.state is S.STEPPING
    group.answer(1, 1)
    assert (await step).elapsed_s == 0.5
    assert group.state is S.READY


async def test_a_second_step_is_given_before_the_first_is_over() -> None:
    group = Played().joined()
    first, second = group.step(), group.step()
    assert [number for number, _ in group.sent] == [1, 2]
    for own in group.own:
        own.set_result(StepResult([None]))
    group.answer(1, 1)
    group.answer(2, 1)
    group.answer(1, 2)
    await settled()
    assert first.done() and not second.done()
    group.answer(2, 2)
    await settled()
    assert second.done() and group.state is S.READY


async def test_what_fails_on_every_rank_alike_is_a_failed_step() -> None:
    group = Played().joined()
    step = group.step()
    group.answer(1, 1, 2, failed=True)
    group.own[0].set_exception(EngineError("out of memory"))
    with pytest.raises(EngineError, match="out of memory"):
        await step
    assert group.state is S.READY and not group.leader.lost.done()


@pytest.mark.parametrize("failed", [True, False])
async def test_ranks_that_disagree_are_no_group(failed: bool) -> None:
    group = Played().joined()
    group.step()
    group.answer(1, 1, failed=not failed)
    group.answer(1, 2, failed=failed)
    assert "rank 2" in await group.leader.lost
    assert group.state is S.LOST and group.killed


@pytest.mark.parametrize("number", [0, 2, 7])
async def test_a_rank_that_answers_what_it_was_not_asked_is_out_of_step(number: int) -> None:
    group = Played().joined()
    group.step()
    group.answer(number, 1)
    assert group.state is S.LOST and group.killed


async def test_a_leader_whose_device_is_lost_waits_for_no_clock() -> None:
    """The others are in a collective with it, also of what was given before."""
    group = Played().joined()
    for _ in range(2):
        group.step()
    group.own[1].set_exception(DeviceLost("an illegal memory access"))
    assert await group.leader.lost == "rank 0: an illegal memory access"
    assert group.killed


async def test_a_rank_that_leaves_a_command_out_is_out_of_step() -> None:
    group = Played().joined()
    for _ in range(2):
        group.step()
    group.answer(2, 1)
    assert group.state is S.LOST and group.killed


async def test_an_answer_to_no_command_ends_the_group() -> None:
    group = Played().joined()
    group.answer(1, 1)
    assert group.state is S.LOST


@pytest.mark.parametrize("steps", [0, 1, 2])
async def test_a_rank_that_ends_takes_the_group_along(steps: int) -> None:
    group = Played().joined()
    for _ in range(steps):
        group.step()
    group.leader.fire(RankEnded(2, "its process has ended"))
    assert await group.leader.lost == "rank 2: its process has ended"
    assert group.killed
    with pytest.raises(EngineError, match="its process has ended"):
        group.engine.step(BATCH)


async def test_a_rank_that_does_not_join_is_not_waited_for() -> None:
    group = Played(group_join_timeout_s=0.01)
    group.leader.fire(RankJoined(1))
    async with asyncio.timeout(PATIENCE_S):
        assert await group.leader.lost == "rank 2 has not joined in time"


async def test_a_rank_that_is_silent_ends_the_group() -> None:
    group = Played(group_step_timeout_s=0.01).joined()
    group.step()
    group.own[0].set_result(StepResult([None]))
    group.answer(1, 2)
    async with asyncio.timeout(PATIENCE_S):
        assert await group.leader.lost == "rank 1 has not executed command 1 in time"


async def test_each_command_is_waited_for_since_it_was_given() -> None:
    """However many are given behind it."""
    group, clock = Played(group_step_timeout_s=10.0).joined(), ManualClock()
    group.leader._clock = clock
    for given_s in (0.0, 6.0, 9.0):
        clock.run_until(given_s)
        group.step()
    group.own[0].set_result(StepResult([None]))
    group.answer(1, 1, 2)
    await settled()
    clock.run_until(15.9)
    assert group.state is S.STEPPING
    clock.run_until(16.1)
    assert group.state is S.LOST
    assert await group.leader.lost == "ranks 0, 1, 2 have not executed command 2 in time"


async def test_a_rank_that_hangs_is_found_while_nothing_is_asked() -> None:
    group = Played(lost_after_s=0.01, group_step_timeout_s=0.01).joined()
    async with asyncio.timeout(PATIENCE_S):
        assert await group.leader.lost == "ranks 1, 2 have not executed command 1 in time"
    assert group.sent == [(1, Probe())]


async def test_a_rank_that_stands_still_is_found_before_its_instance_would_be() -> None:
    """Whatever its command may take."""
    group, clock = Played(lost_after_s=5.0, heartbeat_interval_s=0.5), ManualClock()
    group.leader._clock = clock
    group.joined().step()
    for beat in range(1, 21):
        clock.run_until(0.5 * beat)
        group.leader.fire(RankBeat(2))
        if beat <= 10:
            group.leader.fire(RankBeat(1))
        assert (group.state is S.LOST) is (beat >= 18)
    assert await group.leader.lost == "rank 1 has sent no sign of life"


async def test_a_leader_that_stood_still_has_not_listened() -> None:
    group, clock = Played(lost_after_s=5.0, heartbeat_interval_s=0.5), ManualClock()
    group.leader._clock = clock
    group.joined().step()
    clock.at_s = 12.0
    clock.run_until(15.9)
    assert group.state is S.STEPPING
    clock.run_until(16.0)
    assert await group.leader.lost == "ranks 1, 2 have sent no sign of life"


async def test_it_is_closed_when_no_rank_is_left() -> None:
    group = Played().joined()
    closing = asyncio.ensure_future(group.leader.close())
    await settled()
    assert group.ended and not closing.done()
    group.leader.fire(RankEnded(1, "its process has ended"))
    group.leader.fire(RankEnded(2, "its process has ended"))
    await closing
    assert group.state is S.CLOSED and not group.leader.lost.done()


async def test_a_step_that_cannot_begin_is_told_to_nobody() -> None:
    group = Played().joined()

    def refuse(batch: Batch, on_layers: object) -> asyncio.Future[StepResult]:
        raise EngineError("1024 calls waiting")

    engine = GroupLanguageEngine(NullLanguage(), refuse, group.leader, ALONE)
    with pytest.raises(EngineError, match="calls waiting"):
        engine.step(BATCH)
    assert not group.sent and group.state is S.READY


async def test_a_batch_of_images_is_over_when_every_rank_has_executed_it() -> None:
    """A step may be given behind it; what one rank alone fails in ends the group."""
    group = Played(size=2).joined()
    engine, share = towers(group, num_turns=0)
    encoded = asyncio.ensure_future(engine.encode(IMAGES))
    await settled()
    step = group.step()
    assert group.sent == [(1, Encode(IMAGES)), (2, Step(BATCH))]
    share.given[0].set_result([FAILED])
    await settled()
    assert not encoded.done()
    group.answer(1, 1)
    assert await encoded == [FAILED]
    group.answer(2, 1, failed=True)
    group.own[0].set_result(StepResult([None]))
    await settled()
    assert not step.done() and "rank 0 executed command 2" in await group.leader.lost


async def test_a_turn_is_given_when_all_ranks_have_begun_the_one_before() -> None:
    """A step that is given between two turns is told between them; a batch behind has its first
    turn when the last one of the batch before is given."""
    group = Played(size=2).joined()
    engine, share = towers(group, num_turns=2)
    first = asyncio.ensure_future(engine.encode(IMAGES))
    second = asyncio.ensure_future(engine.encode(IMAGES))
    await settled()
    assert group.sent == [(1, Encode(IMAGES, 2))]
    group.step()
    group.own[0].set_result(StepResult([None]))
    share.given[0].set_result([])
    await settled()
    assert len(group.sent) == 2
    group.answer(1, 1)
    await settled()
    assert group.sent[1:] == [(2, Step(BATCH)), (3, GoOn())]
    share.given[1].set_result([])
    group.answer(2, 1)
    await settled()
    assert len(group.sent) == 3
    group.answer(3, 1)
    await settled()
    assert group.sent[3:] == [(4, GoOn()), (5, Encode(IMAGES, 2))]
    share.given[2].set_result([FAILED])
    group.answer(4, 1)
    assert await first == [FAILED]
    assert not second.done() and group.state is S.STEPPING


async def test_a_batch_that_fails_takes_its_turns() -> None:
    """All ranks wait for them, and so would the next batch."""
    group = Played(size=2).joined()
    engine, share = towers(group, num_turns=1)
    encoded = asyncio.ensure_future(engine.encode(IMAGES))
    await settled()
    share.given[0].set_exception(EngineError("out of memory"))
    group.answer(1, 1, failed=True)
    await settled()
    share.given[1].set_exception(EngineError("out of memory"))
    group.answer(2, 1, failed=True)
    with pytest.raises(EngineError, match="out of memory"):
        await encoded
    assert [command for _, command in group.sent] == [Encode(IMAGES, 1), GoOn()]
    assert group.state is S.READY


class PlayedTower:
    """The leader's share of batches: what it was asked for ends when a test says so."""

    def __init__(self, num_turns: int) -> None:
        self.given: list[asyncio.Future[Encoded]] = []
        self._num_turns = num_turns

    def num_turns(self, batch: Sequence[Patches]) -> int:
        return self._num_turns

    def encode(self, batch: Sequence[Patches], num_turns: int) -> asyncio.Future[Encoded]:
        assert num_turns == self._num_turns
        return self.go_on()

    def go_on(self) -> asyncio.Future[Encoded]:
        self.given.append(asyncio.get_running_loop().create_future())
        return self.given[-1]


def towers(group: Played, num_turns: int) -> tuple[GroupVisionEngine, PlayedTower]:
    share = PlayedTower(num_turns)
    return GroupVisionEngine(NullVision(), share, group.leader), share


async def test_an_instance_goes_on_in_the_journal_of_its_group() -> None:
    """What ranks did before there was an instance is in its story."""
    leader = Played().leader
    assert Engines(leader=leader).journal is leader.journal is NULL_JOURNAL
    assert Engines().journal is None
