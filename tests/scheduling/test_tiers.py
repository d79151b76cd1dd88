"""The books of two exclusive tiers."""

from __future__ import annotations

from epd.records import CacheTier
from epd.scheduling.slots import rows_per_slot
from epd.scheduling.tiers import TierBooks


def test_a_value_is_counted_in_one_tier() -> None:
    books = TierBooks(100, 50)
    books.place("a", 30, books.device)
    books.place("a", 30, books.host)
    assert (books.device.order.used, books.host.order.used) == (0, 30)
    books.remove("a")
    assert (books.device.order.used, books.host.order.used) == (0, 0)


def test_what_was_not_used_for_the_longest_goes_first() -> None:
    books = TierBooks(100, 50)
    for key in "abcd":
        books.place(key, 30, books.device)
    books.hit("a")
    assert books.device.excess(lambda key: key != "b") == ["c"]
    assert books.device.counts.evictions == 1


def test_hits_and_misses_are_those_of_each_tier() -> None:
    """What the host tier has, the device tier has missed."""
    books = TierBooks(100, 50)
    assert books.device.report() == CacheTier(
        tier="device", nbytes=0, capacity_nbytes=100, hits=0, misses=0, evictions=0, failures=0
    )
    books.place("up", 10, books.device)
    books.place("down", 10, books.host)
    books.hit("up")
    books.hit("down")
    books.miss()
    device, host = books.device.report(), books.host.report()
    assert (device.hits, device.misses, device.nbytes) == (1, 2, 10)
    assert (host.hits, host.misses, host.capacity_nbytes) == (1, 1, 50)


def test_a_slot_holds_whole_rows() -> None:
    assert rows_per_slot(0, 100) == 64
    assert rows_per_slot(1000, 300) == 3
    assert rows_per_slot(1, 300) == 1, "one row at least, however wide"
