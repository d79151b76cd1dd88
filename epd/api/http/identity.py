"""Who is the same image?  The key under which rows are shared (fault F38).

A client's name for an image proves nothing, so the key is made of tenant scope, the bytes, all
settings that turn them into patches, and the model's revision.  Of a video also the frames taken
and their rate count.  Each part goes in with its length, so that no two different lists of parts
read alike.

Under `cache_scope` "tenant" the scope is a digest of the request's API key, or of the tenant that
the file of keys has for it, and of the header `X-EPD-Tenant`.  Another tenant's name without its
key finds nothing of it.  Two tenants never share rows, and neither can learn from the time that an
answer takes whether the other has shown this image before.  Requests without either header are one
tenant.  Under "global" all that a cluster serves is one scope.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from epd.config import KeyLimits


class Caller(NamedTuple):
    """Who asks, by an API key that was checked; without one by what was sent as a key."""

    share: str = ""  # for whom it counts: a key, or without one the tenant that it names
    name: str = ""  # of its key
    tenant: str = ""  # of its key, as the file has it
    scope: str = ""  # whose rows and KV it finds; empty: those of what was sent as a key
    is_operator: bool = True
    limits: KeyLimits | None = None  # of its key; none: those of the settings


def tenant_of(headers: Mapping[bytes, bytes], salt: str = "", scope: str = "") -> str:
    """The tenant as 64 hex digits that do not reveal the key; empty without key and header.

    Behind a slash 64 more of the request's `cache_salt`, which parts a tenant's own requests.
    `scope`: of its `Caller`, in place of the key.
    """
    salted = f"/{hashlib.sha256(salt.encode()).hexdigest()}" if salt else ""
    named = [scope.encode() or credential(headers), headers.get(b"x-epd-tenant", b"")]
    if not any(named):
        return salted
    digest = hashlib.sha256()
    for value in named:
        digest.update(len(value).to_bytes(8, "little"))
        digest.update(value)
    return digest.hexdigest() + salted


def credential(headers: Mapping[bytes, bytes]) -> bytes:
    """The API key as it is sent, one key in one spelling, so that nobody is several clients.

    Anthropic's clients have a header of their own for it.
    """
    key = headers.get(b"x-api-key", b"")
    sent = headers.get(b"authorization", b"") or (b"Bearer " + key if key else b"")
    scheme, _, rest = sent.partition(b" ")
    return b"Bearer " + rest if scheme.lower() == b"bearer" else sent


def digest_of(key: bytes) -> bytes:
    """SHA-256 of an API key; why that hides it: `key_file`."""
    return hashlib.sha256(key).digest()


def scope_of(cache_scope: str, configured: str, tenant: str, adapter: str = "") -> str:
    """What goes into `mm_hash`; `configured`: the setting `tenant` of the cluster.  A salt counts
    under either scope.  `adapter`: digest of the one that changes the tower; empty: none."""
    who, _, salt = tenant.partition("/")
    scope = f"{configured}/{who}" if cache_scope == "tenant" and who else configured
    scope = f"{scope}/adapter {adapter}" if adapter else scope
    return f"{scope}/salt {salt}" if salt else scope


def mm_hash(
    scope: str,
    content: bytes,
    processor_fingerprint: str,
    model_fingerprint: str,
    *how: str,
) -> str:
    """64 hex digits; `content` is the compressed image or video as received.

    `how`: what else makes rows: of a video its processor, which frames, when; of an image the
    bounds that a request asks for.
    """
    digest = hashlib.sha256()
    for part in _parts(scope, content, processor_fingerprint, model_fingerprint, *how):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _parts(scope: str, content: bytes, *fingerprints: str) -> Iterable[bytes]:
    yield scope.encode()
    yield hashlib.sha256(content).digest()
    for fingerprint in fingerprints:
        yield fingerprint.encode()
