"""One HTTP request and its response, over raw ASGI: bounded reading, plain answers, disconnects.

A body is read under a size and a time limit.  An answer before the body was read (too large, too
slow) ends with a lingering close: the response leaves whole, then the client's bytes are dropped
for a moment.  Closing with unread bytes would reset the connection and destroy the answer on its
way.

A streamed answer is server-sent events (fault F34).  Its status line leaves with the first one and
not before, so that what fails earlier is answered with its own status.  After it, an error can only
be sent in-band: an event with an error object, and no `[DONE]`, so that no client takes the answer
for whole.

Only a task that waits in `receive` notices that a client leaves: `on_disconnect` keeps one per
exchange there.  It ends by itself, with the connection or with the response.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextvars import ContextVar
from typing import ParamSpec, Required, TypedDict, TypeVar

import msgspec

from epd.api.http import unknown
from epd.api.http.body import Body, Intake
from epd.api.http.errors import ApiError, bad_request, failure_event, openai_body, retry_after
from epd.api.http.identity import Caller
from epd.frontend import JsonObject

Headers = list[tuple[bytes, bytes]]


class Scope(TypedDict, total=False):
    """The keys of ASGI's scope that are read."""

    type: Required[str]
    method: Required[str]
    path: Required[str]
    query_string: bytes
    scheme: str
    client: tuple[str, int] | None
    headers: Required[Headers]


class AsgiMessage(TypedDict, total=False):
    """Messages of ASGI, both ways."""

    type: Required[str]
    body: bytes
    more_body: bool
    status: int
    headers: Headers


Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
P = ParamSpec("P")
A = TypeVar("A")
T = TypeVar("T")

JSON = b"application/json"
EVENTS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must not collect events
]
REQUEST_ID = re.compile(rb"[!-~]{1,128}")  # printable ASCII: safe in a header and in a log line
LINGER_S = 1.0
LINGER_NBYTES = 64 << 20  # a client that had all of a body sent anyway reads why it was refused

_encode = msgspec.json.Encoder().encode
log = logging.getLogger(__name__)


class ClientGone(Exception):
    """The client closed the connection before its request was read: nobody to answer."""


_watched: ContextVar[Exchange | None] = ContextVar("watched", default=None)


def while_wanted(function: Callable[P, T]) -> Callable[P, T]:
    """The function for a thread's queue: it is not begun if its client has left meanwhile.

    Raises ClientGone there.
    """
    exchange = _watched.get()

    def call(*arguments: P.args, **more: P.kwargs) -> T:
        if exchange is not None and exchange.disconnected:
            raise ClientGone
        return function(*arguments, **more)

    return call


async def together(
    work: Callable[[A], Coroutine[object, object, T]], items: Iterable[A]
) -> list[T]:
    """Its results.  If one fails, or the client leaves, nobody goes on with the rest.

    Raises ClientGone there.
    """
    exchange = _watched.get()
    results = asyncio.ensure_future(_each(work, items))
    cancel = results.cancel
    if exchange is not None:
        exchange.ends.add(cancel)
    try:
        return await results
    except asyncio.CancelledError:
        if exchange is not None and exchange.disconnected:
            raise ClientGone from None
        raise
    finally:
        if exchange is not None:
            exchange.ends.discard(cancel)


async def _each(work: Callable[[A], Coroutine[object, object, T]], items: Iterable[A]) -> list[T]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work(item)) for item in items]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def count_fetched(nbytes: int) -> None:
    """Of the request that is served; as if they had come in its body.  Raises ApiError 429."""
    exchange = _watched.get()
    if exchange is not None and exchange.body is not None:
        exchange.body.count(nbytes)


def _nothing() -> None:
    pass


class Exchange:
    """What a handler may do with one request."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query = scope.get("query_string", b"").decode("latin-1")
        self.scheme: str = scope.get("scheme", "http")
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.request_id = (
            b""  # goes out as x-request-id once it is known; the client's if it has one
        )
        self.traceresponse = b""  # likewise
        self.caller = Caller()  # once it was asked for its key
        self.address = (scope.get("client") or ("",))[0]
        self.generation_id = ""  # the gateway's own name for it, once it is admitted
        self.num_input_tokens = 0
        self.num_output_tokens = 0
        self.error_body = openai_body  # in the form of the API that is spoken
        self.failure = failure_event  # of a stream; an API's own once its answer has begun
        self.started = False
        self.status = 0  # until the answer starts
        self.began_s = time.monotonic()
        self.disconnected = False
        self.ends: set[Callable[[], object]] = set()  # called if the client leaves
        self._is_read = self.method in ("GET", "HEAD", "OPTIONS")
        self.give_back: Callable[[], None] = _nothing  # what it holds until its first token
        self.more_headers: Headers = []  # of whatever the answer is
        self.is_counted = True  # its end; False: another exchange makes the answer, and counts
        self._has_failed = False
        self._is_answered = False
        self._receive = receive
        self._send = send
        self._watcher: asyncio.Task[None] | None = None
        self.body: Body | None = None

    @property
    def age_s(self) -> float:
        """Since the request's head was read."""
        return time.monotonic() - self.began_s

    def __str__(self) -> str:
        """For log lines."""
        named = f" ({self.request_id.decode()})" if self.request_id else ""
        return f"{self.method} {ascii(self.path[:200])[1:-1]}{named}"

    # --- reading ----------------------------------------------------------------------------------

    def read_request_id(self) -> None:
        """Take the client's name for its request.  Raises ApiError 400."""
        name = self.headers.get(b"x-request-id", b"")
        if name and not REQUEST_ID.fullmatch(name):
            message = (
                f"the header X-Request-Id has {len(name)} characters; send 1 to 128 of printable "
                "ASCII, without spaces, or leave it out"
            )
            raise bad_request(message, "X-Request-Id")
        self.request_id = name

    def named_here(self, request_id: str) -> None:
        """The gateway's own name: unique in the cluster, whatever clients send."""
        self.generation_id = request_id
        if self.request_id:
            log.info("%s is request %s", self, request_id)
        else:
            self.request_id = request_id.encode()

    async def read_json(self, intake: Intake, timeout_s: float) -> JsonObject:
        """The body as a JSON object.  Raises ApiError 400, 408, 413, 415, 429, or ClientGone."""
        self._check_headers()
        await self.read_body(Body(intake, self.announced_nbytes), timeout_s)
        assert self.body is not None
        value = await self.body.parse()
        if names := self.body.left_out:
            self.more_headers.append((unknown.HEADER, intake.unknown.told(names)))
        return value

    @property
    def announced_nbytes(self) -> int:
        """Length of the body; 0: it has none, or comes in chunks."""
        length = self.headers.get(b"content-length", b"")
        return int(length) if length.isdigit() and len(length) < 20 else 0

    async def read_body(self, body: Body, timeout_s: float) -> None:
        """All of it, into `body`.  Raises ApiError 408, 413, 429, or ClientGone."""
        self.body = body
        try:
            async with asyncio.timeout(timeout_s):
                await self._read(body)
        except TimeoutError as error:
            message = f"the request body did not arrive within {timeout_s:g} s"
            raise ApiError(408, message, code="request_timeout") from error

    def apart(self, receive: Receive, send: Send) -> Exchange:
        """The same request, to be read and answered another way; it is counted there."""
        other = Exchange(self._scope, receive, send)
        other.caller, other.request_id, other.error_body = (
            self.caller,
            self.request_id,
            self.error_body,
        )
        other.began_s, self.is_counted = self.began_s, False
        return other

    def close(self) -> None:
        """The request has ended, however it did."""
        self.give_back()
        if self.body is not None:
            self.body.close()

    def _check_headers(self) -> None:
        content_type = self.headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if content_type not in (b"", JSON):
            sent = content_type.decode("latin-1")
            message = f"content type '{sent}' is not supported: send application/json"
            raise ApiError(415, message, code="unsupported_media_type")
        encoding = self.headers.get(b"content-encoding", b"identity").lower()
        if encoding != b"identity":
            sent = encoding.decode("latin-1")
            message = f"content encoding '{sent}' is not supported: send the body as it is"
            raise ApiError(415, message, code="unsupported_media_type")

    async def _read(self, body: Body) -> None:
        while not self._is_read:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.disconnected = True
                raise ClientGone
            self._is_read = not message.get("more_body", False)
            await body.read(message["body"])

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        """Call back once if the client leaves before the response is complete."""
        self._watcher = asyncio.create_task(self._watch(callback))
        _watched.set(self)  # of the task that serves it, and of those that it begins

    async def _watch(self, callback: Callable[[], None]) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                break
        if not self._is_answered:
            self.disconnected = True
            for end in self.ends:
                end()
            callback()

    # --- answering --------------------------------------------------------------------------------

    async def respond(
        self, status: int, body: bytes, content_type: bytes = JSON, headers: Headers | None = None
    ) -> None:
        """A whole response."""
        all_headers = [
            (b"content-type", content_type),
            (b"content-length", b"%d" % len(body)),
            *(headers or ()),
        ]
        if not self._is_read:
            all_headers.append((b"connection", b"close"))
        await self.start(status, all_headers)
        await self.write(body, more=not self._is_read)
        if not self._is_read:
            await self._linger()
            await self.write(b"", more=False)

    async def respond_json(
        self, status: int, value: object, headers: Headers | None = None
    ) -> None:
        await self.respond(status, _encode(value), JSON, headers)

    async def respond_error(self, error: ApiError) -> None:
        """The error in the API's form, with Retry-After where there is one."""
        all_headers = list(error.headers)
        if error.may_be_retried:
            all_headers.append(retry_after(error.retry_after_s))
        body = self.error_body(error, self.request_id.decode())
        await self.respond_json(error.status, body, all_headers)

    async def start(self, status: int, headers: Headers) -> None:
        """Status line and headers; from here on an error can only be sent in the body."""
        self.started = True
        self.status = status
        if self.request_id:
            headers.append((b"x-request-id", self.request_id))
        if self.traceresponse:
            headers.append((b"traceresponse", self.traceresponse))
        headers.extend(self.more_headers)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, body: bytes, *, more: bool) -> None:
        if self._is_answered:
            return  # a reader left behind by the failure of its sibling
        self._is_answered = not more
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def relay(self, message: AsgiMessage) -> None:
        """A part of the answer that another exchange made; this one's name stays its own."""
        if message["type"] == "http.response.start":
            own = bool(self.request_id)
            headers = [h for h in message["headers"] if not (own and h[0] == b"x-request-id")]
            await self.start(message["status"], headers)
        else:
            await self.write(message["body"], more=message["more_body"])

    @property
    def is_whole(self) -> bool:
        """The answer has left, and is none of an error."""
        return self.status == 200 and self._is_answered and not self._has_failed

    async def send_events(self, events: bytes, *, more: bool = True) -> None:
        """One write of any number of whole events; the first one brings the headers."""
        if not self.started:
            await self.start(200, list(EVENTS))
        await self.write(events, more=more)

    async def fail_events(self, error: ApiError) -> None:
        """An error after the headers: sent in-band, and the stream ends unfinished."""
        self._has_failed = True
        await self.write(self.failure(error), more=False)

    async def _linger(self) -> None:
        """Drop what the client still sends, for a bounded time and size."""
        nbytes = 0
        try:
            async with asyncio.timeout(LINGER_S):
                while nbytes < LINGER_NBYTES:
                    message = await self._receive()
                    nbytes += len(message.get("body", b""))
                    if message["type"] == "http.disconnect" or not message.get("more_body"):
                        return
        except TimeoutError:
            log.debug("a client kept sending after its answer; closed")
