"""A rank that leads nobody: what it executes, and its beats."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from epd.engine.base import EngineError, Patches
from epd.groups.leader import Batch, Encode, Follower, Probe, Step
from tests.groups.test_group import BATCH, settled
from tests.roles.test_timers import ManualClock


class Executes:
    """A rank whose work ends when a test says so."""

    def __init__(self) -> None:
        self.under_way: list[asyncio.Future[None]] = []

    def step(self, batch: Batch) -> asyncio.Future[None]:
        if len(self.under_way) == 2:
            raise EngineError("full")
        self.under_way.append(asyncio.get_running_loop().create_future())
        return self.under_way[-1]

    def encode(self, batch: Sequence[Patches], num_turns: int) -> asyncio.Future[None]:
        return self.step([])

    def go_on(self) -> asyncio.Future[None]:
        return self.step([])


async def test_a_follower_executes_in_order_and_says_how_it_ended() -> None:
    rank = Executes()
    answers: list[tuple[int, str]] = []
    beats, clock = [], ManualClock()
    follower = Follower(
        rank, lambda *answer: answers.append(answer), lambda: beats.append(clock.at_s), clock, 0.5
    )
    follower.beat()
    clock.run_until(1.2)
    assert beats == [0.0, 0.5, 1.0]
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
