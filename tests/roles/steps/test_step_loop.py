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
from epd.roles.steps.requests import Requests
from epd.roles.steps.step_loop import StepLoop, _Step
from epd.scheduling.batching import Share
from tests.roles.turns import AtOnce


def _actor() -> Any:
    mailbox = AtOnce(mock.Mock())
    return SimpleNamespace(closing=False, fault=mock.Mock(), mailbox=mailbox, hands=Hands())


async def test_a_loop_whose_plan_breaks_goes_on_and_one_that_closes_does_not() -> None:
    actor, batch = mock.MagicMock(closing=False, mailbox=AtOnce(mock.Mock())), mock.MagicMock()
    batch.plan.side_effect = [OSError("planned"), []]
    loop = StepLoop(actor, mock.MagicMock(), batch, mock.MagicMock(), runs_ahead=False)
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
    batch, engine = mock.MagicMock(), mock.MagicMock()
    request: Any = SimpleNamespace(has_yielded=True, output=(), steps=())
    batch.plan.side_effect = [[Share(request, 1, decodes=True)], [], []]
    engine.step.side_effect = OSError("planned")
    actor: Any = _actor()
    loop = StepLoop(actor, engine, batch, mock.MagicMock(), runs_ahead=True)
    with mock.patch("epd.roles.steps.step_loop.runs_ahead", return_value=True):
        loop.wake()
        assert batch.plan.call_count == 1 and not batch.settle.called
        for _ in range(2):  # the step's end, and the loop's turn
            await asyncio.sleep(0)
    assert batch.settle.call_count == 1 and batch.plan.call_count == 2


def test_a_sequence_takes_as_many_drafts_as_its_part_has_room_for() -> None:
    request, record = SimpleNamespace(key="r/1"), SimpleNamespace(drafts=(5, 6, 7))
    role: Any = SimpleNamespace(_records={"r/1": record})
    for decoding, known, drafts in ((True, 1, (5, 6)), (False, 3, ())):
        with mock.patch("epd.roles.steps.requests.sequence_of") as made:
            Requests.sequence(role, request, 3, decoding=decoding)
        made.assert_called_once_with(request, record, known, drafts)


async def test_a_step_fails_with_its_group_and_that_is_no_slip() -> None:
    """Of an engine that raises anything else it is."""
    batch, engine = mock.MagicMock(), mock.MagicMock()
    batch.plan.return_value = []
    actor: Any = _actor()
    loop = StepLoop(actor, engine, batch, mock.MagicMock(), runs_ahead=False)
    request: Any = SimpleNamespace(has_yielded=True, output=())
    batch.sequence.return_value.sample = None
    for num_faults, error in enumerate((RankLost("gone"), OSError("planned"))):
        engine.step.side_effect = error
        loop._launch([Share(request, 1, decodes=True)])
        batch.launched.assert_called_with(request, 1, ahead=False)
        await asyncio.sleep(0)
        ((part, outcome),) = batch.settle.call_args.args[0]
        assert part.request is request and outcome == StepFailure(f"the step failed: {error}")
        assert actor.fault.call_count == num_faults


@pytest.mark.parametrize(("samples", "here"), [(True, False), (True, True), (False, False)])
async def test_who_waits_for_kv_hears_of_its_layers_while_its_step_is_under_way(
    *, samples: bool, here: bool
) -> None:
    batch, engine = mock.MagicMock(), mock.MagicMock()
    batch.plan.return_value = []
    engine.step.side_effect = lambda sequences, tell: asyncio.get_running_loop().create_future()
    actor = mock.MagicMock(mailbox=AtOnce(mock.Mock()))
    loop = StepLoop(actor, engine, batch, mock.MagicMock(), runs_ahead=False)
    request: Any = SimpleNamespace(steps=[1], decode_here=here, has_yielded=True, output=())
    batch.sequence.return_value = SimpleNamespace(sample=samples or None, start=3)
    loop._launch([Share(request, 3, decodes=False)])
    tell = engine.step.call_args.args[1]
    assert (tell is not None) == (samples and not here)
    if tell is not None:
        tell(1)
        batch.layers_computed.assert_called_once_with(request, 3, 1)
        request.steps.clear()
        tell(2)
        assert batch.layers_computed.call_count == 1


async def test_an_engine_that_answers_for_fewer_than_it_was_asked_fails_the_step() -> None:
    batch, actor = mock.MagicMock(), mock.MagicMock(mailbox=AtOnce(mock.Mock()))
    loop = StepLoop(actor, mock.MagicMock(), batch, mock.MagicMock(), runs_ahead=False)
    result = asyncio.get_running_loop().create_future()
    result.set_result(StepResult([]))
    part: Any = SimpleNamespace()
    loop._settle(_Step([part], result))
    assert actor.fault.called
    ((failed, outcome),), elapsed_s = batch.settle.call_args.args
    assert failed is part and isinstance(outcome, StepFailure) and elapsed_s == 0.0
