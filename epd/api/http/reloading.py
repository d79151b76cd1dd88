"""Keys and certificates as their files are now: read again when these change, without a restart.

Theory of operation
-------------------
Once a second a thread looks at the inode, size and time of each file.  What has changed is read
there, checked as a whole, and taken on the loop.  What cannot be used changes nothing: the former
keys or certificate stay, the log names the reason, and a counter grows.

The context of TLS that listens is never changed: between its certificate and the key to that, or
for good where these do not fit, handshakes would fail.  OpenSSL asks it about the name of a server
at each handshake (as of a client that names none), which goes on with the newest context.  So new
connections get the new certificate, and open ones stay as they are.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import time

# Nothing public reads a certificate that is not a CA's.
from _ssl import _test_decode_cert  # type: ignore[attr-defined]
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from epd.api.http.access import Access
from epd.api.http.errors import ApiError
from epd.api.http.exchange import Exchange
from epd.api.http.key_file import ApiKey, read_keys
from epd.config import AccessConfig, ConfigError
from epd.frontend import Metric

INTERVAL_S = 1.0
READ_TIMEOUT_S = 10.0
log = logging.getLogger(__name__)


class _Source(NamedTuple):
    what: str
    paths: tuple[str, ...]
    read: Callable[[], Callable[[], None]]  # on a thread; what comes back takes it, on the loop


class Reloading:
    """Of one gateway; begin, then close."""

    def __init__(self, access: Access, config: AccessConfig) -> None:
        self._access = access
        self._config = config
        self._keys: dict[bytes, ApiKey] = {}
        self._context: ssl.SSLContext | None = None  # the newest
        self._ends_s = 0.0  # of its certificate
        self._seen: dict[str, list[tuple[int, ...]]] = {}
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        files = (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)
        certificate = tuple(filter(None, files))
        found = (
            _Source("keys", (config.key_file,) if config.key_file else (), self._read_keys),
            _Source("certificate", certificate, self._read_certificate),
        )
        self._sources = [source for source in found if source.paths]

    async def begin(self) -> ssl.SSLContext | None:
        """Read all; what to listen with, None for plain HTTP.  Raises ConfigError."""
        for source in self._sources:
            await self._renew(source)
        self._watching = asyncio.create_task(self._watch())
        if self._context is not None:
            self._context.sni_callback = self._newest
        return self._context

    def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()

    async def reload(self, exchange: Exchange) -> None:
        """POST /reload: at once, also what looks as before.  Raises ApiError."""
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                for source in self._sources:
                    await self._renew(source, anyway=True)
        except (ConfigError, TimeoutError) as error:
            reason = str(error) or f"files were not read within {READ_TIMEOUT_S:g} s"
            message = f"{reason}; what was there before stays in use"
            raise ApiError(409, message, code="not_reloaded") from None
        value = {"reloaded": [one.what for one in self._sources], "keys": self._access.num_keys}
        await exchange.respond_json(200, value)

    def samples(self) -> Iterator[Metric]:
        text = "keys and certificates that were read; failed: the former ones stay in use"
        for labels, count in sorted(self._counts.items()):
            pairs = tuple(zip(("what", "outcome"), labels, strict=True))
            yield Metric("epd_reloads_total", count, pairs, "counter", text)
        if self._context is not None:
            text = "until the certificate of HTTPS expires; negative: since it did"
            left_s = self._ends_s - time.time()
            yield Metric("epd_certificate_expiry_seconds", left_s, (), "gauge", text)
        text = "until an API key expires; negative: since it did"
        for key in self._keys.values():
            if key.expires_at is not None:
                left_s = key.expires_at.timestamp() - time.time()
                of = (("key", key.name),)
                yield Metric("epd_api_key_expiry_seconds", left_s, of, "gauge", text)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            for source in self._sources:
                try:
                    await self._renew(source)
                except ConfigError as error:
                    log.error("%s; what was there before stays in use", error)
                except Exception:
                    log.exception("the %s cannot be looked at", source.what)

    async def _renew(self, source: _Source, *, anyway: bool = False) -> None:
        """Raises ConfigError, once for files that stay as they are."""
        async with self._lock:
            marks = await asyncio.to_thread(lambda: [*map(_mark, source.paths)])
            if marks == self._seen.get(source.what) and not anyway:
                return
            try:
                take = await asyncio.to_thread(source.read)
            except ConfigError:
                self._seen[source.what] = marks
                self._counts[source.what, "failed"] += 1
                raise
            take()
            self._seen[source.what] = marks
            self._counts[source.what, "ok"] += 1

    def _read_keys(self) -> Callable[[], None]:
        keys = read_keys(self._config.key_file)

        def take() -> None:
            self._keys = keys
            self._access.take(keys)

        return take

    def _read_certificate(self) -> Callable[[], None]:
        context = tls_context(self._config)
        found = _test_decode_cert(self._config.ssl_certfile)
        ends_s = ssl.cert_time_to_seconds(str(found["notAfter"]))

        def take() -> None:
            self._context, self._ends_s = context, ends_s

        return take

    def _newest(self, connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        assert self._context is not None
        connection.context = self._context


def _mark(path: str) -> tuple[int, ...]:
    """What differs when a file has changed; of none, nothing."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns


def tls_context(config: AccessConfig) -> ssl.SSLContext | None:
    """Of the listener; None: it speaks plain HTTP.  Raises ConfigError."""
    if not config.ssl_certfile and not config.ssl_keyfile and not config.ssl_ca_certs:
        return None
    if not config.ssl_certfile:
        raise ConfigError("TLS needs a certificate: --ssl-certfile FILE (and --ssl-keyfile FILE)")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile or None, password=_no_word)
        if config.ssl_ca_certs:
            context.load_verify_locations(config.ssl_ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as error:
        files = [config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs]
        named = ", ".join(filter(None, files))
        raise ConfigError(
            f"TLS cannot be set up from {named}: {error}; give PEM files that belong together"
        ) from error
    return context


def _no_word() -> str:
    raise ValueError("the key is encrypted, and nobody is here to type its password")
