"""A leader and its followers over channels and engines that a test plays: GROUP in use."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from epd.config import Timing
from epd.engine.base import EncodeFailure, EngineError, OnLayers, Patches, StepResult, StepSequence
from epd.fsm.group import CommandExecuted, RankEnded, RankJoined, S
from epd.fsm.kernel import NULL_JOURNAL
from epd.roles.group import (
    Batch,
    Command,
    Encode,
    Follower,
    GroupLanguageEngine,
    GroupVisionEngine,
    Leader,
    Probe,
    Step,
)
from epd.roles.rank_asks import RankLost
from epd.runtime.system import SystemClock
from epd_lab.bench.null_engine import NullLanguage, NullVision
from tests.patience import PATIENCE_S
from tests.roles.test_timers import ManualClock

TIMING = Timing()
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
        self.engine = GroupLanguageEngine(NullLanguage(), self.run, self.leader)

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

    engine = GroupLanguageEngine(NullLanguage(), refuse, group.leader)
    with pytest.raises(EngineError, match="calls waiting"):
        engine.step(BATCH)
    assert not group.sent and group.state is S.READY


async def test_a_batch_of_images_is_over_when_every_rank_has_executed_it() -> None:
    """A step may be given behind it; what one rank alone fails in ends the group."""
    group = Played(size=2).joined()
    engine = GroupVisionEngine(NullVision(), group.leader)
    batch = [Patches(None, (1, 4, 4), 16, 4)]
    encoded = asyncio.ensure_future(engine.encode(batch))
    step = group.step()
    await settled()
    assert group.sent == [(1, Encode(batch)), (2, Step(BATCH))]
    assert not encoded.done()
    group.answer(1, 1)
    (rows,) = await encoded
    assert not isinstance(rows, EncodeFailure) and rows.num_rows == 4
    group.answer(2, 1, failed=True)
    group.own[0].set_result(StepResult([None]))
    await settled()
    assert not step.done() and "rank 0 executed command 2" in await group.leader.lost


class Executes:
    """A rank whose work ends when a test says so."""

    def __init__(self) -> None:
        self.under_way: list[asyncio.Future[None]] = []

    def step(self, batch: Batch, on_layers: OnLayers | None = None) -> asyncio.Future[None]:
        if len(self.under_way) == 2:
            raise EngineError("full")
        self.under_way.append(asyncio.get_running_loop().create_future())
        return self.under_way[-1]

    def encode(self, batch: Sequence[Patches]) -> asyncio.Future[None]:
        return self.step([])


async def test_a_follower_executes_in_order_and_says_how_it_ended() -> None:
    rank = Executes()
    answers: list[tuple[int, str]] = []
    follower = Follower(rank, lambda number, failure: answers.append((number, failure)))
    follower.execute(1, Step(BATCH))
    follower.execute(2, Encode([]))
    assert not answers
    rank.under_way[0].set_result(None)
    rank.under_way[1].set_exception(EngineError("out of memory"))
    await settled()
    follower.execute(3, Step(BATCH))
    follower.execute(4, Probe())
    follower.execute(6, Step(BATCH))
    missing = "command 5 has not come"
    assert answers == [(1, ""), (2, "out of memory"), (3, "full"), (4, ""), (6, missing)]
