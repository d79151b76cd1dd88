"""`python -m epd`, whose first zygote is a fork of one that all clusters of a test run share.

What a zygote imports costs 6 s of a core and is the same for every cluster.  The fork goes on as a
zygote of its own does: its cluster's environment and output, its model's modelling file, its own
workers, and its host.  A second zygote, after a loss, is started as users' are,
and so is every zygote of a command that runs `server.COLD`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import functools
import gc
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

from epd.runtime import zygote
from epd_lab.bench.chaos.process import MARK

ADDRESS = "EPD_E2E_ZYGOTE"  # a socket's path; set in what `program()` is started with
SHARED = "EPD_E2E_SHARED_ZYGOTE"  # the same, in pytest's own environment

MAX_NBYTES = 1 << 16
LIMIT_S = 60.0  # to import; half a minute on a busy machine
# CLONE_NEWTIME, NEWNS, NEWUTS, NEWIPC, NEWPID, NEWNET: all that makes a host
HOST = 0x80 | 0x20000 | 0x4000000 | 0x8000000 | 0x20000000 | 0x40000000
_exec = asyncio.create_subprocess_exec


@functools.cache
def address() -> str:
    """Of the shared zygote, which the first call in a test run starts; the processes of pytest that
    are started later inherit it."""
    if inherited := os.environ.get(SHARED):
        return inherited
    name = os.environ[SHARED] = f"/tmp/epd-e2e-{os.getpid()}.zygote"
    Path(name).unlink(missing_ok=True)  # of an earlier process
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.warm", "--serve", name],
        stdin=subprocess.PIPE,  # its end is the end of this process
        env=environment,
    )
    atexit.register(Path(name).unlink, missing_ok=True)
    atexit.register(process.communicate)
    return name


# --- in the supervisor ----------------------------------------------------------------------------


class Fork:
    """What `Zygote` uses of an `asyncio.subprocess.Process`."""

    returncode = None  # the end is seen by `wait`

    def __init__(self, pid: int) -> None:
        self._pidfd = os.pidfd_open(pid)

    def kill(self) -> None:
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def wait(self) -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._pidfd, ended.set)
        await ended.wait()
        loop.remove_reader(self._pidfd)


async def start(*command: str, **options: Any) -> Any:
    """Instead of `asyncio.create_subprocess_exec`: once, a zygote is asked for and not made.  One
    of its own is made where the shared one has ended, as when the test process was killed."""
    where = os.environ.get(ADDRESS)
    if where is not None and zygote.__name__ in command:
        del os.environ[ADDRESS]
        with contextlib.suppress(TimeoutError, OSError, ValueError):
            async with asyncio.timeout(LIMIT_S):
                return await _asked(where, command[-1], options["env"], options["stdin"])
    return await _exec(*command, **options)


async def _asked(where: str, model_dir: str, environment: dict[str, str], control: int) -> Fork:
    """Raises OSError or ValueError: there is none any more."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        while True:
            try:
                asking.connect(where)
                break
            except (ConnectionRefusedError, FileNotFoundError):  # it is not there yet
                await asyncio.sleep(0.02)
        mark = os.memfd_create(environment[MARK])
        words = json.dumps([model_dir, environment]).encode()
        socket.send_fds(asking, [words], [control, 1, 2, mark])
        os.close(mark)
        asking.setblocking(False)
        return Fork(int(await loop.sock_recv(asking, MAX_NBYTES)))


# --- the shared zygote ----------------------------------------------------------------------------


def serve(name: str) -> None:
    """Fork for each that connects; returns with the test process."""
    gc.disable()
    from epd.engine.preload import preload
    from epd.runtime import child, worker  # noqa: F401
    from epd.tiny import CHECKPOINT

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(name)
        listening.listen(64)
        preload(str(CHECKPOINT))
        gc.freeze()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
        while select.select([listening, 0], [], [])[0] == [listening]:
            asked, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                be_zygote(asked)
            asked.close()


def be_zygote(asked: socket.socket) -> NoReturn:
    """As `zygote.main` does behind its imports."""
    from epd.engine.preload import preload

    go_to_host_of(asked)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    words, (control, *outputs, mark), *_ = socket.recv_fds(asked, MAX_NBYTES, 4)
    for number, fd in enumerate(outputs, 1):
        os.dup2(fd, number)
        os.close(fd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.set_inheritable(mark, False)  # by which the cluster's processes are found
    model_dir, environment = json.loads(words)
    os.environ.clear()
    os.environ.update(environment)
    asked.send(b"%d" % os.getpid())
    asked.close()
    with contextlib.suppress(Exception):
        preload(model_dir)
    gc.freeze()
    gc.enable()
    zygote._serve(socket.socket(fileno=control))
    os._exit(0)


def go_to_host_of(asking: socket.socket) -> None:
    """What returns is there; this process waits for its end, for its like has no other parent."""
    credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, *_ = struct.unpack("3i", credentials)
    if os.stat(f"/proc/{pid}/ns/pid").st_ino == os.stat("/proc/self/ns/pid").st_ino:
        return
    directory, libc = Path.cwd(), ctypes.CDLL(None, use_errno=True)
    if libc.setns(os.pidfd_open(pid), HOST):
        raise OSError(ctypes.get_errno(), "cannot go to the host that asks")
    os.chdir(directory)
    if os.fork():
        asking.close()
        with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored: it has none any more
            os.wait()
        os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(sys.argv[2])
    else:
        asyncio.create_subprocess_exec = start
        from epd.cli.main import run

        run()
