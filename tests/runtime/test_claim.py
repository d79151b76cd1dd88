"""Who has a name in a run directory, and what becomes of who has lost its supervisor."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from epd.cli.start import leftovers
from epd.cli.start.leftovers import take_over
from epd.config import ConfigError, Timing
from epd.runtime.claim import Claim, Life, claim_path, claimed, life_of, own_life, read_claim
from epd.runtime.supervisor import Supervisor
from tests.runtime.stage import of_endpoint

GONE = Life(own_life().pid, own_life().began_ticks - 1)  # of this number, before us


@contextlib.contextmanager
def process() -> Iterator[Life]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as popen:
        life = life_of(popen.pid)
        assert life is not None
        yield life
        popen.kill()


def write(directory: Path, name: str, child: Life, supervisor: Life) -> Path:
    path = claim_path(directory, name)
    path.write_bytes(msgspec.json.encode(Claim(child, supervisor)))
    return path


def test_a_child_says_who_it_is_while_it_lives(tmp_path: Path) -> None:
    path = claim_path(tmp_path, "e0")
    with claimed(str(path), GONE):
        assert read_claim(path) == Claim(own_life(), GONE)
    assert not path.exists()
    with claimed(str(path), GONE):
        write(tmp_path, "e0", GONE, GONE)  # its successor's
    assert path.exists()
    with claimed(str(tmp_path / "nowhere" / "e0.pid"), GONE), claimed("", None):
        pass


def test_a_life_is_not_another_one_under_the_same_number() -> None:
    assert own_life().is_lived() and not GONE.is_lived()
    with process() as life:
        assert life.is_lived()
        os.kill(life.pid, signal.SIGKILL)
        os.waitid(os.P_PID, life.pid, os.WEXITED | os.WNOWAIT)
        assert not life.is_lived(), "it waits to be reaped"


def test_who_stands_still_and_has_no_supervisor_is_named_and_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("epd.runtime.lines.say", said.append)
    monkeypatch.setattr(leftovers, "END_BY_ITSELF_S", 0.05)
    with process() as left, process() as kept, process() as other:
        os.kill(left.pid, signal.SIGSTOP)
        path = write(tmp_path, "e0", left, GONE)
        theirs = write(tmp_path, "e1", kept, own_life())
        reused = write(tmp_path, "e2", Life(other.pid, other.began_ticks - 1), GONE)
        take_over(tmp_path, ["e0", "e2"])
        assert not left.is_lived() and kept.is_lived() and other.is_lived()
        assert str(left.pid) in said[0] and "e0" in said[0] and len(said) == 1
        assert not path.exists() and theirs.exists() and reused.exists()
        with pytest.raises(ConfigError, match=rf"e1 runs already.*{kept.pid}.*kill {os.getpid()}"):
            take_over(tmp_path, ["e0", "e1"])
        assert kept.is_lived()


def test_only_own_sockets_are_removed(tmp_path: Path) -> None:
    """Not those of another cluster, which lives in the same directory."""
    theirs, ours = tmp_path / "e0.sock", tmp_path / "e1.sock"
    with socket.socket(socket.AF_UNIX) as living, socket.socket(socket.AF_UNIX) as dead:
        living.bind(str(theirs))
        living.listen()
        dead.bind(str(ours))
        their_claim = write(tmp_path, "e0", own_life(), GONE)
        own_claim = write(tmp_path, "e1", GONE, own_life())
        specs = [of_endpoint(f"ipc://{path}", Timing()) for path in (theirs, ours)]
        cluster = Supervisor(specs, lambda child: None)
        cluster._remove_left_files()
        assert theirs.exists() and their_claim.exists()
        assert not ours.exists() and not own_claim.exists()
