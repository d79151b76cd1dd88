"""Two hosts on this one: what their processes share is a cable, and a kernel.

A host is namespaces: of networks, processes, mounts (with a /dev/shm of its own), IPC and names.
Its first process reaps orphans and reads a pipe of this one, so a host ends with the test process,
and all that runs there ends with it.  What has no namespace is shared: files, the wall clock, CPUs.
ChaosClients are not on a host: each host has a second cable to them, which is never cut.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

NEEDED = ("ip", "nsenter", "unshare")
APART = ("--net", "--pid", "--mount", "--ipc", "--uts", "--time")
FIRST = (  # of a host's processes; children that nobody waits for are reaped by the kernel
    "mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs /run && mount -t sysfs sysfs /sys && "
    "hostname {name} && ip link set lo up && echo up && exec env --ignore-signal=CHLD cat"
)
TRIAL = "hostname one && ip link add cable type veth && ip link add card type bridge"
NOWHERE = "02:00:00:00:00:01"  # frames to it are received by no interface
NEXT = itertools.count()
PATIENCE_S = 60.0  # for the end of a host's processes
GONE = contextlib.suppress(subprocess.CalledProcessError)


@functools.cache
def unable() -> str:
    """Why no host can be made here; empty if it can."""
    if os.geteuid() != 0:
        return "only root can make the namespaces of a host"
    if absent := [name for name in NEEDED if shutil.which(name) is None]:
        return f"hosts are made with {', '.join(absent)} (Debian: iproute2, util-linux)"
    tried = subprocess.run(
        _first_process(0, TRIAL),
        capture_output=True,
        text=True,
        check=False,
    )
    return f"hosts cannot be made here: {tried.stderr.strip()}" if tried.returncode else ""


class MadeHost:
    """`address` is that of its network card, `client_address` is where clients find it."""

    def __init__(self, name: str, address: str, ahead_s: int = 0) -> None:
        """`ahead_s`: of the time since it was started, which is also its monotonic clock."""
        self.name = name
        self.address = address
        self._ahead_s = ahead_s
        number = next(NEXT)
        self._client_cable = f"e{os.getpid()}-{number}"
        subnet = 4 * ((os.getpid() * 4 + number) % 0x4000)
        network = f"10.79.{subnet >> 8}."
        self._outside, self.client_address = (f"{network}{(subnet & 255) + n}" for n in (1, 2))
        self.start()

    def start(self) -> None:
        """Also after `kill`."""
        self._process = subprocess.Popen(
            _first_process(self._ahead_s, FIRST.format(name=self.name)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"up\n"
        (first,) = psutil.Process(self._process.pid).children()
        self.first_pid = first.pid
        peer = ("peer", "name", "clients", "netns", str(first.pid))
        _call("ip", "link", "add", self._client_cable, "type", "veth", *peer)
        _call("ip", "addr", "add", f"{self._outside}/30", "dev", self._client_cable)
        _call("ip", "link", "set", self._client_cable, "up")
        self.ip("addr", "add", f"{self.client_address}/30", "dev", "clients")
        self.ip("link", "set", "clients", "up")
        # A bridge keeps its address while no cable is in it, as a card does.
        hardware = f"02:00:00:00:01:{int(self.address.rpartition('.')[2]):02x}"
        self.ip("link", "add", "card", "address", hardware, "type", "bridge")
        self.ip("addr", "add", f"{self.address}/24", "dev", "card")
        self.ip("link", "set", "card", "up")

    @property
    def enter(self) -> tuple[str, ...]:
        """What a command begins with that is to run there."""
        return (
            *("nsenter", "--target", str(self.first_pid), "--net", "--pid", "--mount", "--ipc"),
            *("--uts", "--time", f"--wdns={Path.cwd()}"),
            *("env", "UCX_TCP_BRIDGE_ENABLE=y"),  # else UCX, of NIXL, does not see the card
        )

    @property
    def shm(self) -> Path:
        """Its /dev/shm, as seen from here."""
        return Path(f"/proc/{self.first_pid}/root/dev/shm")

    def ip(self, *arguments: str) -> None:
        _call("nsenter", "--target", str(self.first_pid), "--net", "ip", *arguments)

    def run(self, *command: str) -> str:
        """Its output.  Raises CalledProcessError."""
        return _call(*self.enter, *command)

    def signal(self, number: int, pid: int) -> None:
        """`pid`: as this host counts."""
        self.run("sh", "-c", f"kill -{number} {pid}")

    def kill(self) -> None:
        """Nothing runs there any more when it returns."""
        if self._process.poll() is not None:
            return
        first = os.pidfd_open(self.first_pid)
        self._process.kill()
        _wait_for_end(first)
        self._process.communicate()
        with GONE:  # the kernel does it too, at once or a little later
            _call("ip", "link", "del", self._client_cable)


class HostCable:
    """Between the two."""

    def __init__(self, *hosts: MadeHost) -> None:
        self.hosts = hosts
        self.plug()

    def plug(self) -> None:
        """Also after a host that was killed has started again."""
        left, right = self.hosts
        left.ip(
            *("link", "add", "plug", "type", "veth"),
            *("peer", "name", "plug", "netns", str(right.first_pid)),
        )
        for host in self.hosts:
            host.ip("link", "set", "plug", "master", "card", "up")

    def limit(self, gbit_per_s: float) -> None:
        """What each host sends."""
        rate = ("rate", f"{gbit_per_s}gbit", "burst", "1mb", "latency", "50ms")
        for host in self.hosts:
            host.run("tc", "qdisc", "replace", "dev", "plug", "root", "tbf", *rate)

    def kill(self, host: MadeHost) -> None:
        """As by a loss of power; returns when nothing runs there any more."""
        host.kill()
        for other in self.hosts:
            if other is not host:
                with GONE:
                    other.ip("link", "del", "plug")

    def restart(self, host: MadeHost) -> None:
        host.start()
        self.plug()

    def cut(self, *senders: MadeHost) -> None:
        """What these hosts send does not arrive, and no error names it; all: of both."""
        for host in senders or self.hosts:
            (other,) = (h for h in self.hosts if h is not host)
            host.ip(*_neighbour("replace", other), "lladdr", NOWHERE, "nud", "permanent")

    def mend(self) -> None:
        for host in self.hosts:
            (other,) = (h for h in self.hosts if h is not host)
            with GONE:  # it was not cut
                host.ip(*_neighbour("del", other))

    def cut_for(self, seconds: float, *senders: MadeHost) -> None:
        self.cut(*senders)
        time.sleep(seconds)
        self.mend()


@contextlib.contextmanager
def two_hosts(names: tuple[str, str] = ("a", "b"), ahead_s: int = 0) -> Iterator[HostCable]:
    """With a cable between them; the second one's monotonic clock is ahead."""
    with contextlib.ExitStack() as stack:
        hosts = []
        for number, (name, ahead) in enumerate(zip(names, (0, ahead_s), strict=True), 1):
            hosts.append(MadeHost(name, f"10.80.0.{number}", ahead))
            stack.callback(hosts[-1].kill)
        yield HostCable(*hosts)


def _first_process(ahead_s: int, script: str) -> list[str]:
    clock = ("--monotonic", str(ahead_s), "--boottime", str(ahead_s))
    own = ("--mount-proc", "--kill-child", "--fork")
    return ["unshare", *APART, *clock, *own, "sh", "-c", script]


def _neighbour(verb: str, of: MadeHost) -> tuple[str, ...]:
    return ("neigh", verb, of.address, "dev", "card")


def _call(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _wait_for_end(pidfd: int) -> None:
    """Of the process that it names; of a namespace's first one: of all processes there."""
    with contextlib.closing(select.epoll()) as ends:
        ends.register(pidfd, select.EPOLLIN)
        assert ends.poll(PATIENCE_S), "a host does not end"
    os.close(pidfd)
