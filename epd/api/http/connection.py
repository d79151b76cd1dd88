"""One client connection: uvicorn's HTTP parser, with the bounds that it leaves to a proxy.

A request's head has a size and a time limit.  A client that stops reading is dropped, so that a
stalled write ends as a disconnect, also when the answer is complete. One that reads slowly is not:
what counts is that the kernel gets rid of something. What is no HTTP is answered as JSON.  Timers
are per connection and per stall, never per token.

A request may offer another protocol (h2c by java.net.http and curl, TLS, websocket).  No offer is
taken: the request goes on over HTTP/1.1 as if there were none (RFC 9110, section 7.8; F74).  llhttp
ends a message behind a head with an offer, and takes the body for the other protocol.  So the head
is parsed again without the offer, in front of what followed it.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import resource
import select
import sys
import termios
from typing import TYPE_CHECKING

import httptools
import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from epd.api.http.errors import ApiError, bad_request
from epd.config import GatewayConfig

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application, ASGISendEvent

MAX_HEAD_NBYTES = 64 << 10
MAX_PIPELINED = 32  # sent before their turn; thousands of small ones would be parsed in one go
BEHIND_S = 1.0  # between looks whether a client is there whose requests wait for their turn
KEEP_ALIVE_S = 75
BACKLOG = 2048
RESERVED_FILES = 256  # of those that the process may open: for all else than connections
OFFERS = (b"upgrade", b"http2-settings")  # headers, and words of the header Connection


def most_connections() -> int:
    """So many that pictures, grammars and instances still find a file to open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return sys.maxsize if hard == resource.RLIM_INFINITY else max(hard // 2, hard - RESERVED_FILES)


def _without_chunks(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """HTTP/1.0 has none: a stream ends with its connection (RFC 9112, section 6.1)."""

    async def plain(message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start":
            if not any(name.lower() == b"content-length" for name, _ in message["headers"]):
                cycle.chunked_encoding = cycle.keep_alive = False
        elif message["type"] == "http.response.body" and not cycle.expected_content_length:
            cycle.expected_content_length = len(message["body"])  # uvicorn compares them
        await cycle.send(message)

    return lambda scope, receive, send: app(scope, receive, plain)


class Connection(HttpToolsProtocol):
    """Made by the listener, once per accepted socket."""

    def __init__(
        self, config: Config, state: ServerState, read_timeout_s: float, write_timeout_s: float
    ) -> None:
        super().__init__(config, state, {})
        self._read_timeout_s = read_timeout_s
        self._write_timeout_s = write_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._unread_nbytes = 0  # at the last look
        self._head_nbytes = 0
        self._behind_timer: asyncio.TimerHandle | None = None
        self._served: RequestResponseCycle | None = None  # `cycle` is the last that was read

    def connection_made(  # type: ignore[override]  # as uvicorn declares it
        self, transport: asyncio.Transport
    ) -> None:
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            text = "this gateway has as many connections as it can; close some, and try again"
            self._refuse(b"503 Service Unavailable", ApiError(503, text, code="overloaded"))
            transport.close()
        else:
            self._arm_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm_head()
        self._disarm_write()
        if self._behind_timer is not None:
            self._behind_timer.cancel()
        super().connection_lost(exc)
        if (served := self._served) is not None and not served.response_complete:
            served.disconnected = True  # uvicorn notes it of the last one, which may wait behind
            served.message_event.set()

    # --- requests that wait for their turn --------------------------------------------------------

    def _arm_behind(self) -> None:
        """Reading is paused while one waits, so that a client's end would not be seen."""
        if self.pipeline and self._behind_timer is None:
            self._behind_timer = self.loop.call_later(BEHIND_S, self._look_behind)

    def _look_behind(self) -> None:
        self._behind_timer = None
        look = select.poll()
        look.register(self.transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        if look.poll(0):
            self._drop()
        else:
            self._arm_behind()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._served = cycle
        is_old = cycle.scope["http_version"] == "1.0"
        super()._start_asgi_task(cycle, _without_chunks(cycle, app) if is_old else app)

    # --- the head of a request --------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if not self._has_offer:  # CONNECT: what follows is no HTTP
                return
            head = self._head_without_offer()
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.data_received(head + data[offer.args[0] :])
        except httptools.HttpParserError as error:
            self.send_400_response(str(error))

    @property
    def _has_offer(self) -> bool:
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def _head_without_offer(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                words = (word.strip() for word in value.split(b","))
                value = b", ".join(word for word in words if word.lower() not in OFFERS)
            if name not in OFFERS and (value or name != b"connection"):
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many requests at once")  # the parser stops; answered below
        self._head_nbytes = 0
        self._arm_head()
        if not self.flow.write_paused:
            self._disarm_write()  # of an answer that was complete
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._disarm_head()
        if not self._has_offer:
            super().on_headers_complete()
            self._arm_behind()

    def on_message_complete(self) -> None:
        if not self._has_offer:
            super().on_message_complete()

    def _count_head(self, nbytes: int) -> None:
        self._head_nbytes += nbytes
        if self._head_nbytes > MAX_HEAD_NBYTES:
            raise ValueError("head too large")  # the parser stops; answered below

    def _arm_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._read_timeout_s, self._late_head)

    def _disarm_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _late_head(self) -> None:
        self._head_timer = None
        if self.pipeline:  # nothing is read meanwhile: the rest may be there
            self._arm_head()
        else:
            self._drop()

    def send_400_response(self, msg: str) -> None:
        """Not HTTP, or a head that is too large; inside a response nothing is written."""
        served = self._served  # None before the first request
        if served is None or served.response_complete or not served.response_started:
            text = (
                f"the request is not valid HTTP/1.1, its head is over {MAX_HEAD_NBYTES} bytes, or "
                f"over {MAX_PIPELINED} were sent without waiting for an answer"
            )
            self._refuse(b"400 Bad Request", bad_request(text, code="invalid_http"))
        self.transport.close()

    def _refuse(self, status: bytes, error: ApiError) -> None:
        body = msgspec.json.encode(error.body)
        self.transport.write(
            b"HTTP/1.1 %b\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (status, len(body), body)
        )

    # --- a client that does not read --------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._arm_write()

    def on_response_complete(self) -> None:
        is_last = not self.pipeline
        super().on_response_complete()
        if is_last and self.transport.get_write_buffer_size():
            self._arm_write()

    def _arm_write(self) -> None:
        if self._write_timer is None:
            self._unread_nbytes = self._count_unread()
            self._write_timer = self.loop.call_later(self._write_timeout_s, self._look)

    def _look(self) -> None:
        """Nothing is written meanwhile, so that what is unread only gets less."""
        self._write_timer = None
        if not self.transport.get_write_buffer_size():
            return
        if self._count_unread() >= self._unread_nbytes:
            self._drop()
        else:
            self._arm_write()

    def _count_unread(self) -> int:
        """By the client's host: bytes of our buffer, and of the kernel's."""
        sock = self.transport.get_extra_info("socket")
        left = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
        return self.transport.get_write_buffer_size() + int.from_bytes(left, sys.byteorder)

    def resume_writing(self) -> None:
        self._disarm_write()
        super().resume_writing()

    def _disarm_write(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _drop(self) -> None:
        self.transport.abort()


def cannot_listen(config: GatewayConfig, error: OSError) -> str:
    where = f"{config.host}:{config.port}"
    if error.errno == errno.EADDRINUSE:
        return f"{where} is in use; stop what listens there, or choose another port (--port)"
    if error.errno == errno.EACCES:
        return (
            f"{where} may not be listened on by this user; choose a port of 1024 or above (--port)"
        )
    return f"cannot listen on {where} ({error.strerror or error}); check host and port"
