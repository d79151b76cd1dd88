"""A process by hand over its lives: a new one is a new process, and signals reach it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from epd.runtime.lives import live_again
from tests.patience import PATIENCE_S


def test_it_lives_again_until_it_ends_otherwise(tmp_path: Path) -> None:
    said = tmp_path / "pids"

    def live() -> int:
        with said.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return 75 if len(said.read_text().split()) < 3 else 7

    assert live_again(live, 75) == 7
    pids = said.read_text().split()
    assert len(set(pids)) == 3
    assert str(os.getpid()) not in pids


PROGRAM = """
import os, signal, sys, time
from epd.runtime.lives import live_again
def live():
    signal.signal(signal.SIGTERM, lambda *_: os._exit(9))
    print(os.getpid(), flush=True)
    while os.read(0, 1):
        pass
    return 3
sys.exit(live_again(live, 75))
"""


SIGNALLED_AT_ONCE = """
import os, signal, sys, time
from epd.runtime.lives import live_again
def live():
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    os.kill(os.getppid(), signal.SIGTERM)
    while not asked:
        time.sleep(0.001)
    return 75
sys.exit(live_again(live, 75))
"""


@contextlib.contextmanager
def started() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The parent, and the process id of its child."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())


def test_signals_are_passed_on_and_the_status_comes_back() -> None:
    with started() as (process, child):
        assert child != process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 9


def test_a_signal_of_the_first_moment_is_passed_on_and_ends_all_lives() -> None:
    for _ in range(20):
        process = subprocess.run(
            [sys.executable, "-c", SIGNALLED_AT_ONCE], timeout=PATIENCE_S, check=False
        )
        assert process.returncode == 75


def test_it_does_not_outlive_its_parent() -> None:
    with started() as (process, child):
        process.kill()
        process.wait(30)
        give_up_s = time.monotonic() + PATIENCE_S
        while " Z " not in _stat(child):
            assert time.monotonic() < give_up_s
            time.sleep(0.02)


def _stat(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return " Z "
