"""The ring that rows are sent from: in order, within a share per peer, and given back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

from epd.config import EncodeConfig
from epd.roles.encode.send_ring import SendRing, Slots

ROW_NBYTES, SLOT_NBYTES = 8, 16


class Ring:
    """Four slots of two rows, two of them at most for one peer."""

    def __init__(self, num_slots: int = 4, share: float = 0.5) -> None:
        region = SimpleNamespace(views=lambda slots, nbytes: (slots, nbytes))
        self.transfers: Any = SimpleNamespace(allocate=mock.Mock(return_value=region))
        self.engine = mock.Mock(
            contract=SimpleNamespace(row_nbytes=ROW_NBYTES), copy_out=mock.AsyncMock()
        )
        config = EncodeConfig(
            send_buffer_nbytes=num_slots * SLOT_NBYTES,
            send_slot_nbytes=SLOT_NBYTES,
            max_send_share_per_peer=share,
        )
        self.ring = SendRing(self.transfers, self.engine, config)

    def join(self, room: str, peer: str, num_slots: int) -> dict[str, Slots]:
        self.ring.join(room, peer, num_slots * SLOT_NBYTES)
        return dict(self.ring.grants())

    def live(self) -> tuple[int, int]:
        live = self.ring.live()
        return live["send_slots"], live["send_queue"]


async def test_rows_are_copied_into_leased_slots_until_they_are_released() -> None:
    made = Ring()
    made.transfers.allocate.assert_called_once_with("send", 4, SLOT_NBYTES)
    made.ring.join("a", "p0", 17)
    assert dict(made.ring.grants()) == {"a": (0, 1)} and not made.ring.waits("a")
    rows: Any = SimpleNamespace(nbytes=17)
    views: Any = await made.ring.copy(rows, (0, 1))
    assert views == ((0, 1), 17)
    made.engine.copy_out.assert_awaited_once_with(rows, views)
    assert made.live() == (2, 0)
    made.ring.release("a", (0, 1))
    made.ring.release("a", ())
    assert made.live() == (0, 0)


def test_one_peer_has_its_share_and_others_pass_it() -> None:
    made = Ring()
    assert made.join("a", "p0", 1) == {"a": (0,)}
    assert made.join("b", "p0", 2) == {}
    assert made.join("c", "p1", 2) == {"c": (1, 2)}
    assert made.live() == (3, 1) and made.ring.waits("b")
    made.ring.release("a", (0,))
    assert dict(made.ring.grants()) == {"b": (3, 0)}
    assert made.live() == (4, 0)


def test_a_room_that_is_released_leaves_the_queue() -> None:
    made = Ring()
    made.join("a", "p0", 2)
    assert made.join("b", "p0", 1) == {}
    made.ring.release("b", ())
    assert made.live() == (2, 0)
    made.ring.release("a", (0, 1))
    assert made.join("c", "p0", 1) == {"c": (2,)}


def test_what_is_larger_than_the_ring_does_not_fit() -> None:
    made = Ring()
    assert made.ring.fits(4 * SLOT_NBYTES) and not made.ring.fits(4 * SLOT_NBYTES + 1)
    assert made.join("a", "p0", 4) == {"a": (0, 1, 2, 3)}, "alone, whatever its share"


def test_a_ring_has_a_slot_and_each_peer_may_have_one() -> None:
    assert Ring(0).ring.pool.size == 1
    made = Ring(4, 0.1)
    assert [made.join(room, "p0", 1) for room in "ab"] == [{"a": (0,)}, {}]
