"""Files that are there as a whole or not at all, in the safetensors format.

A writer fills a temporary name and renames it.  A reader checks lengths and, where asked, the
checksum.  Anything else is absent (fault F32): a file torn by a crash of the host, a short read on
a network file system, or a stranger's file.

Layout: any reader of safetensors finds one tensor of bytes, `value`.  The metadata has what the
format lacks: `note` (a few bytes of the caller's), and CRC-32 sums of note and value.  A reader of
ours makes the header again from what it has read and compares: a flipped bit anywhere is noticed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from epd.transport.checksum import checksum_of, crc32

LENGTH_NBYTES = 8  # of the header's length, little-endian, before the header
ALIGNMENT = 64
MAX_HEADER_NBYTES = 8 << 20
MAPPED_NBYTES = 256 << 10  # below, reading costs less than mapping and unmapping
MAX_VECTOR = 1024  # of the kernel
TEMPORARY = ".tmp"


@dataclass(frozen=True, slots=True)
class WholeFile:
    """`payload` lives as long as somebody holds it; it may be mapped, read-only."""

    note: bytes
    payload: memoryview
    checksum: int  # 0: the writer computed none


def write_whole(
    path: str, note: bytes, payload: Sequence[memoryview], *, checksum: bool, durable: bool
) -> int:
    """Make `path` appear with all of its bytes; returns their CRC-32, or 0.  Raises OSError.

    `durable`: it survives a crash of the host.
    """
    total = checksum_of(payload) if checksum else 0
    head = head_of(note, sum(view.nbytes for view in payload), total)
    directory, name = os.path.split(path)
    temporary = os.path.join(directory, f"{name}.{secrets.token_hex(6)}{TEMPORARY}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _write_all(fd, [memoryview(head), *payload])
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        sync_directory(directory)
    return total


def head_of(note: bytes, nbytes: int, checksum: int) -> bytes:
    """What stands before a payload of `nbytes` bytes; a multiple of 64 bytes long."""
    described = {
        "__metadata__": {
            "format": "epd",
            "note": note.decode("latin-1"),
            "note_crc32": f"{crc32(note):08x}",
            "value_crc32": f"{checksum:08x}",
        },
        "value": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]},
    }
    header = msgspec.json.encode(described)
    header += b" " * (-(LENGTH_NBYTES + len(header)) % ALIGNMENT)
    return len(header).to_bytes(LENGTH_NBYTES, "little") + header


def read_whole(path: str) -> WholeFile | None:
    """As `open_whole` with `verify`, but into memory of its own: a file that is mapped takes the
    process with it when its disk fails."""
    return _whole(path, verify=True, maps=False)


def open_whole(path: str, *, verify: bool) -> WholeFile | None:
    """The file, or None where there is none or not a whole one.  `verify` reads all of it."""
    return _whole(path, verify=verify, maps=True)


def _whole(path: str, *, verify: bool, maps: bool) -> WholeFile | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        nbytes = os.fstat(fd).st_size
        whole = _read_all(fd, nbytes) if not maps or nbytes < MAPPED_NBYTES else _mapped(fd)
    except (OSError, ValueError):  # no plain file
        return None
    finally:
        os.close(fd)
    return None if whole is None else parse_whole(whole, verify=verify)


def _mapped(fd: int) -> memoryview:
    return memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_READ))


def _read_all(fd: int, nbytes: int) -> memoryview | None:
    """None: the file is shorter."""
    whole = memoryview(bytearray(nbytes))
    at = 0
    while at < nbytes:
        count = os.readv(fd, [whole[at:]])
        if not count:
            return None
        at += count
    return whole


def parse_whole(whole: memoryview, *, verify: bool) -> WholeFile | None:
    """A file's content, or None if it is not whole."""
    header_nbytes = int.from_bytes(whole[:LENGTH_NBYTES], "little")
    start = LENGTH_NBYTES + header_nbytes
    if header_nbytes > MAX_HEADER_NBYTES or whole.nbytes < start:
        return None
    head, payload = bytes(whole[:start]), whole[start:]
    try:
        metadata = msgspec.json.decode(head[LENGTH_NBYTES:])["__metadata__"]
        note = metadata["note"].encode("latin-1")
        checksum = int(metadata["value_crc32"], 16)
        made_anew = head_of(note, payload.nbytes, checksum)
    except (ValueError, KeyError, TypeError, AttributeError):  # no header of ours
        return None
    if head != made_anew or (verify and checksum_of([payload]) != checksum):
        return None
    return WholeFile(note, payload, checksum)


def _write_all(fd: int, views: list[memoryview]) -> None:
    while views:
        count = os.writev(fd, views[:MAX_VECTOR])
        while views and count >= views[0].nbytes:
            count -= views.pop(0).nbytes
        if count:
            views[0] = views[0][count:]


def sync_directory(directory: str) -> None:
    """What was renamed into it, or made in it, survives a crash of the host."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
