"""What the simulator takes for at hand: the truth that the checker `poison` compares with."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from epd.engine.base import DeviceLost, EngineError, StepResult
from epd.records import TokenLogprobs
from epd_lab.sim.poison import Poison

PROCESS: Any = SimpleNamespace(name="p0:1")


async def test_what_a_device_was_lost_with_stays_at_hand_and_nothing_else() -> None:
    poison = Poison()
    for key, error in (("lost", DeviceLost), ("failed", EngineError)):
        with pytest.raises(error), poison.work(PROCESS, [key]) as begin:
            begin()
            raise error("the device")
    with poison.work(PROCESS, ["made"]) as begin:
        begin()
        assert poison.at_hand("p0:1") == {"lost", "made"}
    assert poison.at_hand("p0:1") == {"lost"} and not poison.at_hand("p0:2")


async def test_a_request_is_at_hand_until_a_token_of_it_was_computed_there() -> None:
    poison, loop = Poison(), asyncio.get_running_loop()
    steps: list[asyncio.Future[StepResult]] = [loop.create_future() for _ in range(3)]
    batch: list[Any] = [SimpleNamespace(request_id="r/1"), SimpleNamespace(request_id="s/1")]
    for step in steps:
        poison.step(PROCESS, batch, partial(lambda it: it, step))
    steps[0].set_result(StepResult([TokenLogprobs(7, 0.0), None]))
    await asyncio.sleep(0)
    assert poison.at_hand("p0:1") == {"s"}, "whatever else is under way"
    steps[1].set_exception(EngineError("both failed"))
    steps[2].set_exception(EngineError("both failed"))
    await asyncio.sleep(0)
    assert not poison.at_hand("p0:1") and poison.at_hand("p0:1", since_s=0.0) == {"r", "s"}
