"""The step loop: what it plans, launches and settles."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from epd.engine.base import StepFailure, StepResult
from epd.groups.asks import RankLost
from epd.roles.hands import Hands
from epd.roles.steps.step_loop import StepLoop
from epd.scheduling.batching import Share
from tests.roles.turns import AtOnce


def made(*, runs_ahead: bool = False) -> tuple[StepLoop, Any, Any, Any]:
    """Its batch, of one step of one request that decodes; its engine, and its actor."""
    batch, engine, mailbox = mock.MagicMock(), mock.MagicMock(), AtOnce(mock.Mock())
    request: Any = SimpleNamespace(has_yielded=True, output=(), steps=())
    batch.plan.side_effect = [[Share(request, 1, decodes=True)], [], []]
    batch.sequence.return_value.sample = None
    actor: Any = mock.Mock(closing=False, mailbox=mailbox, hands=Hands())
    loop = StepLoop(actor, engine, batch, mock.MagicMock(), runs_ahead=runs_ahead)
    return loop, batch, engine, actor


async def test_a_loop_whose_plan_breaks_goes_on_and_one_that_closes_does_not() -> None:
    loop, batch, _, actor = made()
    batch.plan.side_effect = [OSError("planned"), []]
    for count in (1, 2):
        actor.mailbox.put("two reasons", lambda: [loop.wake(), loop.wake()])
        await asyncio.sleep(0)
        assert batch.plan.call_count == count
    actor.fault.assert_called_once()
    actor.closing = True
    loop.wake()
    assert batch.plan.call_count == 2


async def test_nothing_is_planned_ahead_of_a_step_that_was_not_launched() -> None:
    """It would rest on tokens that nobody samples, and of which other ranks have not heard."""
    loop, batch, engine, _ = made(runs_ahead=True)
    engine.step.side_effect = OSError("planned")
    with mock.patch("epd.roles.steps.step_loop.runs_ahead", return_value=True):
        loop.wake()
        assert batch.plan.call_count == 1 and not batch.settle.called
        for _ in range(2):  # the step's end, and the loop's turn
            await asyncio.sleep(0)
    assert batch.settle.call_count == 1 and batch.plan.call_count == 2


async def test_a_step_fails_with_its_group_and_that_is_no_slip() -> None:
    """Of an engine that raises anything else it is."""
    for num_faults, error in enumerate((RankLost("gone"), OSError("planned"))):
        loop, batch, engine, actor = made()
        engine.step.side_effect = error
        loop.wake()
        await asyncio.sleep(0)
        ((part, outcome),) = batch.settle.call_args.args[0]
        batch.launched.assert_called_once_with(part.request, 1, ahead=False)
        assert part.request.has_yielded and outcome == StepFailure(f"the step failed: {error}")
        assert actor.fault.call_count == num_faults


@pytest.mark.parametrize(("samples", "here"), [(True, False), (True, True), (False, False)])
async def test_who_waits_for_kv_hears_of_its_layers_while_its_step_is_under_way(
    *, samples: bool, here: bool
) -> None:
    loop, batch, engine, _ = made()
    engine.step.side_effect = lambda sequences, tell: asyncio.get_running_loop().create_future()
    request: Any = SimpleNamespace(steps=[1], decode_here=here, has_yielded=True, output=())
    batch.sequence.return_value = SimpleNamespace(sample=samples or None, start=3)
    batch.plan.side_effect = [[Share(request, 3, decodes=False)], [], []]
    loop.wake()
    tell = engine.step.call_args.args[1]
    assert (tell is not None) == (samples and not here)
    if tell is not None:
        tell(1)
        batch.layers_computed.assert_called_once_with(request, 3, 1)
        request.steps.clear()
        tell(2)
        assert batch.layers_computed.call_count == 1


async def test_an_engine_that_answers_for_fewer_than_it_was_asked_fails_the_step() -> None:
    loop, batch, engine, actor = made()
    engine.step.return_value = asyncio.get_running_loop().create_future()
    engine.step.return_value.set_result(StepResult([]))
    loop.wake()
    for _ in range(2):
        await asyncio.sleep(0)
    assert actor.fault.called
    ((failed, outcome),), elapsed_s = batch.settle.call_args.args
    assert failed.request.has_yielded and isinstance(outcome, StepFailure) and elapsed_s == 0.0
