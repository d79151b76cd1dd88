"""Workers forked from one process that has already imported what they all import.

Theory of operation
-------------------
torch and a modelling file of transformers cost a worker about four seconds of a core before it
reads its first weight, at each start.  The supervisor starts one zygote (the word is Android's),
which imports them once and then only forks.  It touches no device, starts no thread and holds no
weights.  A worker starts within milliseconds, and the pages of the libraries are shared.

The two speak over a seqpacket socket.  A request carries one descriptor, the socket that becomes
the worker's stdin and stdout.  The answer carries a pidfd, so that a signal never reaches another
process under a reused number.  The zygote alone can reap its children and sends the exit status of
each.  Workers watch their own socket for the supervisor's end; the kernel ends the zygote with it.
If the zygote itself dies its workers live on: their exit statuses are lost, but their pidfds show
their ends.  A new zygote is started at once, and only who is to be forked waits for it.  One that
hangs is killed: it has so long to import, to fork, and to report an end that a pidfd has shown
already."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import NoReturn, Protocol

import msgspec

from epd.errors import Told
from epd.runtime.system import die_with_parent

START_LIMIT_S = 120.0  # to import; half a minute on a busy machine
ANSWER_LIMIT_S = 10.0  # to a request, once it has answered one; and to the end of a worker
_MAX_WORD = 4096
FORK = b"fork"
LOST = 255  # exit status of a worker that ended after its zygote


class Process(Protocol):
    """What the supervisor needs of a process; asyncio's own has it, too."""

    pid: int
    stdin: asyncio.StreamWriter | None
    stdout: asyncio.StreamReader | None

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...

    def send_signal(self, signal: int) -> None: ...


class ZygoteLost(Told):
    """The zygote ended, and the one after it: nothing can be forked."""

    def __init__(self) -> None:
        super().__init__("the process that forks workers ended or hung; its own words are above")


class Forked(msgspec.Struct, frozen=True, tag="forked"):
    """Answer to a request, in order; the message carries the pidfd."""

    pid: int


class WorkerEnded(msgspec.Struct, frozen=True, tag="ended"):
    """A child ended; negative is a signal, as in `subprocess`."""

    pid: int
    exit_status: int


# --- the supervisor's side ------------------------------------------------------------------------


class ForkedProcess:
    """A child of the zygote; `hung` is called when that does not send its exit status."""

    def __init__(
        self,
        pid: int,
        pidfd: int,
        stdout: asyncio.StreamReader,
        stdin: asyncio.StreamWriter,
        hung: Callable[[], None],
    ) -> None:
        self.pid = pid
        self.stdin: asyncio.StreamWriter | None = stdin
        self.stdout: asyncio.StreamReader | None = stdout
        self._pidfd = pidfd
        self._hung = hung
        self._word_limit_s = ANSWER_LIMIT_S
        self._clock: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._loop.add_reader(pidfd, self._see_end)

    @property
    def returncode(self) -> int | None:
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def send_signal(self, signal: int) -> None:
        if not self._ended.done():
            with contextlib.suppress(ProcessLookupError):
                _signal.pidfd_send_signal(self._pidfd, signal)

    def orphan(self) -> None:
        """Its exit status will not come."""
        self._word_limit_s = 0.0

    def _see_end(self) -> None:
        """The kernel shows the end; its zygote sends the exit status."""
        self._loop.remove_reader(self._pidfd)
        self._clock = self._loop.call_later(self._word_limit_s, self._miss_word)

    def _miss_word(self) -> None:
        self.end(LOST)
        self._hung()

    def end(self, exit_status: int) -> None:
        if not self._ended.done():
            self._loop.remove_reader(self._pidfd)
            if self._clock is not None:
                self._clock.cancel()
            os.close(self._pidfd)
            self._ended.set_result(exit_status)
            assert self.stdin is not None
            self.stdin.close()


_signal = signal  # `send_signal` names its argument as asyncio does


class Zygote:
    """The supervisor's handle; started on first use, and again after it was lost."""

    def __init__(self, model_dir: str) -> None:
        self._model_dir = model_dir
        self._lock = asyncio.Lock()  # answers come in the order of requests
        self._processes: list[asyncio.subprocess.Process] = []  # the last one, and who still ends
        self._control: socket.socket | None = None
        self._answer: asyncio.Future[ForkedProcess] | None = None
        self._has_answered = False
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._children: dict[int, ForkedProcess] = {}
        self._orphans: list[ForkedProcess] = []  # of zygotes that were lost
        self._starting: asyncio.Task[None] | None = None
        self._closed = False

    async def fork(self) -> ForkedProcess:
        """A new worker process, waiting for its `ChildSpec`.  Raises ZygoteLost."""
        async with self._lock:
            try:
                return await self._fork()
            except ZygoteLost:
                return await self._fork()  # of a new one; two that end are not an accident

    async def _fork(self) -> ForkedProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            self._streams = _, stdin = await asyncio.open_connection(sock=ours)
            try:
                if self._control is None:
                    await self._start()
                if self._control is None:
                    raise ZygoteLost
                self._answer = asyncio.get_running_loop().create_future()
                with contextlib.suppress(OSError):  # the end of the control socket says more
                    socket.send_fds(self._control, [FORK], [theirs.fileno()])
                limit_s = ANSWER_LIMIT_S if self._has_answered else START_LIMIT_S
                done, _ = await asyncio.wait((self._answer,), timeout=limit_s)
                if not done:
                    self._give_up(self._control)
                return await self._answer
            except BaseException:
                stdin.close()
                raise

    async def _start(self) -> None:
        if self._closed:
            return
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "epd.runtime.zygote",
                self._model_dir,
                stdin=theirs.fileno(),
                # numpy's BLAS, which nobody here uses, would start threads that no fork has.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
            )
        ending = (one for one in self._processes if one.returncode is None)
        self._processes = [*ending, process]
        self._control, self._has_answered = control, False
        control.setblocking(False)
        asyncio.get_running_loop().add_reader(control, self._on_readable, control)
        if self._closed:  # asked while it was being made
            await self.close()

    async def _start_again(self) -> None:
        async with self._lock:
            if self._control is None:
                with contextlib.suppress(OSError):  # who forks next meets it, and tells
                    await self._start()

    def _on_readable(self, control: socket.socket) -> None:
        try:
            word, fds, *_ = socket.recv_fds(control, _MAX_WORD, 1)
        except BlockingIOError:
            return
        except OSError:
            word, fds = b"", []
        if not word:
            self._lost()
            return
        answer = msgspec.json.decode(word, type=Forked | WorkerEnded)
        if isinstance(answer, Forked):
            assert self._answer is not None
            assert self._streams is not None
            hung = partial(self._give_up, control)
            child = ForkedProcess(answer.pid, fds[0], *self._streams, hung)
            self._children[answer.pid] = child
            self._answer.set_result(child)
            self._has_answered = True
        elif answer.pid in self._children:  # else it was late
            self._children.pop(answer.pid).end(answer.exit_status)

    def _give_up(self, control: socket.socket | None) -> None:
        """It hangs: another one takes its place."""
        if control is not None and control is self._control:
            with contextlib.suppress(ProcessLookupError):
                self._processes[-1].kill()
            self._lost()

    def _lost(self) -> None:
        control, self._control = self._control, None
        if control is not None:
            asyncio.get_running_loop().remove_reader(control)
            control.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ZygoteLost())
        orphans = list(self._children.values())
        self._children.clear()
        for orphan in orphans:
            orphan.orphan()
        if orphans and not self._closed:  # one that never forked would only end again
            self._starting = asyncio.create_task(self._start_again())
        self._orphans = [child for child in self._orphans if child.returncode is None] + orphans

    async def close(self) -> None:
        """End it; children that are left are killed."""
        self._closed = True
        self._lost()
        for orphan in self._orphans:
            orphan.send_signal(signal.SIGKILL)
            orphan.end(LOST)
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


# --- the zygote's side ----------------------------------------------------------------------------


def _serve(control: socket.socket) -> None:
    """Fork on request, report ends; returns with the supervisor."""
    pids: dict[int, int] = {}  # pidfd to pid
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not control:
                    pidfd = key.fd
                    selector.unregister(pidfd)
                    pid, status = os.waitpid(pids.pop(pidfd), 0)
                    os.close(pidfd)
                    _tell(control, WorkerEnded(pid, os.waitstatus_to_exitcode(status)))
                    continue
                word, fds, *_ = socket.recv_fds(control, _MAX_WORD, 1)
                if not word:
                    return
                (fd,) = fds
                pid = os.fork()
                if pid == 0:
                    control.close()
                    selector.close()
                    _be_child(fd, list(pids))
                os.close(fd)
                pidfd = os.pidfd_open(pid)
                pids[pidfd] = pid
                selector.register(pidfd, selectors.EVENT_READ)
                _tell(control, Forked(pid), [pidfd])


def _tell(control: socket.socket, word: Forked | WorkerEnded, fds: list[int] | None = None) -> None:
    with contextlib.suppress(OSError):  # the supervisor is gone: the next read says so
        socket.send_fds(control, [msgspec.json.encode(word)], fds or [])


def _be_child(fd: int, inherited: list[int]) -> NoReturn:
    """In the fork: a session and a stdin and stdout of its own, then the worker; never returns."""
    from epd.runtime import child

    for other in inherited:
        os.close(other)
    os.setsid()
    os.dup2(fd, 0)
    os.dup2(fd, 1)
    os.close(fd)
    child.main_and_exit()


def main() -> None:
    gc.disable()  # imports make next to no garbage, and looking for it is a fifth of their time
    from epd.runtime import child, worker  # noqa: F401  (what every worker imports)

    die_with_parent()  # also one that stands still
    # Between processes of one user; the number 0 is given back to what expects a stdin.
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with contextlib.suppress(Exception):  # a worker meets the same error and says it better
        from epd.engine.preload import preload

        preload(sys.argv[1])
    gc.freeze()  # what is here now stays: collections in workers need not write to its pages
    gc.enable()
    _serve(control)


if __name__ == "__main__":
    main()
