"""Files of API keys, as tests write them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from epd.api.http.identity import digest_of
from epd.api.http.key_file import ApiKey, changed


def key(name: str, **more: Any) -> ApiKey:
    """Its text is its name."""
    return ApiKey(name, digest_of(name.encode()).hex(), **more)


def write_keys(path: str, keys: Iterable[ApiKey]) -> None:
    """In place of all that are there."""
    with changed(path) as found:
        found[:] = keys
