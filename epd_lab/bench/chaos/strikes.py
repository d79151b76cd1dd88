"""Faults as they are done to real processes, on this host or on two made ones."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil

from epd.cli.start.ports import any_free
from epd_lab.bench.chaos.cluster import Kinds, cluster
from epd_lab.bench.chaos.hosts import HostCable
from epd_lab.bench.chaos.outages import Outages
from epd_lab.bench.chaos.plan import Fault, Wish, members_of, parts_of
from epd_lab.bench.chaos.process import Command, ServingCommand, discarding

LOOK_S = 0.1
LIMITS = {"disk": psutil.RLIMIT_FSIZE, "descriptors": psutil.RLIMIT_NOFILE}


class Site:
    """What is hit.  With a cable the second command is on host b."""

    def __init__(
        self, gateways: list[ServingCommand], commands: list[Command], cable: HostCable | None
    ) -> None:
        self.gateways, self.commands, self._cable = gateways, commands, cable

    def strike(self, fault: Fault, pid: int) -> Callable[[], None]:
        """Do it; what it returns undoes it.  `pid`: of the instance, as its host counts."""
        if fault.kind == "cut":
            assert self._cable is not None
            self._cable.cut(*(host for host in self._cable.hosts if host.name == fault.who))
            return self._cable.mend
        with contextlib.suppress(psutil.NoSuchProcess, LookupError):  # it has just ended
            if fault.kind == "gateway":  # its supervisor starts another
                children = self.gateways[int(fault.who)].processes()
                (gateway,) = [p for p in children if "epd.runtime.child" in p.cmdline()]
                return _strike(gateway, "kill")
            return _strike(self._process(pid, fault), fault.kind)
        return lambda: None

    def _process(self, pid: int, fault: Fault) -> psutil.Process:
        """As this host counts."""
        commands = self.commands
        if self._cable is not None:
            commands = [commands[fault.who.startswith("b/")]]
        found = [p for c in commands for p in c.processes() if _inner_pid(p.pid) == pid]
        return [*found, *found[0].children()][fault.rank]

    def stop(self) -> list[str]:
        """In order; what is left, or went wrong."""
        found = []
        for command in reversed(self.commands):
            try:
                if status := command.stop():
                    found.append(f"exit status {status}")
            except AssertionError as failed:
                found.append(str(failed))
        return found


def _strike(process: psutil.Process, kind: str) -> Callable[[], None]:
    if kind == "kill":
        process.kill()
        return lambda: None
    if kind == "stop":
        process.suspend()
        return partial(process.resume)
    limit = LIMITS[kind]
    soft, hard = process.rlimit(limit)
    process.rlimit(limit, (process.num_fds() if kind == "descriptors" else 0, hard))
    return lambda: process.rlimit(limit, (soft, hard))


@contextlib.contextmanager
def site(wish: Wish, directory: Path, kinds: Kinds) -> Iterator[Site]:
    """All instances serve; discarded afterwards."""
    count = len(members_of(wish))
    flags = ("--encoder-cache-dir", str(directory / "rows"), *wish.flags)
    if wish.partition:
        with cluster(parts_of(wish.topology), directory, *flags, kinds=kinds) as made:
            made.wait_ready(count)
            yield Site([made.server], [made.server, made.other], made.cable)
        return
    if wish.num_gateways > 1:
        with _several_gateways(wish, flags, kinds) as made_site:
            for server in made_site.gateways:
                server.wait_healthy(count)
            yield made_site
        return
    with discarding(kinds[0](wish.topology, *flags)) as server:
        server.wait_healthy(count)
        yield Site([server], [server], None)


@contextlib.contextmanager
def _several_gateways(wish: Wish, flags: tuple[str, ...], kinds: Kinds) -> Iterator[Site]:
    """A command for each, and one for the instances, which join all."""
    endpoints = [f"tcp://127.0.0.1:{any_free('127.0.0.1')}" for _ in range(wish.num_gateways)]
    with contextlib.ExitStack() as stack:
        gateways: list[ServingCommand] = []
        for endpoint in endpoints:
            own = ("--listen", endpoint, *wish.flags)
            gateways.append(stack.enter_context(discarding(kinds[0]("gateway", *own))))
        joining = ("--join", ",".join(endpoints), "--threads", "1")
        workers = kinds[1]("run", "--topology", wish.topology, *joining, *flags)
        yield Site(gateways, [*gateways, stack.enter_context(discarding(workers))], None)


async def strike_all(
    site: Site,
    plan: tuple[Fault, ...],
    outages: Outages,
    pid_of: Callable[[str], int],
    now_s: Callable[[], float],
    until_s: float,
) -> list[tuple[float, Fault]]:
    """One after another, each when it is time and its stage keeps an instance.  One that is held
    back delays the rest, so none comes sooner behind another than planned.  All are undone when
    this returns.  Returns the faults that came, and when."""
    done: list[tuple[float, Fault]] = []
    late_s = 0.0
    async with asyncio.TaskGroup() as lasting:
        for fault in plan:
            await asyncio.sleep(max(0.0, fault.at_s + late_s - now_s()))
            while True:
                if outages.may(fault) or now_s() >= until_s:
                    break
                await asyncio.sleep(LOOK_S)
            if now_s() >= until_s:
                break
            late_s = max(late_s, now_s() - fault.at_s)
            names = outages.hit_by(fault)
            pid = pid_of(names[0]) if names else 0
            outages.hit(names, now_s(), ends=fault.kind == "kill")
            done.append((now_s(), fault))
            print(f"at {now_s():.1f} s: {fault}", file=sys.stderr, flush=True)
            undo = await asyncio.to_thread(site.strike, fault, pid)
            if fault.lasts_s:
                lasting.create_task(_undo(undo, fault, names, outages, now_s))
    return done


async def _undo(
    undo: Callable[[], None],
    fault: Fault,
    names: list[str],
    outages: Outages,
    now_s: Callable[[], float],
) -> None:
    await asyncio.sleep(fault.lasts_s)
    with contextlib.suppress(psutil.NoSuchProcess):  # it was replaced meanwhile
        await asyncio.to_thread(undo)
    outages.release(names, now_s())


def _inner_pid(pid: int) -> int:
    """As the process itself counts; -1 where it has ended."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        return int(re.findall(r"^NSpid:.*?(\d+)$", status, re.MULTILINE)[0])
    return -1
