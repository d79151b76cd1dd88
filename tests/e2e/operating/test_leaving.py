"""`epd run` leaves nothing behind: no process, no shared memory, no socket, however it is asked."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from epd.cli.start.ports import any_free
from tests.e2e.server import abandoned_segments
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0

LONG = pytest.mark.long


def wait_for(text: str, log: Path, process: subprocess.Popen[bytes]) -> None:
    give_up_s = time.monotonic() + START_TIMEOUT_S
    while text not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < give_up_s, log.read_text()
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("how", "until", "signals", "status"),
    [
        pytest.param(["--topology", "1epd"], "Ctrl-C stops", [signal.SIGINT], 130, marks=LONG),
        # Every shared cluster ends so, and test_lifecycle.py stops one in each phase.
        pytest.param(["--topology", "1epd"], "Ctrl-C stops", [signal.SIGTERM], 0, marks=LONG),
        pytest.param(["--topology", "1epd"], "Ctrl-C stops", [signal.SIGINT] * 2, 130, marks=LONG),
        pytest.param(["--topology", "1e1pd"], "loading", [signal.SIGINT], 130, marks=LONG),
        (["--role", "gateway"], "listening on", [signal.SIGINT], 130),
    ],
    ids=["ctrl-c", "sigterm", "ctrl-c-twice", "while-starting", "one-role"],
)
def test_nothing_is_left(
    tmp_path: Path, how: list[str], until: str, signals: list[signal.Signals], status: int
) -> None:
    log = tmp_path / "log"
    where = ["--port", str(any_free("127.0.0.1")), "--run-dir", str(tmp_path / "run")]
    began_s = time.time()
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "epd", "run", *how, *where], cwd=ROOT, stderr=stderr
        )
    try:
        wait_for(until, log, process)
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        for number in signals:
            process.send_signal(number)
            time.sleep(0.2)
        assert process.wait(STOP_TIMEOUT_S) == status, log.read_text()
    finally:
        process.kill()
    assert "Traceback" not in log.read_text()
    assert not psutil.wait_procs(children, timeout=PATIENCE_S)[1]
    assert not (tmp_path / "run").exists()
    assert not abandoned_segments(began_s)
