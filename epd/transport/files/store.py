"""A durable cache of byte strings in a directory that processes, and hosts, may share.

A value is the file `encoder_cache.safetensors` in a directory named by its key, where the field's
shared-storage connectors have it.  Keys are content hashes, so equal keys have equal values: two
writers at once are no conflict (fault F32).  Values appear whole or not at all and are verified on
every read; a torn or rotten file is a miss and is removed.  Keys are hex digits and nothing else,
so no key is a path (fault F45).  The directory stays below `max_nbytes`: the value that was not
asked for the longest goes first, by the file's own time stamp, which `get` renews.  To look at many
files takes long.  So a store counts its own writes, looks when these reach the bound or others may
have written a good deal, and then frees a sixteenth more than it must.  A listing is made only when
the directory has changed.

All methods block on the file system: call them from a thread.  A fault of the disk is a miss or a
False, never an exception.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence

from epd.transport.base import Buffer, StorageUsage, TransportError
from epd.transport.files.whole_file import (
    TEMPORARY,
    open_whole,
    read_whole,
    sync_directory,
    write_whole,
)
from epd.transport.region import byte_views
from epd.transport.storage import KEY, check_key

NAME = "encoder_cache.safetensors"
HEAD_NBYTES = 512  # at most, of a value with a short note
LOOK_EVERY = 64  # values written without a look at what others have written
ABANDONED_AFTER_S = 3600.0  # a temporary file that is older belongs to a writer that died
SETTLED_AFTER_NS = 2_000_000_000  # a younger time stamp may hide a later change, on any file system


class FileStore:
    """Raises TransportError when the directory cannot be used."""

    tier = "disk"

    def __init__(self, directory: str, max_nbytes: int) -> None:
        self.directory = os.path.abspath(directory)
        self.max_nbytes = max_nbytes
        self.num_evicted = 0
        self.last_nbytes = 0  # when it last looked, and what it has written since
        self._num_until_look = 0
        self._listed_ns = 0  # the directory's time stamp when it was listed last
        if max_nbytes < 1:
            raise TransportError(f"a file store of {max_nbytes} bytes holds nothing: give it more")
        try:
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
        except OSError as error:
            raise TransportError(
                f"file store {self.directory} cannot be made: {error.strerror}; name a directory "
                "that this user may write to"
            ) from None

    def put(self, key: str, value: Sequence[Buffer], note: bytes = b"") -> bool:
        """Keep a value; False if it is too big, or the directory is full.  Durable on return."""
        path = self._path(key)
        views = byte_views(value)
        nbytes = sum(view.nbytes for view in views)
        if nbytes + HEAD_NBYTES > self.max_nbytes:
            return False
        found = open_whole(path, verify=True)
        if found is not None and found.note == note:
            self._touch(path)
            return True
        try:
            self._make_room(nbytes)
            self._make_place(path)
            write_whole(path, note, views, checksum=True, durable=True)
            self.last_nbytes += os.stat(path).st_size
        except OSError:  # the disk is full, or the directory is gone: a cache may forget
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(path))
            return False
        return True

    def get(self, key: str) -> tuple[bytes, memoryview] | None:
        """Note and value, verified, in memory of its own.  None: a miss."""
        path = self._path(key)
        found = read_whole(path)
        if found is None:
            _remove(path)
            return None
        self._touch(path)
        return found.note, found.payload

    def find(self, key: str, note: bytes, nbytes: int) -> memoryview | None:
        """The value, if it has this note and length."""
        found = self.get(key)
        return None if found is None or (found[0], found[1].nbytes) != (note, nbytes) else found[1]

    def usage(self) -> StorageUsage:
        return StorageUsage(self.last_nbytes, self.max_nbytes, self.num_evicted)

    def close(self) -> None:
        """Nothing is open."""

    def keys(self) -> list[str]:
        """What is there now, verified or not, the one to be evicted first at the head."""
        return [os.path.basename(os.path.dirname(path)) for _, _, path in self._oldest_first()]

    def listing(self) -> list[str] | None:
        """`keys`; None: nothing came or went since it was asked last."""
        try:
            changed_ns = os.stat(self.directory).st_mtime_ns
            if changed_ns == self._listed_ns:
                return None
            found = self.keys()
        except OSError:  # the directory is gone
            self._listed_ns = 0
            return []
        is_settled = time.time_ns() - changed_ns > SETTLED_AFTER_NS
        self._listed_ns = changed_ns if is_settled else 0
        return found

    def _path(self, key: str) -> str:
        check_key(key)
        return os.path.join(self.directory, key, NAME)

    def _make_place(self, path: str) -> None:
        place = os.path.dirname(path)
        if not os.path.isdir(place):
            os.makedirs(place, mode=0o700, exist_ok=True)
            sync_directory(self.directory)

    def _touch(self, path: str) -> None:
        with contextlib.suppress(OSError):
            os.utime(path)

    def _make_room(self, nbytes: int) -> None:
        nbytes += HEAD_NBYTES
        self._num_until_look -= 1
        if self._num_until_look > 0 and self.last_nbytes + nbytes <= self.max_nbytes:
            return
        files = self._oldest_first()
        total = sum(size for _, size, _ in files)
        if total + nbytes > self.max_nbytes:
            enough = self.max_nbytes - self.max_nbytes // 16 - nbytes
            for _, size, path in files:
                if total <= enough:
                    break
                _remove(path)
                total -= size
                self.num_evicted += 1
        self.last_nbytes, self._num_until_look = total, LOOK_EVERY

    def _oldest_first(self) -> list[tuple[int, int, str]]:
        """Time of the last use in ns, size, path; removes what dead writers left."""
        found = []
        long_ago_ns = time.time_ns() - int(ABANDONED_AFTER_S * 1e9)
        for entry in self._files():
            try:
                info = entry.stat(follow_symlinks=False)
                if entry.name == NAME:
                    found.append((info.st_mtime_ns, info.st_size, entry.path))
                elif entry.name.endswith(TEMPORARY) and info.st_mtime_ns < long_ago_ns:
                    _remove(entry.path)
            except OSError:  # another process removed it
                continue
        return sorted(found)

    def _files(self) -> Iterator[os.DirEntry[str]]:
        """All files of all keys; what else lies in the directory belongs to others."""
        with os.scandir(self.directory) as places:
            for place in places:
                if KEY.fullmatch(place.name):
                    with contextlib.suppress(OSError), os.scandir(place.path) as files:
                        yield from files


def _remove(path: str) -> None:
    """A value's file, and its directory with it, unless another writer is at work there."""
    with contextlib.suppress(OSError):
        os.unlink(path)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(path))
