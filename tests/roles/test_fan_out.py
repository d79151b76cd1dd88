"""FAN_OUT in use: parts that end in every order and in every way, and the one outcome of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from itertools import permutations, product
from types import SimpleNamespace
from typing import Any

import pytest

from epd.fsm.fan_out import FanOut, PartEnded, PartFailed, PartUnknown, PartWritten, S
from epd.fsm.kernel import NULL_JOURNAL
from epd.roles.fan_out import FanOuts
from epd.transport.base import WriteFailed, WriteOutcome, WriteUnknown, Written
from tests.roles.turns import AtOnce

KINDS = (PartWritten, PartFailed, PartUnknown)


def event(kind: type[PartEnded], part: int) -> PartEnded:
    return PartWritten(part, 8, 5) if kind is PartWritten else kind(part, "because")  # type: ignore[call-arg]


def test_every_order_and_every_end_of_three_parts() -> None:
    for kinds, order in product(product(KINDS, repeat=3), permutations(range(3))):
        machine = FanOut("r/kv+0", 3)
        for count, part in enumerate(order):
            assert not machine.terminal, f"told after {count} parts"
            machine.fire(event(kinds[part], part))
        expected = S.WRITTEN
        if PartUnknown in kinds:
            expected = S.UNKNOWN
        elif PartFailed in kinds:
            expected = S.FAILED
        assert machine.state is expected, (kinds, order)


@pytest.mark.parametrize(
    ("ends", "outcome"),
    [
        ([Written(3, 0xFFFFFFFF), Written(4, 2)], Written(7, 1)),
        ([Written(3, 0), WriteFailed("it broke")], WriteFailed("it broke")),
        ([WriteUnknown("silence"), WriteFailed("it broke")], WriteUnknown("silence")),
        ([Written(3, 0), OSError("x")], WriteUnknown("OSError('x')")),
    ],
)
async def test_the_outcome_of_all_when_each_has_its_own(
    ends: Sequence[WriteOutcome | Exception], outcome: WriteOutcome
) -> None:
    faults: list[str] = []
    fan_outs = FanOuts(_actor(faults))
    writes: list[asyncio.Future[WriteOutcome]] = [asyncio.Future() for _ in ends]
    whole = asyncio.ensure_future(
        fan_outs.write("r/kv+0", [partial(asyncio.wait_for, write, None) for write in writes])
    )
    for write, end in zip(writes, ends, strict=True):
        await asyncio.sleep(0)
        assert not whole.done() and fan_outs.live() == {"fan_outs": 1}
        if isinstance(end, Exception):
            write.set_exception(end)
        else:
            write.set_result(end)
    assert await whole == outcome
    assert fan_outs.live() == {"fan_outs": 0}
    assert len(faults) == sum(isinstance(end, Exception) for end in ends)


def _actor(faults: list[str]) -> Any:
    """As much of one as a component needs."""
    tasks: list[asyncio.Task[None]] = []

    def spawn(name: str, work: Any, then: Any) -> None:
        async def run() -> None:
            actor.mailbox.put(name, then, await work)

        tasks.append(asyncio.ensure_future(run()))

    actor = SimpleNamespace(clock=None, journal=NULL_JOURNAL, spawn=spawn, add=lambda part: None)
    actor.fault = lambda where, error: faults.append(where)
    actor.mailbox = AtOnce(actor.fault)
    actor.timers = SimpleNamespace(keep=lambda machine, running: None)
    return actor
