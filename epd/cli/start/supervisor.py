"""`epd run`: all processes of a topology or a role on this host, one status line each."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from epd.cli.boundary import CommandFailed
from epd.cli.start.leftovers import take_over
from epd.cli.start.plan import StartPlan
from epd.cli.start.ports import check_free, check_listen
from epd.cli.start.preflight import check_host
from epd.cli.start.rundir import remove_if_empty
from epd.config import GatewayConfig, InstanceConfig
from epd.runtime import lines
from epd.runtime.child import ChildSpec
from epd.runtime.claim import claim_path, own_life
from epd.runtime.logs import set_up_logging
from epd.runtime.program import ServerCommand
from epd.runtime.supervisor import Child, StartFailed, Supervisor
from epd.runtime.worker import on_hang_up

START_TIMEOUT_S = 300.0


def specs_of(plan: StartPlan) -> list[ChildSpec]:
    """One process per instance, and one for the gateway if the plan has one."""
    specs = [_spec_of(plan, instance, None) for instance in plan.instances]
    if plan.gateway is not None:
        specs.insert(0, _spec_of(plan, None, plan.gateway))
    return specs


def _spec_of(
    plan: StartPlan, instance: InstanceConfig | None, gateway: GatewayConfig | None
) -> ChildSpec:
    owner = instance or gateway
    assert owner is not None
    spec = _spec(plan, owner.instance_id)
    return msgspec.structs.replace(spec, instance=instance, gateway=gateway)


def _spec(plan: StartPlan, name: str) -> ChildSpec:
    return ChildSpec(
        name,
        log_level=plan.log.level,
        log_json=plan.log.as_json,
        claim=str(claim_path(plan.run_dir, name)),
        supervisor=own_life(),
    )


class Board:
    """A status line per process on stderr: redrawn on a terminal, else a line per change, or with
    --log-json an object.

    Redrawn only while all start: later the log of the processes moves the lines away.
    """

    def __init__(self, plan: StartPlan) -> None:
        self._began_s = time.monotonic()
        self._shown: dict[str, str] = {}
        self._say = plan.log.say
        self._redraw = sys.stderr.isatty() and not plan.log.as_json
        self._drawn = 0

    def changed(self, child: Child) -> None:
        own = child.spec.instance
        other = "vLLM" if child.spec.server is not None else "gateway"
        role = other if own is None else "+".join(own.roles) or f"rank of {own.rank_of}"
        age_s = time.monotonic() - self._began_s
        detail = "" if child.state == "failed" else child.detail  # the last line of all tells why
        line = f"{child.name:10} {role:22} {child.state:11} {age_s:5.1f} s  {detail}"
        new = child.name not in self._shown
        self._shown[child.name] = line.rstrip()
        if not self._redraw:
            told = {"process": child.name, "roles": role, "state": child.state, "detail": detail}
            self._say(self._shown[child.name], f"{child.name} is {child.state}", told)
            return
        up = f"\x1b[{self._drawn}A" if self._drawn else ""
        width = shutil.get_terminal_size().columns - 1  # a line that wraps would count as two
        text = "\n".join(f"\x1b[2K{line[:width]}" for line in self._shown.values())
        self._drawn += new
        lines.say(up + text)

    def settle(self) -> None:
        """Everything serves: from now on a line per change."""
        self._redraw = False


@contextlib.asynccontextmanager
async def running(
    plan: StartPlan,
    specs: list[ChildSpec] | None = None,
    start_timeout_s: float | None = START_TIMEOUT_S,
) -> AsyncIterator[Supervisor]:
    """The cluster, serving; stopped and cleaned up at the end, whatever that is.  `specs`: its
    processes, if not one per instance."""
    shown = Board(plan)
    try:
        specs = specs or specs_of(plan)
        await asyncio.to_thread(take_over, Path(plan.run_dir), [spec.name for spec in specs])
        if plan.gateway is not None:
            check_free(plan.gateway.host, plan.gateway.port)
            check_listen(plan.gateway.endpoint)
        for instance in plan.instances:
            check_listen(instance.endpoint)
            if instance.ranks_endpoint:
                check_listen(instance.ranks_endpoint, "--ranks-port ")
        check_host(plan.instances, in_one=any(spec.gateway and spec.instance for spec in specs))
        supervisor = Supervisor(list(specs), shown.changed)
        await supervisor.start()
        try:
            await _until_serving(supervisor, shown, start_timeout_s)
            yield supervisor
        finally:
            await _stop_whole(supervisor)
    finally:
        remove_if_empty(Path(plan.run_dir))


async def _until_serving(supervisor: Supervisor, shown: Board, timeout_s: float | None) -> None:
    try:
        await supervisor.wait_serving(timeout_s)
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


def run_topology(plan: StartPlan, servers: dict[str, ServerCommand] | None = None) -> int:
    """Serve until Ctrl-C, SIGTERM or SIGHUP; returns the exit status.  What is on another host is
    waited for without a limit: a gateway, or ranks; so are `servers` of vLLM (by name)."""
    replace = msgspec.structs.replace
    more = [replace(_spec(plan, name), server=one) for name, one in (servers or {}).items()]
    waits = bool(more) or plan.gateway is None or any(i.ranks_elsewhere for i in plan.instances)
    limit_s = None if waits else START_TIMEOUT_S
    return _run_supervised(plan, [*specs_of(plan), *more], limit_s)


def run_role(plan: StartPlan) -> int:
    """The same with all of the plan in one process, which waits for the others without a limit:
    they may be started in any order."""
    instance = plan.instances[0] if plan.instances else None
    return _run_supervised(plan, [_spec_of(plan, instance, plan.gateway)], None)


def _run_supervised(plan: StartPlan, specs: list[ChildSpec], start_timeout_s: float | None) -> int:
    set_up_logging("supervisor", plan.log.level, as_json=plan.log.as_json)
    return asyncio.run(_run(plan, specs, start_timeout_s))


async def _run(plan: StartPlan, specs: list[ChildSpec], start_timeout_s: float | None) -> int:
    asked: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    up = asyncio.Event()
    serving = asyncio.ensure_future(_serve(plan, specs, start_timeout_s, asked, up))

    def ask(status: int) -> None:
        if asked.done():
            serving.cancel()  # asked twice: do not wait for open requests
        else:
            asked.set_result(status)

    def hang_up() -> None:  # however often it is said
        if not asked.done():
            ask(0)

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, ask, 0)
    loop.add_signal_handler(signal.SIGINT, ask, 130)
    on_hang_up(hang_up)
    await asyncio.wait((serving, asked), return_when=asyncio.FIRST_COMPLETED)
    if asked.done():
        if not up.is_set():
            serving.cancel()  # still starting: it leaves through `running`, which stops all
        await asyncio.gather(serving, return_exceptions=True)
        return asked.result()
    return serving.result()


async def _serve(
    plan: StartPlan,
    specs: list[ChildSpec],
    start_timeout_s: float | None,
    asked: asyncio.Future[int],
    up: asyncio.Event,
) -> int:
    async with running(plan, specs, start_timeout_s) as supervisor:
        up.set()
        if plan.gateway is not None:
            url = f"{plan.gateway.base_url}/v1"
            waits = any(child.state == "waiting" for child in supervisor.children.values())
            where = f"{'listening' if waits else 'serving'} on {url}"
            plan.log.say(f"{where}; Ctrl-C stops", where, {"url": url})
        failed = asyncio.ensure_future(supervisor.first_failure())
        await asyncio.wait((failed, asked), return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            if sentence := failed.result():
                raise CommandFailed(sentence)
            return 0
        failed.cancel()
        return asked.result()
