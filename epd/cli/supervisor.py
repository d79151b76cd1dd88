"""`epd run --topology`: all processes of a cluster on this host, one status line each."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

from epd.cli.boundary import CommandFailed
from epd.cli.compose import specs_of
from epd.cli.plan import Plan
from epd.cli.preflight import check_host
from epd.cli.rundir import remove_if_empty
from epd.runtime.supervisor import Child, StartFailed, Supervisor

START_TIMEOUT_S = 300.0


class Board:
    """A status line per process on stderr: redrawn on a terminal, else a line per change.

    Redrawn only while all start: later the log of the processes moves the lines away.
    """

    def __init__(self, plan: Plan) -> None:
        roles = {i.instance_id: "+".join(i.roles) for i in plan.instances}
        self._roles = roles
        self._began_s = time.monotonic()
        self._shown: dict[str, str] = {}
        self._redraw = sys.stderr.isatty()
        self._drawn = 0

    def changed(self, child: Child) -> None:
        role = self._roles.get(child.name, "gateway")
        age_s = time.monotonic() - self._began_s
        detail = "" if child.state == "failed" else child.detail  # the last line of all tells why
        line = f"{child.name:10} {role:22} {child.state:11} {age_s:5.1f} s  {detail}"
        new = child.name not in self._shown
        self._shown[child.name] = line.rstrip()
        if not self._redraw:
            print(self._shown[child.name], file=sys.stderr, flush=True)
            return
        up = f"\x1b[{self._drawn}A" if self._drawn else ""
        width = shutil.get_terminal_size().columns - 1  # a line that wraps would count as two
        text = "".join(f"\x1b[2K{line[:width]}\n" for line in self._shown.values())
        self._drawn += new
        print(up + text, end="", file=sys.stderr, flush=True)

    def settle(self) -> None:
        """Everything serves: from now on a line per change."""
        self._redraw = False


@contextlib.asynccontextmanager
async def running(plan: Plan) -> AsyncIterator[Supervisor]:
    """The cluster, serving; stopped and cleaned up at the end, whatever that is."""
    shown = Board(plan)
    try:
        check_host(plan.instances)
        supervisor = Supervisor(specs_of(plan), shown.changed)
        await supervisor.start()
        try:
            await _until_serving(supervisor, shown)
            yield supervisor
        finally:
            await _stop_whole(supervisor)
    finally:
        remove_if_empty(Path(plan.run_dir))


async def _until_serving(supervisor: Supervisor, shown: Board) -> None:
    try:
        await supervisor.wait_serving(START_TIMEOUT_S)
    except StartFailed as failed:
        raise CommandFailed(str(failed)) from None
    finally:
        shown.settle()


async def _stop_whole(supervisor: Supervisor) -> None:
    """Stop to the end, which is bounded: another Ctrl-C ends the draining, and leaves nothing."""
    stopping = asyncio.ensure_future(supervisor.stop())
    while not stopping.done():
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError:
            supervisor.hurry()
    stopping.result()


def run_topology(plan: Plan) -> int:
    """Serve until Ctrl-C or SIGTERM; returns the exit status."""
    return asyncio.run(_run(plan))


async def _run(plan: Plan) -> int:
    asked: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    up = asyncio.Event()
    serving = asyncio.ensure_future(_serve(plan, asked, up))

    def ask(status: int) -> None:
        if asked.done():
            serving.cancel()  # asked twice: do not wait for open requests
        else:
            asked.set_result(status)

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, ask, 0)
    loop.add_signal_handler(signal.SIGINT, ask, 130)
    await asyncio.wait((serving, asked), return_when=asyncio.FIRST_COMPLETED)
    if asked.done():
        if not up.is_set():
            serving.cancel()  # still starting: it leaves through `running`, which stops all
        await asyncio.gather(serving, return_exceptions=True)
        return asked.result()
    return serving.result()


async def _serve(plan: Plan, asked: asyncio.Future[int], up: asyncio.Event) -> int:
    async with running(plan) as supervisor:
        up.set()
        if plan.gateway is not None:
            scheme = "https" if plan.gateway.access.ssl_certfile else "http"
            url = f"{scheme}://{plan.gateway.host}:{plan.gateway.port}/v1"
            print(f"serving on {url}; Ctrl-C stops", file=sys.stderr, flush=True)
        failed = asyncio.ensure_future(supervisor.first_failure())
        await asyncio.wait((failed, asked), return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            raise CommandFailed(failed.result())
        failed.cancel()
        return asked.result()
