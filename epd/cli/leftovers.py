"""What dead processes of epd left on this host: sockets nobody answers, memory nobody holds."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from epd.transport.shm_segment import NAME, is_locked, sweep


@dataclass(frozen=True, slots=True)
class Sockets:
    """The ipc sockets of the clusters below a run directory."""

    live: tuple[Path, ...]
    dead: tuple[Path, ...]


def sockets(base: Path) -> Sockets:
    live: list[Path] = []
    dead: list[Path] = []
    for path in sorted(base.glob("*/*.sock")):
        (live if is_answered(path) else dead).append(path)
    return Sockets(tuple(live), tuple(dead))


def is_answered(path: Path) -> bool:
    """A process listens on this socket, or we may not ask."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True


def segments(directory: Path) -> tuple[Path, ...]:
    """Shared memory of epd, of this user, whose owner is dead: nobody holds its lock."""
    return tuple(_unheld(directory))


def _unheld(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.glob("epd-*")):
        if not NAME.fullmatch(path.name):
            continue
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:  # another user's, or gone meanwhile
            continue
        try:
            if os.fstat(fd).st_uid == os.getuid() and not is_locked(fd):
                yield path
        finally:
            os.close(fd)


def remove(base: Path, shm: Path) -> None:
    """Remove the dead ones, and the directories of clusters that are empty then."""
    for path in sockets(base).dead:
        path.unlink(missing_ok=True)
    for directory in sorted(base.glob("*/")):
        if directory.name.isdigit() and not any(directory.iterdir()):
            directory.rmdir()
    sweep(directory=str(shm))
