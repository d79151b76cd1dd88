"""Which gateway has a request with an Idempotency-Key, and the way there.

Gateways over the same instances have nothing of each other but their addresses.  Each key has an
order of them by rendezvous hashing, the same at all: the first that answers runs the request.
Others hand it on as it is, with the client's own API key, which is checked there, and pass on the
bytes of the answer.  What was handed on bears a header, and goes no further.  A client that sends
this header has its request run where it came, and gains nothing.

A name may have several addresses, as that of a headless Service, and they come and go.  It is
looked up again when the last look is `FRESH_S` old.  While gateways have different addresses, one
key may run at two of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Iterator
from typing import TYPE_CHECKING, TypeAlias

from epd.api.http.errors import ApiError
from epd.api.http.exchange import ClientGone, Exchange
from epd.config import ConfigError, GatewayConfig

if TYPE_CHECKING:
    import aiohttp
    import yarl

Peer: TypeAlias = tuple[str, int]  # an IP address and a port
HANDED_ON = b"x-epd-handed-on"
FRESH_S = 5.0
REACHED_WITHIN_S = 1.0
OF_CONNECTION = b"connection date expect host http2-settings keep-alive origin server te".split()
OF_CONNECTION += [b"transfer-encoding", b"upgrade"]


def ranked(key: str, peers: Iterable[Peer]) -> list[Peer]:
    """Whose the key is, then whose it would be without that one, and so on."""
    return sorted(peers, key=lambda peer: hashlib.sha256(f"{peer} {key}".encode()).digest())


class Peers:
    """Of one gateway."""

    def __init__(self, config: GatewayConfig, own_port: Callable[[], int]) -> None:
        """Raises ConfigError."""
        import yarl

        self._access, self._own_port = config.access, own_port
        self._longest_s = config.timing.request_timeout_s
        self._urls = [yarl.URL(text) for text in config.peers]
        for url in self._urls:
            if url.scheme not in ("http", "https") or not url.host or url.path != "/":
                raise ConfigError(f"--peers {url}: write a gateway's address: http://HOST:PORT")
        self._found: dict[Peer, yarl.URL] = {}
        self._looked_s = -FRESH_S
        self._session: aiohttp.ClientSession | None = None

    async def serve(self, key: str, exchange: Exchange, body: Collection[bytes]) -> bool:
        """Whether another has answered; else it is to run here.  Raises ApiError, ClientGone."""
        if HANDED_ON in exchange.headers:
            return False
        await self._look_up()
        for peer in ranked(key, self._found):
            if peer[1] == self._own_port() and _is_of_this_host(peer[0]):
                return False
            if await self._unless_gone(self._hand_on(peer, exchange, body), exchange):
                return True
        return False

    async def _unless_gone(self, work: Coroutine[object, object, bool], exchange: Exchange) -> bool:
        """Its connections are closed as soon as the client's own is.  Raises ClientGone."""
        is_over = False
        try:
            async with asyncio.timeout(None) as bound:

                def end() -> None:
                    if not is_over:
                        bound.reschedule(0.0)

                exchange.on_disconnect(end)
                try:
                    return await work
                finally:
                    is_over = True
        except TimeoutError:
            raise ClientGone from None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _look_up(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() - self._looked_s < FRESH_S:
            return
        self._looked_s = loop.time()
        found: dict[Peer, yarl.URL] = {}
        for url in self._urls:
            try:
                async with asyncio.timeout(REACHED_WITHIN_S):
                    infos = await loop.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
                found |= {(str(place[0]), int(place[1])): url for *_, place in infos}
            except (OSError, TimeoutError):  # as they were
                found |= {peer: of for peer, of in self._found.items() if of == url}
        self._found = found

    async def _hand_on(self, peer: Peer, exchange: Exchange, body: Collection[bytes]) -> bool:
        """Whether it answered.  Raises ApiError if it did not to the end."""
        import aiohttp

        async def pieces() -> AsyncIterator[bytes]:
            for piece in body:
                yield piece

        url = self._found[peer].with_host(peer[0])
        sent = {n.decode(): v.decode("latin-1") for n, v in _carried(exchange.headers.items())}
        sent |= {HANDED_ON.decode(): "1", "content-length": str(sum(map(len, body)))}
        name = self._found[peer].host if url.scheme == "https" else None
        post = self._open().post
        try:
            async with asyncio.timeout(REACHED_WITHIN_S):  # one that stands still is none
                async with self._open().get(url.with_path("/ping"), server_hostname=name):
                    pass
            to = url.with_path(exchange.path)
            async with post(to, headers=sent, data=pieces(), server_hostname=name) as answer:
                if answer.status == 503:  # it is ending, or it has no instances
                    return False
                headers = [*_carried((n.lower(), v) for n, v in answer.raw_headers)]
                is_stream = "content-length" not in answer.headers
                whole = b"" if is_stream else await answer.read()
                await exchange.relay(
                    {
                        "type": "http.response.start",
                        "status": answer.status,
                        "headers": headers,
                    }
                )
                if is_stream:
                    async for chunk in answer.content.iter_any():
                        await exchange.write(chunk, more=True)
                await exchange.write(whole, more=False)
                return True
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if not exchange.started:
                return False
            message = f"the gateway of this answer was lost ({type(error).__name__}); send it again"
            raise ApiError(503, message, code="unavailable") from None

    def _open(self) -> aiohttp.ClientSession:
        """Connections of one request each: whoever is gone has none that seems to live."""
        if self._session is None:
            import aiohttp

            context = ssl.create_default_context(cafile=self._access.ssl_ca_certs or None)
            if own := self._access.ssl_certfile:
                context.load_cert_chain(own, self._access.ssl_keyfile or None)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True, ssl=context),
                timeout=aiohttp.ClientTimeout(None, sock_read=self._longest_s),
                auto_decompress=False,
            )
        return self._session


def _carried(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    return ((name, value) for name, value in headers if name not in OF_CONNECTION)


def _is_of_this_host(address: str) -> bool:
    """By its kernel: nobody else's can be bound."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
