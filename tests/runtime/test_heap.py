"""What images have left in the heap is the system's again."""

from __future__ import annotations

import asyncio
import ctypes
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from epd.config import GatewayConfig
from epd.runtime import front, heap

PROGRAM = """
import psutil
from epd.runtime.heap import give_back

def held():
    return psutil.Process().memory_info().rss

bytes(30_000_000)  # one that is freed makes others of up to its size the heap's
images, small = [], []
for number in range(100):
    images.append(bytes([number]) * 600_000)
    small.append(bytes(2000))
images.clear()
before = held()
give_back()
print(before - held())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="it is about glibc")
def test_what_is_free_goes_back() -> None:
    command = [sys.executable, "-c", PROGRAM]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert int(told) > 40_000_000


async def test_it_is_done_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[int] = []
    monkeypatch.setattr(heap, "PERIOD_S", 0.0)
    monkeypatch.setattr(heap, "give_back", lambda: times.append(0))
    task = asyncio.create_task(heap.give_back_now_and_then())
    async with asyncio.timeout(10):
        while len(times) < 3:
            await asyncio.sleep(0)
    task.cancel()


@pytest.mark.parametrize("what", ["give_back_now_and_then", "watch_lag"])
async def test_a_gateway_does_it_while_it_serves(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    begun, ended, now = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def noted(*_: object) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr(heap if hasattr(heap, what) else front, what, noted)
    monkeypatch.setattr(front, "ApiServer", lambda role, config: mock.AsyncMock(drain=mock.Mock()))
    monkeypatch.setattr(heap, "gc", mock.Mock())
    gateway: Any = mock.Mock(close=mock.AsyncMock(), registry=mock.Mock(instances=[]))
    ending: Any = SimpleNamespace(drain=begun, now=now, exit_status=0)  # it ends once it has begun
    now.set()
    config = GatewayConfig(model_dir="")
    async with asyncio.timeout(10):
        assert await front._serve(gateway, None, config, ending, mock.Mock()) == 0
        await ended.wait()
