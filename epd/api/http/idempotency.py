"""A request that is sent again joins the generation that runs for it (header Idempotency-Key).

Theory of operation
-------------------
Whose connection breaks cannot know whether its request runs, and would pay for it twice.  With a
key of its own it may ask again.  The first request of a key is served apart from its connection: by
an exchange of its own, whose answer is recorded (`recording`).  The connection reads the recording
as any later one does, from the beginning, so all of them get the same bytes, whichever API is
spoken.  When the last of them is gone the generation goes on for a while, for a retry to find it,
and is cancelled then as any other.  A whole answer is kept for a while.  What failed is not kept:
those that wait for it get the error, and the next one runs anew.

A key counts for one API key and one tenant, and for one body.  The body is read to its end before,
since its digest decides.  Memory is bounded: answers that ended go first, the oldest ahead; an
answer that alone does not fit is sent, and not kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from epd.api.http.body import Body, Intake
from epd.api.http.errors import ApiError, bad_request
from epd.api.http.exchange import AsgiMessage, ClientGone, Exchange
from epd.api.http.identity import tenant_of
from epd.api.http.recording import Recording
from epd.config import IdempotencyConfig

NAME = "Idempotency-Key"
HEADER = NAME.lower().encode()
REPLAYED = b"idempotent-replayed"
KEY = re.compile(rb"[!-~]{1,255}")  # printable ASCII

Handler: TypeAlias = Callable[[Exchange], Awaitable[None]]
Place: TypeAlias = tuple[str, str, bytes]  # API key, tenant, key of the request


class Whole(Body):
    """A request's body as it came."""

    def __init__(self, intake: Intake, announced_nbytes: int = 0) -> None:
        super().__init__(intake, announced_nbytes)
        self._chunks: list[bytes] = []
        self._digest = hashlib.sha256()

    def _feed(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._digest.update(chunk)

    def digest(self, path: str) -> bytes:
        """Of the request; once it is read."""
        self._digest.update(path.encode())
        return self._digest.digest()

    def pieces(self) -> list[AsgiMessage]:
        """To be read once more, and counted there."""
        chunks = self._chunks
        self.close()
        last = len(chunks) - 1
        return [
            {"type": "http.request", "body": chunk, "more_body": at < last}
            for at, chunk in enumerate(chunks)
        ]


class SharedRun:
    """One generation, and its answer."""

    def __init__(
        self, digest: bytes, pieces: list[AsgiMessage], count: Callable[[int], None]
    ) -> None:
        self.digest = digest
        self.recording = Recording(count)
        self.is_unwanted = asyncio.Event()
        self.timer: asyncio.TimerHandle | None = None  # ends it, or forgets its answer
        self._pieces = iter(pieces)

    async def receive(self) -> AsgiMessage:
        """What a connection would receive: the body, then that the client is gone."""
        for piece in self._pieces:
            return piece
        await self.is_unwanted.wait()
        return {"type": "http.disconnect"}

    def disarm(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Idempotency:
    """Of one gateway."""

    def __init__(
        self,
        config: IdempotencyConfig,
        intake: Intake,
        answered: Callable[[Exchange, Handler], Awaitable[None]],
        tasks: set[asyncio.Task[None]],
    ) -> None:
        """`answered`: every outcome becomes an answer there; `tasks`: what the server waits for."""
        self._config = config
        self._intake = intake
        self._answered = answered
        self._tasks = tasks
        self._runs: dict[
            Place, SharedRun
        ] = {}  # those that ended behind each other, the oldest ahead
        self._nbytes = 0  # of their recordings

    def once(self, handler: Handler) -> Handler:
        """The handler, for requests with a key and for others."""

        async def handle(exchange: Exchange) -> None:
            if HEADER in exchange.headers:
                await self._serve(exchange, handler)
            else:
                await handler(exchange)

        return handle

    async def _serve(self, exchange: Exchange, handler: Handler) -> None:
        """Raises ApiError, ClientGone."""
        key = exchange.headers[HEADER]
        if not KEY.fullmatch(key):
            message = f"{NAME} takes 1 to 255 characters of printable ASCII, without spaces"
            raise bad_request(message, NAME)
        whole = Whole(self._intake, exchange.announced_nbytes)
        await exchange.read_body(whole, self._intake.limits.read_timeout_s)
        caller, digest = exchange.caller, whole.digest(exchange.path)
        place = caller.share, tenant_of(exchange.headers, "", caller.scope), key
        run = self._runs.get(place)
        if run is None:
            run = self._begin(place, digest, exchange, handler, whole)
        elif run.digest != digest:
            message = f"{NAME} was sent with another request before; each one takes a new key"
            raise ApiError(422, message, param=NAME, code="idempotency_key_reused")
        else:
            whole.close()
            exchange.more_headers.append((REPLAYED, b"true"))
        await self._follow(place, run, exchange)

    async def _follow(self, place: Place, run: SharedRun, exchange: Exchange) -> None:
        recording = run.recording
        if not recording.is_over:
            run.disarm()
        reader = recording.join()
        exchange.on_disconnect(recording.ring)
        try:
            while not exchange.disconnected:
                if (message := recording.take(reader)) is not None:
                    await exchange.relay(message)
                elif recording.is_over:
                    return
                else:
                    await recording.changed()
            raise ClientGone
        finally:
            recording.leave(reader)
            if not recording.is_over and not recording.has_readers:
                linger_s = self._config.linger_s if recording.is_kept else 0.0
                self._arm(run, linger_s, place)

    # --- its life ---------------------------------------------------------------------------------

    def _begin(
        self, place: Place, digest: bytes, exchange: Exchange, handler: Handler, whole: Whole
    ) -> SharedRun:
        if len(self._runs) >= self._config.max_answers and not self._forget_oldest():
            message = f"too many requests with {NAME} are open; try again later"
            raise ApiError(429, message, code="overloaded")
        run = self._runs[place] = SharedRun(digest, whole.pieces(), self._count)

        async def send(message: AsgiMessage) -> None:
            await self._record(place, run, message)

        apart = exchange.apart(run.receive, send)
        task = asyncio.create_task(self._run(place, run, apart, handler))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return run

    async def _run(
        self, place: Place, run: SharedRun, exchange: Exchange, handler: Handler
    ) -> None:
        try:
            await self._answered(exchange, handler)
        finally:
            run.recording.end()
            if exchange.is_whole and self._runs.get(place) is run:
                self._runs[place] = self._runs.pop(place)
                self._arm(run, self._config.keep_s, place)
            else:
                self._forget(place, run)

    def _arm(self, run: SharedRun, delay_s: float, place: Place) -> None:
        run.disarm()
        loop = asyncio.get_running_loop()
        run.timer = loop.call_later(delay_s, self._forget, place, run)

    def _forget(self, place: Place, run: SharedRun) -> None:
        """From now on a request with its key is a new one.  Without readers it is cancelled."""
        run.disarm()
        run.recording.forget()
        if self._runs.get(place) is run:
            del self._runs[place]
        if not run.recording.has_readers:
            run.is_unwanted.set()

    # --- its bounds -------------------------------------------------------------------------------

    async def _record(self, place: Place, run: SharedRun, message: AsgiMessage) -> None:
        run.recording.append(message)
        while self._nbytes > self._config.max_nbytes:
            if not self._forget_oldest():
                self._forget(place, run)
                break
        while run.recording.is_full:
            await run.recording.changed()

    def _count(self, nbytes: int) -> None:
        self._nbytes += nbytes

    def _forget_oldest(self) -> bool:
        """Whether there was one that has ended."""
        for place, run in self._runs.items():
            if run.recording.is_over:
                self._forget(place, run)
                return True
        return False
