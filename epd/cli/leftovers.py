"""What dead processes of epd left on this host: sockets nobody answers, memory nobody holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from epd.transport.endpoint import is_answered
from epd.transport.shm_segment import sweep


@dataclass(frozen=True, slots=True)
class Sockets:
    """The ipc sockets of the clusters below a run directory."""

    live: tuple[Path, ...]
    dead: tuple[Path, ...]


def sockets(base: Path) -> Sockets:
    live: list[Path] = []
    dead: list[Path] = []
    for path in sorted(base.glob("*/*.sock")):
        (live if is_answered(str(path)) else dead).append(path)
    return Sockets(tuple(live), tuple(dead))


def segments(directory: Path) -> tuple[Path, ...]:
    """Shared memory of epd whose owner is dead: nobody holds its lock."""
    return tuple(directory / name for name in sweep(directory=str(directory), removes=False))


def remove(base: Path, shm: Path) -> None:
    """Remove the dead ones, and the directories of clusters that are empty then."""
    for path in sockets(base).dead:
        path.unlink(missing_ok=True)
    for directory in sorted(base.glob("*/")):
        if directory.name.isdigit() and not any(directory.iterdir()):
            directory.rmdir()
    sweep(directory=str(shm))
