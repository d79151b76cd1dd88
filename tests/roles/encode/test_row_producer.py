"""From where rows are written: where they lie, from the ring, or from a copy in host memory."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from epd.engine.base import Rows
from epd.fsm.outgoing import SlotsLeased
from epd.roles.encode.row_producer import RowProducer
from epd.transport.base import Reference

ROWS = Rows(b"12345678", 2, 8)


def made(ring: Any, *, by_reference: bool = False) -> tuple[RowProducer, Any]:
    transfers = SimpleNamespace(takes_references=lambda region: by_reference)
    actor: Any = SimpleNamespace(
        ports=SimpleNamespace(transfers=transfers), counters=Counter[str](), rooms=mock.Mock()
    )
    actor.closed = mock.Mock()
    actor.engine = mock.Mock(to_host=mock.AsyncMock(return_value=ROWS))
    producer = RowProducer(actor, actor.rooms, actor.engine, ring, mock.Mock(), actor.closed)
    producer.sources["a"] = ROWS
    return producer, actor


def room(**other: Any) -> Any:
    grant = SimpleNamespace(region="region", slots=(3, 4), parts=())
    peer = SimpleNamespace(instance_id="p0")
    return SimpleNamespace(key="a", grant=grant, peer=peer, slots=(), **other)


def ring(*, fits: bool = True, granted: bool = True) -> Any:
    return mock.Mock(
        fits=mock.Mock(return_value=fits),
        waits=mock.Mock(return_value=not granted),
        grants=mock.Mock(return_value=[("a", (0, 1))] if granted else []),
        copy=mock.AsyncMock(return_value=["views"]),
    )


def test_what_can_be_read_where_it_lies_needs_no_slots() -> None:
    for has, by_reference in ((None, False), (ring(), True)):
        producer, actor = made(has, by_reference=by_reference)
        assert not producer.lease(room()) and not actor.counters


def test_what_is_larger_than_the_ring_goes_without_it_and_is_counted() -> None:
    producer, actor = made(ring(fits=False))
    assert not producer.lease(room())
    assert actor.counters == {"send_ring_oversized": 1}


@pytest.mark.parametrize("granted", [True, False])
def test_slots_are_told_when_its_turn_comes(*, granted: bool) -> None:
    producer, actor = made(ring(granted=granted))
    one = room()
    assert producer.lease(one)
    assert producer.ring is not None
    producer.ring.join.assert_called_once_with("a", "p0", 8)  # type: ignore[attr-defined]
    told = [mock.call(actor.rooms.find.return_value, SlotsLeased((0, 1)))]
    assert actor.rooms.post.call_args_list == told * granted
    assert actor.counters == ({} if granted else {"send_ring_deferred": 1})


def test_slots_are_released_and_handed_on() -> None:
    producer, actor = made(ring())
    one = room()
    one.slots = (5, 6)
    producer.release_slots(one)
    assert producer.ring is not None
    producer.ring.release.assert_called_with("a", (5, 6))  # type: ignore[attr-defined]
    assert actor.rooms.post.call_count == 1
    made(None)[0].release_slots(one)


async def test_where_the_bytes_are_that_are_written() -> None:
    one = room()
    producer, _ = made(None, by_reference=True)
    staged = await producer.stage(one, one.grant)
    assert isinstance(staged.views[0], Reference) and staged.slots == (3, 4)
    one.slots = (0, 1)
    producer, actor = made(ring())
    assert (await producer.stage(one, one.grant)).views == ["views"]
    one.slots = ()
    assert bytes((await producer.stage(one, one.grant)).views[0]) == b"12345678"
    device: Any = mock.Mock(spec=Rows, on_host=False)
    producer.sources["a"] = device
    await producer.stage(one, one.grant)
    actor.engine.to_host.assert_awaited_once_with(device)


@pytest.mark.parametrize("nbytes", [0, 8])
def test_a_room_that_fails_is_closed_when_its_source_is_released(nbytes: int) -> None:
    """Without a source at once."""
    producer, actor = made(None)
    transfer: Any = SimpleNamespace(key="a", nbytes=nbytes)
    producer.concluded(transfer, None)
    assert actor.closed.call_count == (not nbytes)
    producer.release_source(transfer)
    assert actor.closed.call_args == mock.call(transfer)
