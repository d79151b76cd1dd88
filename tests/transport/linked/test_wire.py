"""Bytes of one connection: frames, payload into its views, and what nobody wants."""

from __future__ import annotations

from typing import Any

import pytest

from epd.transport.linked.frames import Challenge, encode
from epd.transport.linked.wire import LENGTH, SCRATCH_NBYTES, Wire

NEXT = Challenge(nonce=b"next")


def frame(message: Any) -> bytes:
    body = encode(message)
    return LENGTH.pack(len(body)) + body


class Receiver:
    """A wire that is fed as the loop feeds it, by at most `most` bytes at a time."""

    def __init__(self, most: int = 1 << 20) -> None:
        self.frames: list[Any] = []
        self.wire = Wire(lambda wire, frame: self.frames.append(frame), lambda wire: None)
        self._most = most

    def feed(self, data: bytes) -> None:
        while data:
            into = self.wire.get_buffer(-1)
            count = min(into.nbytes, len(data), self._most)
            into[:count] = data[:count]
            self.wire.buffer_updated(count)
            data = data[count:]


@pytest.mark.parametrize(
    ("nbytes", "most"),
    [
        *((nbytes, most) for nbytes in (0, 1, 5000) for most in (1, 1000, 1 << 20)),
        *((SCRATCH_NBYTES + n, most) for n in (0, 1) for most in (1000, 1 << 20)),
    ],
)
def test_what_is_not_wanted_ends_where_the_next_frame_begins(nbytes: int, most: int) -> None:
    receiver, done = Receiver(most), []
    receiver.wire.discard(nbytes, lambda: done.append(True))
    assert bool(done) == (not nbytes), "what is nothing is over at once"
    receiver.feed(bytes(nbytes) + frame(NEXT))
    assert done == [True]
    assert receiver.frames == [NEXT]


@pytest.mark.parametrize("most", [1, 7, 1 << 20])
def test_payload_fills_its_views_in_order_and_no_other_byte_does(most: int) -> None:
    receiver, done = Receiver(most), []
    memory = bytearray(10)
    views = [memoryview(memory)[4:8], memoryview(memory)[:0], memoryview(memory)[:2]]
    receiver.wire.land(views, lambda: done.append(True))
    receiver.feed(b"abcdef" + frame(NEXT))
    assert bytes(memory) == b"ef\0\0abcd\0\0"
    assert done == [True]
    assert receiver.frames == [NEXT]


def test_what_was_severed_lands_nowhere_and_holds_no_memory() -> None:
    receiver = Receiver()
    memory = bytearray(10)
    receiver.wire.land([memoryview(memory)], lambda: pytest.fail("it never landed"))
    receiver.feed(b"abc")
    receiver.wire.sever()
    receiver.feed(b"defghijklm" + frame(NEXT))
    assert bytes(memory) == b"abc" + bytes(7)
    assert receiver.frames == []
    memory.append(0)  # raises BufferError while somebody has a view of it
