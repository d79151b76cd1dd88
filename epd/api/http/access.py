"""Who may ask: API keys, pages of which origins, and TLS.

Without a key configured nobody is asked for one.  With keys everything needs one but health,
readiness, metrics, the pages and the document of the API: probes, scrapers and browsers have none,
and nothing of requests is shown there.  Which of the keys fits takes no other time than that none
does.

A browser lets a page of another origin read answers only if these name the origin (CORS).  None is
allowed by default.  Cookies are never looked at, so no page is allowed to send them.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import ssl

from epd.api.http import unknown
from epd.api.http.errors import ApiError
from epd.api.http.exchange import Exchange, Headers
from epd.api.http.identity import credential
from epd.api.http.places import NAMES
from epd.config import AccessConfig, ConfigError

PAGES = ("/", "/docs", "/openapi.json", "/ui")
OPEN = (*PAGES, "/encode/health", "/health", "/metrics", "/ping", "/ready", "/version")
CHALLENGE = (b"www-authenticate", b"Bearer")
PREFLIGHT_S = 600
_SHOWN = b", ".join(
    [
        b"retry-after, traceresponse, x-request-id",
        unknown.HEADER,
        *NAMES["requests"],
        *NAMES["tokens"],
    ]
)


class Access:
    """What one gateway asks of those who come."""

    def __init__(self, config: AccessConfig) -> None:
        self._digests = [_digest(f"Bearer {key}".encode()) for key in config.api_keys]
        self._origins = frozenset(config.allowed_origins)

    def check(self, exchange: Exchange) -> None:
        """Raises ApiError 401."""
        if not self._digests or exchange.path in OPEN or exchange.method == "OPTIONS":
            return
        sent = credential(exchange.headers)
        given = _digest(sent)
        fits = [hmac.compare_digest(given, digest) for digest in self._digests]
        if not any(fits):
            what = "is not known here" if sent else "is missing"
            message = f"the API key {what}; send Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers=[CHALLENGE])

    def cross_origin(self, exchange: Exchange) -> Headers:
        """Headers of every answer, for a page of another origin; empty if it may not read it."""
        origin = exchange.headers.get(b"origin", b"")
        if not origin or not self._origins:
            return []
        if "*" not in self._origins and origin.decode("latin-1") not in self._origins:
            return [(b"vary", b"Origin")]
        headers = [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", _SHOWN),
            (b"vary", b"Origin"),
        ]
        if exchange.method == "OPTIONS":
            asked = exchange.headers.get(b"access-control-request-headers", b"")
            headers += [
                (b"access-control-allow-methods", b"GET, POST"),
                (b"access-control-max-age", b"%d" % PREFLIGHT_S),
            ]
            if asked:
                headers.append((b"access-control-allow-headers", asked))
        return headers


def warning(host: str, config: AccessConfig) -> str:
    """What an operator should know of who may ask; empty if only those who were let in can."""
    if config.api_keys or config.ssl_ca_certs:
        return ""
    try:
        is_own = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_own = host == "localhost"
    if is_own:
        return ""
    return (
        f"whoever reaches {host} may use this server, for no API key is set: give one with "
        "--api-key, or listen on 127.0.0.1 behind a proxy that asks"
    )


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


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
