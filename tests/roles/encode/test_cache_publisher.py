"""What is told of rows that are in memory, in a storage that others write to, or in both."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from epd.messages import CacheEvents
from epd.roles.cache_events import CachePublisher
from epd.scheduling.residency import MAX_TRACKED


class Told:
    """A publisher, and what it has said so far."""

    def __init__(self) -> None:
        self.sent: list[CacheEvents] = []
        self._timers: list[Any] = []
        actor: Any = SimpleNamespace(
            add=lambda role: None,
            clock=None,
            mailbox=None,
            timers=SimpleNamespace(
                keep=None,
                will_call=lambda callback: bool(self._timers),
                call_later=lambda delay_s, callback: self._timers.append(callback),
            ),
            tell_gateways=self.sent.append,
        )
        self.publisher = CachePublisher(actor)

    def news(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Stored and evicted since it was asked last."""
        timers, self._timers = self._timers, []
        self.sent.clear()
        for callback in timers:
            callback()
        stored = tuple(h for message in self.sent for h in message.stored)
        return stored, tuple(h for message in self.sent for h in message.evicted)


@pytest.fixture
def told() -> Told:
    return Told()


def test_what_storage_has_is_told_and_what_it_has_lost(told: Told) -> None:
    told.publisher.in_storage(["a", "b"])
    assert told.news() == (("a", "b"), ())
    told.publisher.in_storage(["b", "c"])
    assert told.news() == (("c",), ("a",))
    told.publisher.in_storage(["b", "c"])
    assert told.news() == ((), ())


def test_a_hash_is_gone_when_neither_has_it(told: Told) -> None:
    told.publisher.in_storage(["a", "b"])
    told.publisher.stored("a")
    told.news()
    told.publisher.evicted("a")
    assert told.news() == ((), ()), "storage has it still"
    told.publisher.stored("b")
    told.publisher.in_storage([])
    assert told.news() == ((), ("a",)), "memory has the other one"
    told.publisher.evicted("b")
    assert told.news() == ((), ("b",))


def test_what_was_not_found_is_not_told_of_again_until_it_is_there(told: Told) -> None:
    """A file that is torn is one request's loss, not that of all who follow."""
    told.publisher.in_storage(["a"])
    told.news()
    told.publisher.not_in_storage("a")
    assert told.news() == ((), ("a",))
    told.publisher.in_storage(["a"])
    assert told.news() == (("a",), ())


def test_of_a_large_storage_the_youngest_are_told(told: Told) -> None:
    listing = [f"{number:05x}" for number in range(MAX_TRACKED + 10)]
    told.publisher.in_storage(listing)
    assert told.news()[1] == ()
    told.publisher.in_storage(listing)
    assert told.news() == ((), ()), "and the same ones again"
    assert len(told.publisher.log.held) == MAX_TRACKED
    assert f"{0:05x}" not in told.publisher.log.held
