"""What holds for every test of the HTTP side: no connection outlives its test."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from tests.api.wire import Wire


@pytest.fixture
async def drop_wires() -> AsyncIterator[None]:
    yield
    while Wire.opened:
        wire = Wire.opened.pop()
        wire.drop()
        with suppress(OSError):
            await wire.writer.wait_closed()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Only a coroutine opens one; for any other test a loop would be made and closed in vain."""
    if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.function):
        item.fixturenames.insert(0, "drop_wires")
