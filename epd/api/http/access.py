"""Who may ask: API keys, and pages of which origins.

Without a key configured nobody is asked for one.  With keys everything needs one but health,
readiness, metrics, the pages and the document of the API: probes, scrapers and browsers have none,
and nothing of requests is shown there.  Keys of the command line are the operator's.  One of a file
is a client's, for completions and what they need, unless its line names it an operator's.

A key that is removed or has expired is refused from the next request on; what is open goes on.

A browser lets a page of another origin read answers only if these name the origin (CORS).  None is
allowed by default.  Cookies are never looked at, so no page is allowed to send them.  It sends its
question all the same, so where no key is asked for, a page of another origin changes nothing here.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from epd.api.http import unknown
from epd.api.http.errors import ApiError
from epd.api.http.exchange import Exchange, Headers
from epd.api.http.identity import Caller, credential, digest_of
from epd.api.http.places import NAMES
from epd.config import AccessConfig

if TYPE_CHECKING:
    from epd.api.http.key_file import ApiKey

PAGES = ("/", "/docs", "/openapi.json", "/ui")
OPEN = (*PAGES, "/encode/health", "/health", "/metrics", "/ping", "/ready", "/version")
CLIENTS = ("/v1/", "/encode/v1/", "/tokenize", "/detokenize")  # the rest is for operators,
OPERATORS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")  # and so are these
SCHEME = b"Bearer "
CHALLENGE = (b"www-authenticate", b"Bearer")
PREFLIGHT_S = 600
_SHOWN = b", ".join(
    [
        b"idempotent-replayed, retry-after, traceresponse, x-request-id",
        unknown.HEADER,
        *NAMES["requests"],
        *NAMES["tokens"],
    ]
)


class Access:
    """What one gateway asks of those who come."""

    def __init__(self, config: AccessConfig) -> None:
        self._own = {
            digest_of(key.encode()): Caller(f"#{n}", f"#{n}")
            for n, key in enumerate(config.api_keys, 1)
        }
        self._of_file: Mapping[bytes, ApiKey] = {}
        self.asks = bool(config.api_keys or config.key_file)
        self._origins = frozenset(config.allowed_origins)

    @property
    def num_keys(self) -> int:
        return len(self._own) + len(self._of_file)

    def take(self, keys: Mapping[bytes, ApiKey]) -> None:
        """All of the file, in place of those before."""
        self._of_file = keys

    def check(self, exchange: Exchange) -> None:
        """Find out who asks.  Raises ApiError 401, 403."""
        sent = credential(exchange.headers)
        if not self.asks:
            named = sent or exchange.headers.get(b"x-epd-tenant", b"")
            exchange.caller = Caller(named.decode("latin-1"))
            if exchange.method == "POST" and not _is_clients(exchange.path):
                self._check_origin(exchange)
            return
        if exchange.path in OPEN or exchange.method == "OPTIONS":
            return
        exchange.caller = caller = self._known(sent)
        if not caller.is_operator and not _is_clients(exchange.path):
            message = f"the API key {caller.name} is no operator's, as {exchange.path[:200]} needs"
            raise ApiError(403, message, code="not_an_operator")

    def _check_origin(self, exchange: Exchange) -> None:
        """A browser sends a page's POST anywhere, with the page's origin.  Raises ApiError 403."""
        origin = exchange.headers.get(b"origin", b"").decode("latin-1")
        host = exchange.headers.get(b"host", b"").decode("latin-1")
        own = ("", f"http://{host}".lower(), f"https://{host}".lower())
        if origin.lower() not in own and not self._origins & {"*", origin}:
            message = (
                f"a page of {origin[:200]} may not change this cluster: set an API key, or name "
                "the page's origin with --allowed-origins"
            )
            raise ApiError(403, message, code="foreign_origin")

    def _known(self, sent: bytes) -> Caller:
        """Raises ApiError 401."""
        what = "is not known here" if sent else "is missing"
        if sent.startswith(SCHEME):
            digest = digest_of(sent.removeprefix(SCHEME))
            if (own := self._own.get(digest)) is not None:
                return own
            if (key := self._of_file.get(digest)) is not None:
                if key.expires_at is None or key.expires_at.timestamp() > time.time():
                    tenant = key.tenant or ""
                    scope = f"tenant {tenant}" if tenant else f"key {key.name}"
                    return Caller(key.name, key.name, tenant, scope, key.operator, key.limits)
                what = "has expired"
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


def _is_clients(path: str) -> bool:
    return path.startswith(CLIENTS) and path not in OPERATORS


def warning(host: str, config: AccessConfig) -> str:
    """What an operator should know of who may ask; empty if only those who were let in can."""
    if config.api_keys or config.key_file or config.ssl_ca_certs:
        return ""
    try:
        is_own = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_own = host == "localhost"
    if is_own:
        return ""
    return (
        f"whoever reaches {host} may use this server, for no API key is set: give one with "
        "--api-key or --key-file, or listen on 127.0.0.1 behind a proxy that asks"
    )
