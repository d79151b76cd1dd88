"""A cluster as a user starts it: `python -m epd run`, its processes, its log, and its orderly end.

Every process that a server starts inherits a mark in its environment, so that "nothing is left" is
asked of the kernel and not of the supervisor.  Sockets lie in a private directory; shared memory
that no process holds by the kernel's lock was left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import psutil

from epd.cli.start.ports import any_free
from epd.transport.shm.segment import NAME, is_locked, sweep

if TYPE_CHECKING:
    from epd_lab.bench.chaos.hosts import MadeHost

MARK = "EPD_E2E_MARK"  # in the environment of all that a command starts
COLD = ("-m", "epd")
SHM = Path("/dev/shm")
SLOW = 4  # how much slower than alone on two cores this machine may be
READY_S = 25.0 * SLOW
STOP_S = 10.0 * SLOW


class ClusterFailed(AssertionError):
    """A cluster did not do what was expected; the text ends with its log."""


def wait_for(what: Callable[[], Any], timeout_s: float, why: str) -> Any:
    """The first true value of `what`.  Raises ClusterFailed."""
    give_up_s = time.monotonic() + timeout_s
    while True:
        value = what()
        if value:
            return value
        if time.monotonic() > give_up_s:
            raise ClusterFailed(f"{why}: not within {timeout_s:g} s")
        time.sleep(0.05)


def new_dir() -> Path:
    return Path(tempfile.mkdtemp(prefix="epd-e2e-", dir="/tmp"))


class Command:
    """One `python -m epd ...` in the background, with everything it starts."""

    program: ClassVar[tuple[str, ...]] = COLD

    def __init__(
        self,
        *arguments: str,
        run_dir: Path | None = None,
        program: tuple[str, ...] = (),
        stderr: int | None = None,
        on: MadeHost | None = None,
    ) -> None:
        """`program`: another than the class has; `on`: a made host instead of this one."""
        self.host = on
        self.run_dir = run_dir or new_dir()
        self.log = self.run_dir.parent / f"{self.run_dir.name}-{uuid.uuid4().hex[:6]}.log"
        self.mark = uuid.uuid4().hex
        self.began_s = time.time()
        program = program or self.program
        environment = os.environ | {MARK: self.mark, "OMP_NUM_THREADS": "1"}
        environment |= self.environment(program)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*(on.enter if on is not None else ()), sys.executable, *program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log if stderr is None else stderr,
                env=environment,
                start_new_session=True,
            )

    def environment(self, program: tuple[str, ...]) -> dict[str, str]:
        """More of it, for that program."""
        return {}

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """Everything alive that this command started, itself included."""
        return [p for p in psutil.process_iter() if self._is_mine(p)]

    def _is_mine(self, process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE and self.has_mark(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            return False

    def has_mark(self, process: psutil.Process) -> bool:
        return bool(process.environ().get(MARK) == self.mark)

    def says(self, words: str, timeout_s: float) -> None:
        """Wait for words in its output."""

        def heard() -> bool:
            if words not in self.text and self.process.poll() is not None:
                raise ClusterFailed(f"ended with {self.process.returncode}:\n{self.text}")
            return words in self.text

        wait_for(heard, timeout_s, f"{words!r} in the output")

    def send(self, number: int) -> None:
        if self.host is None:
            self.process.send_signal(number)
        else:  # `process` is what has entered it
            psutil.Process(self.process.pid).children()[0].send_signal(number)

    def wait(self, timeout_s: float = STOP_S) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ClusterFailed(f"still runs after {timeout_s:g} s:\n{self.text}") from None

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = STOP_S) -> int:
        """Ask it to end; returns the exit status after checking that nothing is left."""
        if self.process.poll() is None:
            self.send(number)
        status = self.wait(timeout_s)
        self.check_nothing_left()
        return status

    def check_nothing_left(self, timeout_s: float = 20.0 * SLOW) -> None:
        """No process, no socket file, no shared memory.  Raises ClusterFailed.

        Patient, since a test beside this one may just have killed an instance of its own, whose
        memory is swept a little later.
        """
        with contextlib.suppress(ClusterFailed):
            wait_for(lambda: not self.left(), timeout_s, "")
        if left := self.left():
            raise ClusterFailed(f"left behind: {', '.join(left)}\n{self.text}")

    def left(self) -> list[str]:
        processes = [f"process {p.pid}" for p in self.processes()]
        sockets = [str(path) for path in self.run_dir.rglob("*") if not path.is_dir()]
        shm = SHM if self.host is None else self.host.shm
        return processes + sockets + abandoned_segments(self.began_s, shm)

    def discard(self) -> None:
        """However the test went: no process and no file of it survives."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(STOP_S)
        sweep()  # another test, beside this one, may be looking for what is left behind
        shutil.rmtree(self.run_dir, ignore_errors=True)
        self.log.unlink(missing_ok=True)


class ServingCommand(Command):
    """`epd run` with a gateway."""

    def __init__(
        self,
        topology: str,
        *flags: str,
        model: Path | None = None,
        program: tuple[str, ...] = (),
        stderr: int | None = None,
        like: ServingCommand | None = None,
        on: MadeHost | None = None,
        **settings: object,
    ) -> None:
        """`like`: at its port and in its directory."""
        self.topology = topology
        self.port: int = like.port if like is not None else any_free("127.0.0.1")
        address = "127.0.0.1" if on is None else on.client_address
        self.base_url = f"http://{address}:{self.port}"
        run_dir = like.run_dir if like is not None else new_dir()
        what = ("--role" if topology in {"all", "gateway"} else "--topology", topology)
        arguments = ["run", *what, *self.placing(run_dir), "--threads", "1", *flags]
        arguments += [] if on is None else ["--host", "0.0.0.0"]
        if model is not None:
            arguments += ["--model", str(model), "--model-name", "tiny"]
        for key, value in settings.items():
            arguments += ["--set", f"{key.replace('__', '.')}={value}"]
        super().__init__(*arguments, run_dir=run_dir, program=program, stderr=stderr, on=on)

    def placing(self, run_dir: Path | None = None) -> tuple[str, ...]:
        """Flags by which another process finds this cluster."""
        return ("--port", str(self.port), "--run-dir", str(run_dir or self.run_dir))

    def wait_ready(self, timeout_s: float = READY_S) -> ServingCommand:
        def ready() -> bool:
            if self.process.poll() is not None:
                raise ClusterFailed(f"ended with {self.process.returncode}:\n{self.text}")
            return self.get("/ready")[0] == 200

        try:
            wait_for(ready, timeout_s, "ready")
        except ClusterFailed as failed:
            raise ClusterFailed(f"{failed}\n{self.text}") from None
        return self

    def wait_healthy(self, count: int) -> None:
        """Until so many instances are."""

        def healthy() -> bool:
            states = [entry["state"] for entry in self.instances().values()]
            return states.count("HEALTHY") == count

        self.wait_ready()
        wait_for(healthy, READY_S, f"{count} instances are healthy")

    def get(self, path: str, timeout_s: float = 10.0) -> tuple[int, str]:
        """Status (0: nobody answers) and body."""
        try:
            with urllib.request.urlopen(self.base_url + path, timeout=timeout_s) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def instances(self) -> dict[str, dict[str, Any]]:
        """Entries of /ready, by the instance's name."""
        body = json.loads(self.get("/ready")[1])
        return {entry["instance"]: entry for entry in body["instances"]}

    def pid(self, instance: str) -> int:
        return int(self.instances()[instance]["pid"])

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its name with labels."""
        lines = (line for line in self.get("/metrics")[1].splitlines() if line[:1] != "#")
        pairs = (line.rpartition(" ") for line in lines)
        return {name: float(value) for name, _, value in pairs if name}

    def in_use(self) -> dict[str, float]:
        """What is not zero of slots, blocks, rooms, references and open requests."""
        kinds = ("epd_in_use{", "epd_open_requests")
        found = {k: v for k, v in self.metrics().items() if k.startswith(kinds)}
        if not any(name.startswith("epd_in_use{") for name in found):
            return {"no epd_in_use at all": 1.0}
        return {name: value for name, value in found.items() if value}

    def check_all_returned(self, timeout_s: float = 5.0 * SLOW) -> None:
        """Memory and work are back to zero.  Raises ClusterFailed."""
        with contextlib.suppress(ClusterFailed):
            wait_for(lambda: not self.in_use(), timeout_s, "")
        if held := self.in_use():
            raise ClusterFailed(f"still in use: {held}\n{self.text}")


@contextlib.contextmanager
def discarding(command: Any) -> Iterator[Any]:
    """A command whose end is the test's own business."""
    try:
        yield command
    finally:
        command.discard()


def abandoned_segments(since_s: float, shm: Path = SHM) -> list[str]:
    """Files of this project in /dev/shm, younger than `since_s`, whose owner is dead."""
    found = []
    for path in shm.glob("epd-*"):
        try:
            if not path.is_file() or path.stat().st_ctime < since_s:
                continue  # directories are other tests'
            assert NAME.fullmatch(path.name), path
            fd = os.open(path, os.O_RDONLY)
        except OSError:
            continue
        try:
            if not is_locked(fd) and path.exists():
                found.append(str(path))
        finally:
            os.close(fd)
    return found


def is_alive(pid: int) -> bool:
    """A zombie, which the host's first process may not have reaped yet, is not."""
    return bool(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
