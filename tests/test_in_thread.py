"""Work on a thread of its own: its outcome arrives, or nobody waits for it any more."""

from __future__ import annotations

import asyncio
import threading

import pytest

from epd.in_thread import in_thread
from tests.patience import PATIENCE_S


def test_an_outcome_arrives() -> None:
    async def ask() -> None:
        assert await in_thread(lambda: 1, "work") == 1
        with pytest.raises(ZeroDivisionError):
            await in_thread(lambda: 1 // 0, "work")

    asyncio.run(ask())


@pytest.mark.parametrize("is_cancelled", [True, False], ids=["cancelled", "its loop has closed"])
def test_work_that_nobody_waits_for_ends_in_silence(is_cancelled: bool) -> None:
    go_on, threads = threading.Event(), list[threading.Thread]()

    def work() -> None:
        threads.append(threading.current_thread())
        go_on.wait(PATIENCE_S)

    async def leave() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(in_thread(work, "work"), 0.05)
        if is_cancelled:
            go_on.set()
            await asyncio.to_thread(threads[0].join, PATIENCE_S)

    asyncio.run(leave())  # an exception of the thread would fail the test
    go_on.set()
    threads[0].join(PATIENCE_S)
    assert not threads[0].is_alive()
