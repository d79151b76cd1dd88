"""This host and its processes, as the transports need them."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

# States of the kernel.
TCP_FIN_WAIT1, TCP_CLOSE, TCP_CLOSE_WAIT, TCP_LAST_ACK, TCP_LISTEN, TCP_CLOSING = 4, 7, 8, 9, 10, 11
TCP_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


class TcpSocket(NamedTuple):
    """Of this process, whoever opened it.  `user_timeout_ms` is its TCP_USER_TIMEOUT."""

    port: int
    state: int
    user_timeout_ms: int
    is_at_listener: bool  # of this process, or is one


Carries = Callable[[TcpSocket], bool]


@functools.cache
def this_boot_id() -> str:
    """Equal for all processes of one boot of one host, whatever container they are in."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


@functools.cache
def this_host_id() -> str:
    """Equal for all processes of one boot of one host that count pids alike.

    Containers of a host share its boot, but have pids of their own: the same number is another
    process there, and no sign of a peer's end (fault F60).
    """
    try:
        return f"{this_boot_id()}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return this_boot_id()


def is_process_dead(pid: int) -> bool:
    """True once the process and all its threads have ended (a zombie has); False if unsure.

    A pid that was given to another process meanwhile counts as alive.
    """
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # the latter, and some of the former: no pid at all
        return False
    try:
        return has_ended(fd)
    finally:
        os.close(fd)


def has_ended(pidfd: int, timeout_s: float = 0.0) -> bool:
    """Whether the process, all its threads and what it has queued on devices end within."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(1000 * timeout_s))


def has_half_closed_arrivals(carries: Carries) -> bool:
    """Whether this process has connections of this kind that the other ends have closed.

    As long as there are any, bytes of a dead peer may be on their way: unread here, or queued by
    this host's kernel for a process that has ended.  Blocks briefly.
    """
    sockets = [one for one in tcp_sockets() if carries(one)]
    half_closed = any(one.state in {TCP_CLOSE, TCP_CLOSE_WAIT} for one in sockets)
    return half_closed or is_still_sent_to(one.port for one in sockets)


def own_ports(carries: Carries) -> tuple[int, ...]:
    """Of this process's sockets of this kind.  Blocks briefly."""
    return tuple(sorted({one.port for one in tcp_sockets() if carries(one)}))


def is_still_sent_to(ports: Iterable[int]) -> bool:
    """Whether this host's kernel has bytes for one of these, here or elsewhere, whose sender has
    ended.  Blocks briefly."""
    return not set(ports).isdisjoint(_ports_still_sent_to())


def _ports_still_sent_to() -> Iterator[int]:
    """Of what connections without a process, of this network namespace, have yet to deliver."""
    for table in TCP_TABLES:
        with contextlib.suppress(OSError), open(table, encoding="ascii") as file:
            for line in list(file)[1:]:
                _, _, remote, state, _, _, _, _, _, inode, *_ = line.split()
                if inode == "0" and int(state, 16) in {TCP_FIN_WAIT1, TCP_CLOSING, TCP_LAST_ACK}:
                    yield int(remote.rpartition(":")[2], 16)


def tcp_sockets() -> list[TcpSocket]:
    """Blocks briefly."""
    found = list(_tcp_sockets())
    listening = {port for port, state, _ in found if state == TCP_LISTEN}
    return [TcpSocket(*one, is_at_listener=one[0] in listening) for one in found]


def _tcp_sockets() -> Iterator[tuple[int, int, int]]:
    """Of each: port, state, user timeout."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            copy = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed meanwhile, or not a socket of a known family
            continue
        with contextlib.closing(copy):
            if copy.family in {socket.AF_INET, socket.AF_INET6} and copy.type == socket.SOCK_STREAM:
                state = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
                limit_ms = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
                yield copy.getsockname()[1], state, limit_ms
