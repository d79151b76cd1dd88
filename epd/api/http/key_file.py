"""The file of API keys: on each line a key, by its hash, and what its holder may.

    {"name": "ann", "sha256": "9f86…", "tenant": "acme", "expires_at": "2027-01-01T00:00:00Z"}

Theory of operation
-------------------
A key has 256 random bits, so plain SHA-256 hides it: slow hashes protect what can be guessed.  A
digest is looked up in a table; the time of that depends on digests alone, and no key follows from
them.  Whoever reads the file can use none of the keys; whoever writes to it can add one, so that
it must be closed to other users.

Lines are JSON objects, so that an error has a line.  The file is replaced as a whole, never changed
in place: a reader finds all of the old keys or all of the new ones.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from epd.config import ConfigError, KeyLimits

NUM_BYTES = 32  # of a key
PREFIX = "epd-"  # by which scanners for secrets find it
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}\Z")]


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line."""

    name: Name
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    tenant: Name | None = None  # with whom its holder shares rows and KV; none: with nobody
    expires_at: Annotated[datetime, Meta(tz=True)] | None = None
    operator: bool = False  # may also look at the cluster, and change it
    limits: KeyLimits | None = None  # none: those of the settings


_decode = msgspec.json.Decoder(ApiKey).decode


def new_key() -> str:
    """A key's text, which stands nowhere afterwards."""
    return PREFIX + secrets.token_urlsafe(NUM_BYTES)


def read_keys(path: str) -> dict[bytes, ApiKey]:
    """By digest, in order.  Raises ConfigError, which names the line."""
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            lines = file.read().split(b"\n")
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be read: {error.strerror}") from None
    if mode & 0o077:
        raise ConfigError(f"the key file {path} is open to other users: chmod 600 {path}")
    keys: dict[bytes, ApiKey] = {}
    names: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"the key file {path}, line {number}"
        try:
            key = _decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where}: {error}; epd keys make writes such lines") from None
        digest = bytes.fromhex(key.sha256)
        if key.name in names or digest in keys:
            raise ConfigError(f"{where}: its name or hash is on a line before; remove one of them")
        names.add(key.name)
        keys[digest] = key
    return keys


@contextmanager
def changed(path: str) -> Iterator[list[ApiKey]]:
    """Its keys, none where there is no file, to be changed; then it is replaced, mode 0600.

    Nobody else changes it here meanwhile.  Raises ConfigError, OSError.
    """
    path = os.path.realpath(path)
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        keys = [*read_keys(path).values()] if os.path.exists(path) else []
        yield keys
        fresh = f"{path}.new"
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.writelines(msgspec.json.encode(key) + b"\n" for key in keys)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    finally:
        os.close(folder)
