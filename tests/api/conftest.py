"""What holds for every test of the HTTP side: no connection outlives its test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from tests.api.wire import Wire


@pytest.fixture(autouse=True)
async def drop_wires() -> AsyncIterator[None]:
    yield
    while Wire.opened:
        wire = Wire.opened.pop()
        wire.drop()
        with suppress(OSError):
            await wire.writer.wait_closed()
