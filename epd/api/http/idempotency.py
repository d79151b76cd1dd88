"""A request that is sent again joins the generation that runs for it (header Idempotency-Key).

Theory of operation
-------------------
A client whose connection breaks does not see whether its request runs, and would pay twice.  With a
key of its own it may ask again.  The first request of a key is served apart from its connection: by
an exchange of its own, whose answer is recorded (`recording`).  The connection reads the recording
as any later one does, so all of them get the same bytes, whichever API is spoken.  When the last of
them is gone the generation goes on for a while, for a retry to find it, and is cancelled then as
any other.  A whole answer is kept for a while.  What failed is not: those that wait for it get the
error, and the next one runs anew.

A key counts for one API key and one tenant, and for one body.  The body is read to its end first,
since its digest decides, and since another gateway may be the one that has the key (`peers`).
Memory is bounded: answers that ended go first, the oldest ahead; one that alone does not fit is
sent, and not kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeAlias

from epd.api.http.body import Body, Intake
from epd.api.http.errors import ApiError, bad_request
from epd.api.http.exchange import AsgiMessage, ClientGone, Exchange
from epd.api.http.identity import tenant_of
from epd.api.http.recording import Recording
from epd.config import GatewayConfig

if TYPE_CHECKING:
    from epd.api.http.peers import Peers

NAME = "Idempotency-Key"
HEADER = NAME.lower().encode()
REPLAYED = (b"idempotent-replayed", b"true")
KEY = re.compile(rb"[!-~]{1,255}")  # printable ASCII

Handler: TypeAlias = Callable[[Exchange], Awaitable[None]]
Place: TypeAlias = tuple[str, str, bytes]  # API key, tenant, key of the request


class Whole(Body):
    """A request's body as it came."""

    def __init__(self, intake: Intake, announced_nbytes: int = 0) -> None:
        super().__init__(intake, announced_nbytes)
        self.chunks: deque[bytes] = deque()
        self.digest = hashlib.sha256()

    def _feed(self, chunk: bytes) -> None:
        self.chunks.append(chunk)
        self.digest.update(chunk)


class SharedRun(Recording):
    """One generation, and its answer."""

    def __init__(self, digest: bytes, chunks: deque[bytes]) -> None:
        super().__init__()
        self.digest = digest
        self._chunks = chunks
        self._is_unwanted = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None  # until it is forgotten

    async def receive(self) -> AsgiMessage:
        """What a connection would: the body, then that the client is gone."""
        if self._chunks:
            chunk = self._chunks.popleft()
            return {"type": "http.request", "body": chunk, "more_body": bool(self._chunks)}
        await self._is_unwanted.wait()
        return {"type": "http.disconnect"}

    def forget(self) -> None:
        """Without readers it is cancelled."""
        super().forget()
        self.forget_in(None)
        if not self.has_readers:
            self._is_unwanted.set()

    def forget_in(self, delay_s: float | None, forget: Callable[[], None] = lambda: None) -> None:
        """None: not by time."""
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = None if delay_s is None else loop.call_later(delay_s, forget)


class Idempotency:
    """Of one gateway."""

    def __init__(
        self,
        config: GatewayConfig,
        intake: Intake,
        answered: Callable[[Exchange, Handler], Awaitable[None]],
        tasks: set[asyncio.Task[None]],
        own_port: Callable[[], int],
    ) -> None:
        """`answered`: every outcome becomes an answer there; `tasks`: what the server waits for.
        Raises ConfigError."""
        self._config = config.idempotency
        self._peers: Peers | None = None
        if config.peers:
            from epd.api.http.peers import Peers

            self._peers = Peers(config, own_port)
        self._intake = intake
        self._answered = answered
        self._tasks = tasks
        self._runs: dict[Place, SharedRun] = {}  # those that ended are in that order
        self._nbytes = 0  # of their recordings, and of others that are still read

    def once(self, handler: Handler) -> Handler:
        """The handler, for requests with a key and for others."""

        async def handle(exchange: Exchange) -> None:
            if HEADER in exchange.headers:
                await self._serve(exchange, handler)
            else:
                await handler(exchange)

        return handle

    async def close(self) -> None:
        if self._peers is not None:
            await self._peers.close()

    async def _serve(self, exchange: Exchange, handler: Handler) -> None:
        """Raises ApiError, ClientGone."""
        key = exchange.headers[HEADER]
        if not KEY.fullmatch(key):
            message = f"{NAME} takes 1 to 255 characters of printable ASCII, without spaces"
            raise bad_request(message, NAME)
        whole = Whole(self._intake, exchange.announced_nbytes)
        await exchange.read_body(whole, self._intake.limits.read_timeout_s)
        whole.digest.update(exchange.path.encode())
        caller, digest = exchange.caller, whole.digest.digest()
        place = caller.share, tenant_of(exchange.headers, "", caller.scope), key
        run = self._runs.get(place)
        if run is None and self._peers is not None:
            if await self._peers.serve(f"{place}", exchange, whole.chunks):
                return
            run = self._runs.get(place)
        if run is None:
            run = self._begin(place, SharedRun(digest, whole.chunks), exchange, handler)
        elif run.digest != digest:
            message = f"{NAME} was sent with another request before; each one takes a new key"
            raise ApiError(422, message, param=NAME, code="idempotency_key_reused")
        else:
            exchange.more_headers.append(REPLAYED)
        whole.close()  # to be counted where it is read again
        await self._follow(place, run, exchange)

    async def _follow(self, place: Place, run: SharedRun, exchange: Exchange) -> None:
        if not run.is_over:
            run.forget_in(None)
        reader = run.join()
        exchange.on_disconnect(run.ring)
        try:
            while not exchange.disconnected:
                if (message := run.take(reader)) is not None:
                    await exchange.relay(message)
                elif run.is_over:
                    return
                else:
                    await run.changed()
            raise ClientGone
        finally:
            run.leave(reader)
            if not run.is_kept:
                self._forget(place, run)
            elif not run.is_over and not run.has_readers:
                run.forget_in(self._config.linger_s, lambda: self._forget(place, run))

    def _begin(
        self, place: Place, run: SharedRun, exchange: Exchange, handler: Handler
    ) -> SharedRun:
        if len(self._runs) >= self._config.max_answers and not self._forget_oldest():
            message = f"too many requests with {NAME} are open; try again later"
            raise ApiError(429, message, code="overloaded")
        self._runs[place] = run

        async def send(message: AsgiMessage) -> None:
            before = run.nbytes
            run.append(message)
            self._nbytes += run.nbytes - before
            while run.is_kept and self._nbytes > self._config.max_nbytes:
                if not self._forget_oldest():
                    self._forget(place, run)
            while run.is_full:
                await run.changed()

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
            run.end()
            if exchange.is_whole and run.is_kept:
                self._runs[place] = self._runs.pop(place)
                run.forget_in(self._config.keep_s, lambda: self._forget(place, run))
            else:
                self._forget(place, run)

    def _forget(self, place: Place, run: SharedRun) -> None:
        """From now on a request with its key is a new one."""
        run.forget()
        if self._runs.get(place) is run:
            del self._runs[place]
        if not run.has_readers:
            self._nbytes -= run.nbytes
            run.nbytes = 0

    def _forget_oldest(self) -> bool:
        """Whether there was one that has ended."""
        for place, run in self._runs.items():
            if run.is_over:
                self._forget(place, run)
                return True
        return False
