"""One TCP connection of the data plane: small frames both ways, and payload without a copy.

A frame is a length and a tagged struct in msgpack.  Payload has no frame of its own: the frame that
announces it has its length and place.  From then on the loop reads straight into those views
(`land`), until they are full.  Frames are read to their exact length, so that not one payload byte
takes a detour through another buffer.

`sever` is the fence of a connection: after it returns, each byte that still arrives goes into
scratch memory, until the socket is really closed.
"""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

from epd.messages import Message
from epd.transport.base import TransportError
from epd.transport.linked.frames import Declined, Done, decode, encode

LENGTH = struct.Struct("!I")
MAX_FRAME_NBYTES = 4 << 20  # a write into a hundred thousand slots
MAX_GREETING_NBYTES = 4 << 10  # of who has not proved anything: memory is taken for no more
CHUNK_NBYTES = 512 << 10  # of payload between two looks at the other tasks
SCRATCH_NBYTES = 256 << 10
MAX_UNANSWERED = 64  # landed writes of one connection whose answers are not sent yet


class WireLost(TransportError):
    """The connection is gone, or is not one; what it carried is in doubt."""


class Wire(asyncio.BufferedProtocol):
    """`on_frame` and `on_lost` are called on the loop and must not raise."""

    def __init__(
        self,
        on_frame: Callable[[Wire, Any], None],
        on_lost: Callable[[Wire], None],
        on_made: Callable[[Wire], None] = lambda wire: None,
    ) -> None:
        self.on_frame = on_frame
        self.on_lost = on_lost
        self._on_made = on_made
        self.peer = ("", 0)  # instance id and epoch, once proved
        self.host_id = ""
        self.nonce = b""
        self.turn = asyncio.Lock()  # payloads leave one after the other
        self.unanswered = 0
        self.severed = False
        self.max_frame_nbytes = MAX_GREETING_NBYTES
        self.refused = Counter[str]()  # why it was severed, where that is the peer's doing
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._answers: dict[int, asyncio.Future[Done | Declined]] = {}
        self._next_number = 0
        self._scratch = memoryview(bytearray(SCRATCH_NBYTES))
        self._into: list[memoryview] = []  # where the next bytes go, last first
        self._landed: Callable[[], None] | None = None
        self._discard_nbytes = 0
        self._head = memoryview(bytearray(LENGTH.size))
        self._part = self._head
        self._filled = 0

    # --- sending ----------------------------------------------------------------------------------

    def post(self, frame: Message) -> None:
        """Send a small frame; nothing happens if the connection is gone."""
        if self._transport is not None and not self.severed:
            body = encode(frame)
            self._transport.write(LENGTH.pack(len(body)) + body)

    def ask(self) -> tuple[int, asyncio.Future[Done | Declined]]:
        """A number for a write, and the future of its answer (WireLost if it never comes)."""
        self._next_number += 1
        future: asyncio.Future[Done | Declined] = asyncio.get_running_loop().create_future()
        if self.severed:
            future.set_exception(WireLost("the connection is lost"))
        self._answers[self._next_number] = future
        future.add_done_callback(_seen)
        return self._next_number, future

    async def look(self) -> None:
        """Let the loop notice that the peer has closed an idle connection: a few turns at most."""
        for _ in range(0 if self._answers else 3):
            await asyncio.sleep(0)

    def answer(self, frame: Done | Declined) -> None:
        future = self._answers.pop(frame.number, None)
        if future is not None and not future.done():
            future.set_result(frame)

    async def pour(self, payload: Sequence[memoryview], stall_timeout_s: float) -> None:
        """Send payload.  Raises WireLost when the connection breaks or makes no progress."""
        for view in payload:
            for start in range(0, view.nbytes, CHUNK_NBYTES):
                if self._transport is None or self.severed:
                    raise WireLost("the connection broke in the middle of a write")
                self._transport.write(view[start : start + CHUNK_NBYTES])
                await self._drained(stall_timeout_s)

    async def _drained(self, stall_timeout_s: float) -> None:
        try:
            async with asyncio.timeout(stall_timeout_s):
                await self._writable.wait()
        except TimeoutError:
            self.sever()
            raise WireLost(f"the peer took nothing for {stall_timeout_s:g} s") from None

    # --- receiving --------------------------------------------------------------------------------

    def land(self, views: Sequence[memoryview], done: Callable[[], None]) -> None:
        """The next bytes go into `views`, in order; `done` when they are full."""
        self._into = [view for view in reversed(views) if view.nbytes]
        self._landed = done
        self._payload_progressed()

    def discard(self, nbytes: int, done: Callable[[], None]) -> None:
        """The next bytes go nowhere."""
        self._discard_nbytes, self._landed = nbytes, done
        self._payload_progressed()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self.severed:
            return self._scratch
        if self._into:
            return self._into[-1]
        if self._discard_nbytes:
            return self._scratch[: min(self._discard_nbytes, SCRATCH_NBYTES)]
        return self._part[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        if self.severed:
            return
        if self._into:
            rest = self._into[-1][nbytes:]
            self._into[-1:] = [rest] if rest.nbytes else []
            self._payload_progressed()
        elif self._discard_nbytes:
            self._discard_nbytes -= nbytes
            self._payload_progressed()
        else:
            self._filled += nbytes
            if self._filled == self._part.nbytes:
                self._part_filled()

    def _payload_progressed(self) -> None:
        if self._landed is not None and not self._into and not self._discard_nbytes:
            done, self._landed = self._landed, None
            done()

    def _part_filled(self) -> None:
        part, self._filled = self._part, 0
        if part is self._head:
            (length,) = LENGTH.unpack(part)
            if not 0 < length <= self.max_frame_nbytes:
                self.refused["frame_length"] += 1
                self.sever()
                return
            self._part = memoryview(bytearray(length))
            return
        self._part = self._head
        try:
            frame = decode(part)
        except ValueError:  # not a frame of ours: nothing that follows can be trusted
            self.refused["malformed_frame"] += 1
            self.sever()
            return
        if isinstance(frame, Done | Declined):
            self.answer(frame)
        else:
            self.on_frame(self, frame)

    # --- answers of the landing side --------------------------------------------------------------

    def owe(self) -> None:
        """An answer is being worked out; too many of them stop the reading."""
        self.unanswered += 1
        if self.unanswered == MAX_UNANSWERED and self._transport is not None:
            self._transport.pause_reading()

    def pay(self, frame: Done | Declined) -> None:
        if self.unanswered == MAX_UNANSWERED and self._transport is not None:
            self._transport.resume_reading()
        self.unanswered -= 1
        self.post(frame)

    # --- the connection ---------------------------------------------------------------------------

    def sever(self) -> None:
        """Close now.  No byte lands after this, and what was not sent yet is not sent."""
        self.severed = True
        self._into = []
        self._landed = None
        if self._transport is not None and not self._transport.is_closing():
            self._transport.abort()

    def hang_up(self, last_message: Message) -> None:
        """Send one frame more and close; nothing that comes in counts."""
        self.post(last_message)
        self.severed = True
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one by duck typing
        self._transport.set_write_buffer_limits(high=0)  # at most one chunk is copied aside
        if self.severed:
            self._transport.abort()
            return
        self._on_made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.sever()
        self._writable.set()
        for future in self._answers.values():
            if not future.done():
                future.set_exception(WireLost("the connection broke before the answer came"))
        self._answers.clear()
        self.on_lost(self)

    def eof_received(self) -> bool:
        self.sever()
        return False

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()


def _seen(future: asyncio.Future[Done | Declined]) -> None:
    if not future.cancelled():
        future.exception()
