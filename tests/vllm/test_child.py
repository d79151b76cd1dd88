"""A vLLM server under a supervisor: a program with an engine process and `/health` in its place."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from epd.cli.start.ports import any_free
from epd.runtime.child import ChildSpec
from epd.runtime.claim import own_life
from epd.runtime.program import ServerCommand
from epd.runtime.supervisor import Child, Supervisor
from epd.runtime.worker import Ending
from epd.vllm import child
from tests.api.wire import until
from tests.patience import PATIENCE_S

PROGRAM = """
import http.server, os, signal, subprocess, sys
engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(sys.argv[2], "a") as file:
    file.write(f"{os.getpid()} {engine.pid} {os.environ['SIDE']}\\n")
if sys.argv[1] == "0":
    sys.exit(3)
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""


class Kept:
    """One server, and the lines that its lives have left."""

    def __init__(self, directory: Path, port: int) -> None:
        self.log = directory / "lives"
        words = (sys.executable, "-c", PROGRAM, str(port), str(self.log))
        server = ServerCommand(words, {"SIDE": "5600"}, f"http://127.0.0.1:{port}")
        spec = ChildSpec("pd0", server=server, supervisor=own_life())
        self.shown: list[str] = []
        self.supervisor = Supervisor([spec], self._changed)
        self.child = self.supervisor.children["pd0"]

    def _changed(self, child: Child) -> None:
        self.shown.append(child.state)

    def lives(self) -> list[list[str]]:
        text = self.log.read_text() if self.log.exists() else ""
        return [line.split() for line in text.splitlines()]

    def alive(self) -> set[int]:
        """Of the processes of all lives; who is dead may lie about until somebody reaps it."""
        found = set()
        for life in self.lives():
            for pid in map(int, life[:2]):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                        found.add(pid)
        return found


@contextlib.asynccontextmanager
async def kept(directory: Path) -> AsyncIterator[Kept]:
    at = Kept(directory, any_free("127.0.0.1"))
    await at.supervisor.start()
    try:
        await at.supervisor.wait_serving(PATIENCE_S)
        yield at
    finally:
        await at.supervisor.stop()


async def test_a_server_that_dies_is_started_anew_and_ends_with_its_supervisor(
    tmp_path: Path,
) -> None:
    async with kept(tmp_path) as at:
        ((pid, engine, side),) = at.lives()
        assert side == "5600" and at.child.state == "serving"
        os.kill(int(pid), signal.SIGKILL)
        await until(lambda: at.shown.count("serving") == 2)
        assert len(at.lives()) == 2
        await until(lambda: int(engine) not in at.alive())
    assert at.shown[-2:] == ["draining", "stopped"]
    await until(lambda: not at.alive())  # the kernel takes its time behind a signal


async def test_a_server_ends_with_the_process_that_keeps_it(tmp_path: Path) -> None:
    async with kept(tmp_path) as at:
        (life,) = at.lives()
        os.kill(at.child.pid, signal.SIGKILL)
        await until(lambda: int(life[0]) not in at.alive())
        await until(lambda: at.shown.count("serving") == 2)
        os.kill(int(life[1]), signal.SIGKILL)  # this one's own engine ends by no signal


async def test_a_server_that_hangs_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "SILENT_S", 0.5)
    monkeypatch.setattr(child, "ANSWER_S", 0.1)
    at, told = Kept(tmp_path, any_free("127.0.0.1")), list[str]()

    def status(state: str, detail: str) -> None:
        told.append(f"{state} {detail}")
        if state == "serving":
            os.kill(int(at.lives()[0][0]), signal.SIGSTOP)

    server = at.child.spec.server
    assert server is not None
    assert await asyncio.wait_for(child.keep(server, Ending(), status), PATIENCE_S) == 1
    assert "has not answered" in told[-1] and told[-1].startswith("failed ")
    await until(lambda: not at.alive())


async def test_a_server_that_never_serves_is_one_clear_sentence(tmp_path: Path) -> None:
    at = Kept(tmp_path, 0)
    await at.supervisor.start()
    sentence = await asyncio.wait_for(at.supervisor.first_failure(), PATIENCE_S)
    assert "pd0: vLLM has ended with exit status 3" in sentence
    await at.supervisor.stop()
    await until(lambda: not at.alive())
    assert len(at.lives()) == 1
