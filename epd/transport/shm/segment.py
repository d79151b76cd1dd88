"""Files in /dev/shm that are locked for as long as their owner lives.

Plain files and mmap instead of `multiprocessing.shared_memory`, whose resource tracker unlinks
segments of others and which learns of a full /dev/shm from SIGBUS.

The owner holds an exclusive `flock` from creation on.  The kernel drops it when the process has
died, in whatever way, and only after its last thread has left its memory.  So a free lock is proof
that the owner can write nothing any more.  Unlike a pid it cannot be recycled, and it means the
same in every container that shares the directory.  `sweep` therefore removes files that no process
holds; a new file that a sweep catches before it is locked is simply made again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets
import stat

from epd.transport.base import TransportError
from epd.transport.host_memory import touch

DIRECTORY = "/dev/shm"
PREFIX = "epd-"
NAME = re.compile(r"epd-[A-Za-z0-9._-]{1,240}")


class SegmentGone(Exception):
    """There is no such segment, or it is not as described."""


class Segment:
    """An open, mapped file; `memory` is all of it."""

    def __init__(self, path: str, fd: int, nbytes: int) -> None:
        self.path = path
        self._fd = fd
        self.memory = memoryview(mmap.mmap(fd, nbytes)) if nbytes else memoryview(b"")

    @classmethod
    def create(cls, stem: str, nbytes: int, directory: str = DIRECTORY) -> Segment:
        """A new segment named `stem` plus a random part, every page reserved and touched.

        Takes 0.3 s per GiB, and several seconds where a virtual machine's host must first find the
        memory.  Raises TransportError.
        """
        while True:
            path = os.path.join(directory, f"{stem}-{secrets.token_hex(4)}")
            fd = _create_locked(path)
            if fd is not None:
                break
        try:
            _reserve(fd, nbytes, os.path.basename(stem), directory)
            segment = cls(path, fd, nbytes)
        except OSError as error:
            os.unlink(path)
            os.close(fd)
            raise TransportError(f"shared memory {path} cannot be mapped: {error}") from None
        except TransportError:
            os.unlink(path)
            os.close(fd)
            raise
        touch(segment.memory)
        return segment

    @classmethod
    def attach(cls, name: str, nbytes: int, directory: str = DIRECTORY) -> Segment:
        """Map a peer's segment.  Raises SegmentGone."""
        path = os.path.join(directory, name)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise SegmentGone(f"{name}: {error.strerror}") from None
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
                raise SegmentGone("not a segment of this user")
            if info.st_size != nbytes:
                raise SegmentGone(f"it has {info.st_size} bytes, not {nbytes}")
            return cls(path, fd, nbytes)
        except (OSError, SegmentGone) as error:
            os.close(fd)
            raise SegmentGone(f"{name}: {error}") from None

    def is_served(self) -> bool:
        """The owner lives and has not revoked it (asked by a peer that attached it)."""
        return self.is_linked() and is_locked(self._fd)

    def is_linked(self) -> bool:
        """It was not revoked; cheaper to ask, and enough after a copy: no row is published in the
        memory of an owner that has died meanwhile."""
        return self._fd >= 0 and os.fstat(self._fd).st_nlink > 0

    def unlink(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def close(self) -> None:
        """Let go of the file; the pages go with the last view of them.  Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self.memory = memoryview(b"")


class LifeLock:
    """A file that is locked while one life of an instance may touch shared memory.

    Name and epoch are unique in a cluster.  A host may have several, whose instances start in the
    same millisecond under the same names: the process is part of the file's name, too.
    """

    def __init__(self, instance_id: str, epoch: int, directory: str = DIRECTORY) -> None:
        self.path = os.path.join(directory, _life_name(instance_id, epoch, os.getpid()))
        try:
            fd = _create_locked(self.path)
        except FileExistsError:
            fd = None
        if fd is None:
            raise TransportError(
                f"instance {instance_id} with epoch {epoch} exists already ({self.path}): "
                "each start of an instance needs an epoch of its own"
            )
        self._fd = fd

    def release(self) -> None:
        """This life is over and holds no mapping of a peer any more.  Idempotent."""
        if self._fd >= 0:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
            os.close(self._fd)
            self._fd = -1


def is_life_over(instance_id: str, epoch: int, pid: int, directory: str = DIRECTORY) -> bool | None:
    """True: that life has ended; False: it goes on; None: it has left no trace here.

    The pid is the peer's own word: it chooses among lives of several clusters, and proves nothing.
    Without a file of that process each file of the name and epoch has to be free.
    """
    of_life = re.compile(_life_name(re.escape(instance_id), epoch, "[0-9]+"))
    left = {name for name in os.listdir(directory) if of_life.fullmatch(name)}
    own = left & {_life_name(instance_id, epoch, pid)}
    return all(_is_free(os.path.join(directory, name)) for name in own or left) if left else None


def _life_name(instance_id: str, epoch: int, pid: object) -> str:
    return f"{PREFIX}{instance_id}-{epoch}-{pid}.alive"


def _is_free(path: str) -> bool:
    """Whether nobody holds it; one that is gone meanwhile is no proof."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return not is_locked(fd)
    finally:
        os.close(fd)


def sweep(prefix: str = PREFIX, directory: str = DIRECTORY, *, removes: bool = True) -> list[str]:
    """Remove the files of dead owners whose names begin with `prefix`; returns their names."""
    found = []
    for name in sorted(os.listdir(directory)):
        if not name.startswith(prefix) or not NAME.fullmatch(name):
            continue
        path = os.path.join(directory, name)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:  # another user's, or gone meanwhile
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if removes:
                os.unlink(path)
            found.append(name)
        except OSError:  # held: its owner lives
            pass
        finally:
            os.close(fd)
    return found


def is_locked(fd: int) -> bool:
    """Somebody else holds the exclusive lock of this open file."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def _create_locked(path: str) -> int | None:
    """File descriptor of a new file that we hold; None if a sweep was faster than the lock.

    Raises FileExistsError, or TransportError when the directory cannot be written.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        raise
    except OSError as error:
        raise TransportError(
            f"shared memory file {path} cannot be made: {error.strerror}; "
            f"{os.path.dirname(path)} must be a writable tmpfs"
        ) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_nlink:
            return fd
    except BlockingIOError:
        pass
    os.close(fd)
    return None


def _reserve(fd: int, nbytes: int, what: str, directory: str) -> None:
    """Take every page now, so that a full /dev/shm is an error here and not SIGBUS later."""
    there_nbytes = free_nbytes(directory)
    try:
        if nbytes > there_nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        raise TransportError(
            f"shared memory for {what} needs {nbytes / 2**20:.1f} MiB and {directory} has "
            f"{there_nbytes / 2**20:.1f} MiB free ({error.strerror}): lower pool_nbytes or "
            f"kv_nbytes, or enlarge it (mount -o remount,size=... {directory}; "
            "docker run --shm-size=...)"
        ) from None


def free_nbytes(directory: str) -> int:
    info = os.statvfs(directory)
    return info.f_bavail * info.f_frsize
