"""The ring that rows are sent from: in order, within a share per peer, and given back."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest import mock

from epd.config import EncodeConfig
from epd.roles.send_ring import SendRing

ROW_NBYTES, SLOT_NBYTES = 8, 16


class Ring:
    """Four slots of two rows, two of them at most for one peer."""

    def __init__(self, num_slots: int = 4, share: float = 0.5) -> None:
        self.region = SimpleNamespace(views=lambda slots, nbytes: (slots, nbytes))
        self.allocate = mock.Mock(return_value=self.region)
        self.counters: Counter[str] = Counter()
        actor: Any = SimpleNamespace(
            ports=SimpleNamespace(transfers=SimpleNamespace(allocate=self.allocate)),
            counters=self.counters,
        )
        self.engine = mock.Mock(
            contract=SimpleNamespace(row_nbytes=ROW_NBYTES),
            copy_out=mock.AsyncMock(),
            to_host=mock.AsyncMock(return_value=SimpleNamespace(buffer=lambda: b"host")),
        )
        config = EncodeConfig(
            send_buffer_nbytes=num_slots * SLOT_NBYTES,
            send_slot_nbytes=SLOT_NBYTES,
            max_send_share_per_peer=share,
        )
        self.ring = SendRing(actor, self.engine, config)

    def stage(self, room: str, peer: str, nbytes: int) -> asyncio.Future[Any]:
        rows: Any = SimpleNamespace(nbytes=nbytes)
        return asyncio.ensure_future(self.ring.stage(room, peer, rows))


async def turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_rows_are_copied_into_leased_slots_until_they_are_released() -> None:
    made = Ring()
    made.allocate.assert_called_once_with("send", 4, SLOT_NBYTES)
    views: Any = await made.stage("a", "p0", 17)
    assert views == ((0, 1), 17)
    assert made.engine.copy_out.await_args.args[1] == views
    assert made.ring.live() == {"send_slots": 2, "send_queue": 0} and not made.counters
    made.ring.release("a")
    made.ring.release("a")
    assert made.ring.live() == {"send_slots": 0, "send_queue": 0}


async def test_one_peer_has_its_share_and_others_pass_it() -> None:
    made = Ring()
    await made.stage("a", "p0", SLOT_NBYTES)
    waits = made.stage("b", "p0", 2 * SLOT_NBYTES)
    passes = made.stage("c", "p1", 2 * SLOT_NBYTES)
    await turns()
    assert passes.done() and not waits.done()
    assert made.ring.live() == {"send_slots": 3, "send_queue": 1}
    assert made.counters == {"send_ring_deferred": 1}
    made.ring.release("a")
    await turns()
    assert waits.done() and made.ring.live() == {"send_slots": 4, "send_queue": 0}


async def test_a_room_that_is_withdrawn_leaves_the_queue() -> None:
    made = Ring()
    await made.stage("a", "p0", 2 * SLOT_NBYTES)
    waits = made.stage("b", "p0", SLOT_NBYTES)
    await turns()
    made.ring.withdraw("b")
    assert await waits is None and made.ring.live() == {"send_slots": 2, "send_queue": 0}
    made.ring.withdraw("a")
    assert made.ring.live()["send_slots"] == 2, "it is being written"
    made.ring.release("a")
    assert await made.stage("c", "p0", SLOT_NBYTES) is not None


async def test_what_is_larger_than_the_ring_goes_without_it() -> None:
    made = Ring()
    assert await made.stage("a", "p0", 4 * SLOT_NBYTES + 1) == [b"host"]
    assert made.counters == {"send_ring_oversized": 1}
    assert made.ring.live() == {"send_slots": 0, "send_queue": 0}
    assert await made.stage("b", "p0", 4 * SLOT_NBYTES) is not None, "alone, whatever its share"


def test_a_ring_has_a_slot_and_each_peer_may_have_one() -> None:
    assert Ring(0).ring.pool.size == 1
    assert Ring(4, 0.1).ring._queue._max_per_peer == 1
