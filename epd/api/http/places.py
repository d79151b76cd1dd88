"""Places of open requests: with several API keys, none of them fills the gateway alone.

The gateway itself bounds how many are open (`limits.max_open_requests`). Of these, a key gets a
share where there are others that it could crowd out.  A place is held until the answer has left, so
that answers which no client reads count. One request of any permitted size fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from epd.api.http.errors import ApiError
from epd.api.http.identity import credential
from epd.config import AccessConfig, Limits


class Places:
    """Of one gateway, by key."""

    def __init__(self, limits: Limits, access: AccessConfig) -> None:
        self._share = round(limits.max_open_requests * limits.max_open_share_per_key)
        self._has_others = len(set(access.api_keys)) > 1
        self._taken: Counter[bytes] = Counter()

    @contextmanager
    def taken(self, headers: Mapping[bytes, bytes], count: int = 1) -> Iterator[None]:
        """So many, meanwhile.  Raises ApiError 429."""
        key = credential(headers) if self._has_others else b""
        if key and self._taken[key] and self._taken[key] + count > self._share:
            message = (
                f"this API key has {self._taken[key]} requests open, where {self._share} may be; "
                "try again when one of them has ended"
            )
            raise ApiError(429, message, code="overloaded")
        self._taken[key] += count
        try:
            yield
        finally:
            self._taken[key] -= count
            if not self._taken[key]:
                del self._taken[key]
