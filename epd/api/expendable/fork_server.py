"""A process that forks one child for each piece of work on what a stranger sent.

Theory of operation
-------------------
A native parser that overflows its stack, loops or takes all memory ends its process.  So such work
is done in a child that may die.  `python -m epd.api.expendable.fork_server MODULE ARGUMENT...`
imports the module, calls its `prepare(*arguments)` for what all children need, and only forks from
then on.  A child starts within milliseconds, also behind one that died, and keeps nothing of a
stranger's.

Requests come over a seqpacket socket: `ChildBounds`, and two sockets.  Over the first the child
reads its work up to end of file.  It answers in frames (a length of 4 bytes, big-endian, then as
many bytes); the last one is its result.  Over the second comes its exit status, 4 bytes, as
`subprocess` counts them.  The server ends with its owner (end of file), its children with it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import resource
import selectors
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import NoReturn

import msgspec

FRAME = struct.Struct("!I")
STATUS = struct.Struct("!i")
READY = b"ready"
OUT_OF_MEMORY = 12  # exit status of a child: ENOMEM
NICE = 10  # streams and steps go first
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
MAX_WORD = 4096
CHUNK_NBYTES = 1 << 18

Say = Callable[[bytes], None]
Work = Callable[[bytes, Say], None]  # of a request; says its result


class ChildBounds(msgspec.Struct, frozen=True):
    """What a child may take: more is its death."""

    cpu_s: float  # of a processor
    wall_s: float  # of patience on a busy machine
    memory_nbytes: int  # of address space beyond what its server has
    stack_nbytes: int


def _serve(control: socket.socket, work: Work) -> None:
    """Fork on request, pass on how each ended; returns with the owner."""
    ends: dict[int, tuple[int, socket.socket]] = {}  # by pidfd: pid, and where its status goes
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not control:
                    selector.unregister(key.fd)
                    pid, end = ends.pop(key.fd)
                    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    os.close(key.fd)
                    with end:
                        _send(end, STATUS.pack(status))
                    continue
                word, fds, *_ = socket.recv_fds(control, MAX_WORD, 2)
                if not word:
                    return
                talk, end = (socket.socket(fileno=fd) for fd in fds)
                bounds, server = msgspec.msgpack.decode(word, type=ChildBounds), os.getpid()
                pid = os.fork()
                if pid == 0:
                    _be_child(bounds, server, talk, work)
                talk.close()
                pidfd = os.pidfd_open(pid)
                ends[pidfd] = pid, end
                selector.register(pidfd, selectors.EVENT_READ)


def _send(to: socket.socket, data: bytes) -> None:
    try:
        to.sendall(data)
    except OSError:  # who asked has left; nobody else reads it
        to.close()


def _be_child(bounds: ChildBounds, server: int, talk: socket.socket, work: Work) -> NoReturn:
    """In the fork; leaves without teardown, which is the server's business."""
    status = 1
    try:
        _limit(bounds, server)
        request = bytearray()
        while piece := talk.recv(CHUNK_NBYTES):
            request += piece
        work(bytes(request), lambda data: _send(talk, FRAME.pack(len(data)) + data))
        status = 0
    except MemoryError:
        status = OUT_OF_MEMORY
    finally:
        os._exit(status)


def _limit(bounds: ChildBounds, server: int) -> None:
    """Timers whose signals nothing catches, since native code could outlast a handler."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:  # it died before the kernel was asked
        os._exit(1)
    with open("/proc/self/oom_score_adj", "w") as score:  # where memory is short, first of all
        score.write("1000")
    libc.prctl(PR_SET_DUMPABLE, 0)  # no core file
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a library's last words are no log lines
    os.nice(NICE)
    with open("/proc/self/statm") as pages:
        taken = int(pages.read().split()[0]) * resource.getpagesize()
    for kind, limit in (
        (resource.RLIMIT_AS, taken + bounds.memory_nbytes),
        (resource.RLIMIT_STACK, bounds.stack_nbytes),
    ):
        resource.setrlimit(kind, (limit, limit))
    signal.setitimer(signal.ITIMER_PROF, bounds.cpu_s)
    signal.setitimer(signal.ITIMER_REAL, bounds.wall_s)


def main() -> None:
    for asked_of_owner in (signal.SIGINT, signal.SIGTERM):
        signal.signal(asked_of_owner, signal.SIG_IGN)
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    work = importlib.import_module(sys.argv[1]).prepare(*sys.argv[2:])
    gc.freeze()  # collections in children need not write to these pages
    control.send(READY)
    _serve(control, work)


if __name__ == "__main__":
    main()
