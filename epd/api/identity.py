"""Who is the same picture?  The key under which rows are shared (fault F38).

A client's name for a picture proves nothing, so the key is made of content: tenant scope, the
bytes, everything that turns them into patches, and the model's revision.  Each part goes in with
its length, so that no two different lists of parts read alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def mm_hash(tenant: str, content: bytes, processor_fingerprint: str, model_fingerprint: str) -> str:
    """64 hex digits; `content` is the compressed picture as received."""
    digest = hashlib.sha256()
    for part in _parts(tenant, content, processor_fingerprint, model_fingerprint):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _parts(tenant: str, content: bytes, *fingerprints: str) -> Iterable[bytes]:
    yield tenant.encode()
    yield hashlib.sha256(content).digest()
    for fingerprint in fingerprints:
        yield fingerprint.encode()
