"""Which process has a name in a run directory, and whose child it is: NAME.pid beside NAME.sock.

Theory of operation
-------------------
A child ends when its supervisor does, unless it stands still then: stopped, or in a driver.  Such a
process keeps its ports and its device, and only somebody else can end it.  So each child writes
down itself and its supervisor, and removes that when it ends in order.  Who finds a child that
lives and a supervisor that does not may kill the child.  A pid alone is no proof, as it is used
again: a life is a pid and the moment at which it began, which the kernel has."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec

from epd.transport.host import has_ended

SUFFIX = ".pid"


class Life(msgspec.Struct, frozen=True):
    pid: int
    began_ticks: int  # of the kernel's clock, since boot

    def is_lived(self) -> bool:
        return life_of(self.pid) == self


class Claim(msgspec.Struct, frozen=True):
    child: Life
    supervisor: Life


def life_of(pid: int) -> Life | None:
    """None: there is no such process, or it has ended and waits to be reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # its name may have spaces and brackets
    return None if fields[0] in "ZX" else Life(pid, int(fields[19]))


def own_life() -> Life:
    life = life_of(os.getpid())
    assert life is not None
    return life


def claim_path(directory: str | Path, name: str) -> Path:
    return Path(directory) / f"{name}{SUFFIX}"


@contextlib.contextmanager
def claimed(path: str, supervisor: Life | None) -> Iterator[None]:
    """For a child: the file is there while it lives.  Nothing is written where there is no
    directory: then no socket lies there either."""
    if not path or supervisor is None:
        yield
        return
    own = Claim(own_life(), supervisor)
    with contextlib.suppress(OSError):
        Path(path).write_bytes(msgspec.json.encode(own))
    try:
        yield
    finally:
        if read_claim(Path(path)) == own:
            Path(path).unlink(missing_ok=True)


def read_claim(path: Path) -> Claim | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Claim)
    except (OSError, msgspec.MsgspecError):
        return None


def claims_in(directory: Path) -> dict[str, Claim]:
    """Of processes that live, by name."""
    found = {path.stem: read_claim(path) for path in sorted(directory.glob(f"*{SUFFIX}"))}
    return {name: claim for name, claim in found.items() if claim and claim.child.is_lived()}


def wait_gone(life: Life, timeout_s: float, *, kill: bool = False) -> bool:
    """Whether it has ended within; `kill` it first.  Not its successor under the same number."""
    try:
        fd = os.pidfd_open(life.pid)
    except ProcessLookupError:
        return True
    try:
        if not life.is_lived():
            return True
        if kill:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        return has_ended(fd, timeout_s)
    finally:
        os.close(fd)
