"""Rows between tiers: what is moved or dropped, what storage is asked, and what is said of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from epd.config import EncodeConfig
from epd.engine.base import Rows
from epd.fsm import encoding as fsm
from epd.roles.encode.row_tiers import RowTiers, note_of
from epd.transport.base import StorageUsage
from epd_lab.sim.engine import golden

NBYTES = 64
USAGE = StorageUsage(11, 22, 33)


class Made:
    """Tiers of two values each, over ports that note what they are asked."""

    def __init__(self, *, host: bool = True, stores: bool = True) -> None:
        self.storage = mock.Mock(
            tier="disk",
            usage=mock.Mock(return_value=USAGE),
            get=mock.AsyncMock(return_value=None),
            put=mock.AsyncMock(return_value=True),
        )
        self.actor = mock.MagicMock()
        self.actor.ports.storage = self.storage if stores else None
        self.engine = mock.Mock(
            contract=golden.ROW_CONTRACT, to_host=mock.AsyncMock(), to_device=mock.AsyncMock()
        )
        self.events = mock.Mock()
        self.owner = mock.Mock(encodings={})
        config = EncodeConfig(
            cache_device_nbytes=2 * NBYTES,
            cache_host_nbytes=2 * NBYTES if host else 0,
            cache_load_timeout_s=3.0,
        )
        self.tiers = RowTiers(self.actor, self.engine, config, self.events, self.owner)

    def encoding(self, key: str, *, at_rest: bool = True, rooms: int = 0) -> Any:
        made = SimpleNamespace(
            key=key,
            rows=SimpleNamespace(nbytes=NBYTES),
            num_rows=2,
            at_rest=at_rest,
            rooms=dict.fromkeys(map(str, range(rooms))),
        )
        self.owner.encodings[key] = made
        return made

    def used(self) -> tuple[int, int]:
        books = self.tiers.books
        return books.device.order.used, books.host.order.used

    def fired(self) -> list[tuple[str, str]]:
        calls = self.owner.fire.call_args_list
        return [(call.args[0].key, type(call.args[1]).__name__) for call in calls]


def test_rows_that_are_kept_are_counted_and_told() -> None:
    made = Made()
    one, two = made.encoding("a"), made.encoding("b")
    made.tiers.keep_rows(one, None)  # type: ignore[arg-type]
    made.tiers.keep_host_rows(two, None)  # type: ignore[arg-type]
    assert made.used() == (NBYTES, NBYTES)
    assert [call.args for call in made.events.stored.call_args_list] == [("a",), ("b",)]
    made.tiers.release_rows(one, None)  # type: ignore[arg-type]
    assert made.used() == (0, NBYTES)
    made.events.evicted.assert_called_once_with("a")


@pytest.mark.parametrize(
    ("copies", "host", "event"),
    [
        (True, True, "DemotionRequested"),
        (False, True, "EvictionRequested"),
        (True, False, "EvictionRequested"),
    ],
)
def test_what_is_old_and_idle_moves_down_or_goes(event: str, *, copies: bool, host: bool) -> None:
    made = Made(host=host)
    for key, at_rest, rooms in (("a", False, 0), ("b", True, 1), ("c", True, 0), ("d", True, 0)):
        encoding = made.encoding(key, at_rest=at_rest, rooms=rooms)
        made.tiers.keep_rows(encoding, None)  # type: ignore[arg-type]
    made.tiers.make_room(copies=copies)
    assert made.fired() == [("c", event), ("d", event)]


def test_the_lower_tier_drops_what_is_too_much() -> None:
    made = Made()
    for key in "abc":
        made.tiers.keep_host_rows(made.encoding(key), None)  # type: ignore[arg-type]
    made.tiers.make_room(copies=True)
    assert made.fired() == [("a", "EvictionRequested")]


COPIES = [
    ("start_demotion", "to_host", fsm.DemotionSucceeded, (0, NBYTES)),
    ("start_promotion", "to_device", fsm.PromotionSucceeded, (NBYTES, 0)),
]


@pytest.mark.parametrize(("start", "copy", "event", "used"), COPIES)
async def test_a_copy_is_counted_where_it_goes_and_has_a_clock(
    start: str, copy: str, event: Any, used: Any
) -> None:
    made = Made()
    one = made.encoding("a")
    work = getattr(made.tiers, start)(one, None)
    assert made.used() == used
    made.owner.arm.assert_called_once_with(one, 3.0, fsm.CopyTimedOut())
    copied = getattr(made.engine, copy)
    assert await work == event(copied.return_value)
    copied.assert_awaited_once_with(one.rows)
    copied.side_effect = OSError("planned")
    assert await getattr(made.tiers, start)(one, None) == fsm.CopyFailed()
    assert made.actor.fault.called


async def test_storage_is_asked_for_this_very_image_and_has_it_or_not() -> None:
    made = Made()
    one = made.encoding("a")
    note = note_of(golden.ROW_CONTRACT, "a", 2)
    assert note == f"a float32 {golden.ROW_CONTRACT.row_width} 2".encode()
    assert await made.tiers.start_load(one, None) == fsm.LoadMissed()  # type: ignore[arg-type]
    made.storage.get.assert_awaited_once_with("a", note, 2 * golden.ROW_NBYTES)
    made.events.not_in_storage.assert_called_once_with("a")
    made.owner.arm.assert_called_once_with(one, 3.0, fsm.LoadTimedOut())
    made.storage.get.return_value = b"rows"
    loaded = fsm.LoadSucceeded(Rows(b"rows", 2, 2 * golden.ROW_NBYTES))  # type: ignore[arg-type]
    assert await made.tiers.start_load(one, None) == loaded  # type: ignore[arg-type]
    made.storage.get.side_effect = ValueError("no hash")
    assert await made.tiers.start_load(one, None) == fsm.LoadMissed()  # type: ignore[arg-type]
    assert made.actor.fault.call_count == 1
    device, host, disk = made.tiers.report()
    assert (disk.tier, disk.nbytes, disk.capacity_nbytes) == ("disk", 11, 22)
    assert (disk.hits, disk.misses, disk.evictions, disk.failures) == (1, 2, 33, 0)
    assert (device.tier, host.tier) == ("device", "host")


async def test_rows_are_stored_and_a_storage_that_fails_is_told_of_once() -> None:
    made = Made()
    one = made.encoding("a")
    host = made.engine.to_host.return_value = mock.Mock()
    for kept, warnings, failures in ((True, 0, 0), (False, 1, 1), (False, 1, 2), (True, 1, 2)):
        made.storage.put.return_value = kept
        work = made.tiers.store_rows(one, None)  # type: ignore[arg-type]
        assert work is not None
        await work
        assert made.actor.log.warning.call_count == warnings
        assert made.tiers.report()[-1].failures == failures
    note = note_of(golden.ROW_CONTRACT, "a", 2)
    made.storage.put.assert_awaited_with("a", note, [host.buffer.return_value])
    made.storage.put.return_value = False
    await made.tiers.store_rows(one, None)  # type: ignore[misc, arg-type]
    assert made.actor.log.warning.call_count == 2, "it had worked in between"


def test_without_a_storage_nothing_is_stored_or_told_of_it() -> None:
    made = Made(stores=False)
    assert not made.tiers.has_storage and Made().tiers.has_storage
    assert made.tiers.store_rows(made.encoding("a"), None) is None  # type: ignore[arg-type]
    assert [tier.tier for tier in made.tiers.report()] == ["device", "host"]
