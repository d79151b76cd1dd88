"""What dead processes of epd left on this host: sockets nobody answers, memory nobody holds, and
processes that stand still and have not noticed that their supervisor is gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from epd.config import ConfigError
from epd.runtime import lines
from epd.runtime.claim import Claim, claim_path, claims_in, wait_gone
from epd.transport.endpoint import is_answered
from epd.transport.shm.segment import sweep

END_BY_ITSELF_S = 3.0  # a process whose supervisor is gone, if it runs
GONE_S = 10.0  # one that was killed, with all its memory


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


def orphans(directory: Path) -> dict[str, Claim]:
    """Processes of a cluster that live though their supervisor does not, by name."""
    found = claims_in(directory)
    return {name: claim for name, claim in found.items() if not claim.supervisor.is_lived()}


def take_over(directory: Path, names: Sequence[str]) -> None:
    """End what a supervisor that is gone has left in a cluster's directory.

    Raises ConfigError if a process of these `names` has a living supervisor, or cannot be ended."""
    for name, claim in orphans(directory).items():
        if not wait_gone(claim.child, END_BY_ITSELF_S):
            pid = claim.child.pid
            lines.say(f"{name}: process {pid}, whose supervisor is gone, stands still: killed")
            if not wait_gone(claim.child, GONE_S, kill=True):
                raise ConfigError(
                    f"process {pid} ({name} of an earlier run) was killed and does not end; choose "
                    "another port, or restart the host"
                )
        claim_path(directory, name).unlink(missing_ok=True)
    for name, claim in claims_in(directory).items():
        if name in names and claim.supervisor.is_lived():
            raise ConfigError(
                f"{name} runs already in {directory}, as process {claim.child.pid}: stop its "
                f"supervisor (kill {claim.supervisor.pid}), or choose another --port or --run-dir"
            )
