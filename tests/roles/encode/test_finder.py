"""What storage has is told again and again, because anybody may write there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from epd.roles.encode.finder import LOOK_EVERY_S, StorageWatch


def test_storage_is_listed_again_whether_it_answered_or_not() -> None:
    timers: list[tuple[float, Callable[[], None]]] = []
    listings: list[Callable[[Sequence[str] | None], None]] = []
    told: list[Sequence[str]] = []
    actor: Any = SimpleNamespace(
        add=lambda role: None,
        clock=None,
        mailbox=None,
        timers=SimpleNamespace(
            keep=None, call_later=lambda delay_s, look: timers.append((delay_s, look))
        ),
        spawn=lambda name, work, then: (work.close(), listings.append(then)),
    )
    storage: Any = SimpleNamespace(listing=lambda: None)
    events: Any = SimpleNamespace(in_storage=told.append)
    watch = StorageWatch(actor, storage, events)
    watch.start()
    for keys in (["a"], None, ["a", "b"]):
        assert len(listings) == 1, "one at a time"
        listings.pop()(keys)
        delay_s, look = timers.pop()
        assert delay_s == LOOK_EVERY_S
        look()
    assert told == [["a"], ["a", "b"]], "no answer is no news"


def test_a_listing_that_raises_is_not_the_last() -> None:
    works: list[Any] = []
    faults: list[Exception] = []
    actor: Any = SimpleNamespace(
        add=lambda role: None,
        clock=None,
        mailbox=None,
        timers=SimpleNamespace(keep=None),
        spawn=lambda name, work, then: works.append(work),
        fault=lambda where, error: faults.append(error),
    )

    async def listing() -> Sequence[str]:
        raise OSError("sick")

    storage: Any = SimpleNamespace(listing=listing)
    events: Any = None
    StorageWatch(actor, storage, events).start()
    assert asyncio.run(works.pop()) is None  # an outcome, as of no answer: it is listed again
    assert [str(error) for error in faults] == ["sick"]
