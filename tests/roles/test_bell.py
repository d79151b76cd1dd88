"""A bell is heard once, whether it was rung before somebody listened or after."""

from __future__ import annotations

import asyncio

import pytest

from epd.roles.bell import Bell
from tests.patience import PATIENCE_S


async def hear(bell: Bell) -> None:
    await bell


async def listening(bell: Bell) -> asyncio.Future[None]:
    """Somebody who waits for it already."""
    waiting = asyncio.ensure_future(hear(bell))
    await asyncio.sleep(0)
    return waiting


async def test_it_is_heard_once_however_often_it_was_rung() -> None:
    bell = Bell()
    bell.ring()
    bell.ring()
    await asyncio.wait_for(hear(bell), PATIENCE_S)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(hear(bell), 0.01)


async def test_who_waits_is_woken() -> None:
    bell = Bell()
    waiting = await listening(bell)
    assert not waiting.done()
    bell.ring()
    await asyncio.wait_for(waiting, PATIENCE_S)


async def test_what_is_known_is_not_heard() -> None:
    bell = Bell()
    bell.ring()
    bell.clear()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(hear(bell), 0.01)


async def test_a_waiter_that_left_does_not_break_it() -> None:
    bell = Bell()
    waiting = await listening(bell)
    waiting.cancel()
    bell.ring()
    await asyncio.wait_for(hear(bell), PATIENCE_S)
