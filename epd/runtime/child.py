"""A supervised process: it reads its task from stdin, writes its state, and ends with its parent.

The supervisor writes one line of JSON, a `ChildSpec`, and keeps the socket open: its end of file is
the supervisor's death, however that came, and the child closes.  Nothing is passed on the command
line or in the environment, and no orphan stays.  Each change of status is a line of JSON; so is the
answer of the loop to anything else on stdin, the sign that it runs."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn, TypeVar

import msgspec

from epd.config import GatewayConfig, InstanceConfig
from epd.groups.asks import GroupLost
from epd.runtime import lines
from epd.runtime.claim import Life, claimed
from epd.runtime.cpus import pin
from epd.runtime.loading import load_engines
from epd.runtime.logs import set_up_logging
from epd.runtime.program import ServerCommand
from epd.runtime.worker import ALIVE, EXIT_EXPELLED, Ending, Status, serve_instance

if TYPE_CHECKING:
    from epd.groups.processes import RankProcesses


class ChildSpec(msgspec.Struct, frozen=True):
    """What a child is to be: a gateway, an instance, (both given) all in one process, or who keeps
    a vLLM server."""

    name: str
    instance: InstanceConfig | None = None
    gateway: GatewayConfig | None = None
    server: ServerCommand | None = None
    log_level: str = "warning"
    log_json: bool = False
    claim: str = ""  # the file that says who it is
    supervisor: Life | None = None

    def having(self, roles: Sequence[str]) -> ChildSpec:
        assert self.instance is not None
        return msgspec.structs.replace(self, instance=self.instance.having(tuple(roles)))


class StatusLine(msgspec.Struct, frozen=True):
    """The state of a child: loading, joining, waiting, serving, draining, failed, ..."""

    state: str
    detail: str = ""


T = TypeVar("T")
PROGRESS_S = 5.0

Serve = Callable[[Ending], Awaitable[int]]


class LoadingShare:
    """Reports now and then how much of the weights has been read."""

    def __init__(self, status: Status, now_s: Callable[[], float] = time.monotonic) -> None:
        self._status = status
        self._now_s = now_s
        self._told_s = now_s()

    def tell(self, stage: str, done_nbytes: int, total_nbytes: int) -> None:
        now_s = self._now_s()
        if now_s - self._told_s >= PROGRESS_S:
            self._told_s = now_s
            share, size = done_nbytes / total_nbytes, total_nbytes / 2**30
            self._status("loading", f"{share:.0%} of {size:.1f} GiB of the {stage} model")


def prepare(spec: ChildSpec, status: Status, ranks: RankProcesses | None = None) -> Serve:
    """Load what blocks, before there is a loop; returns what to run on it."""
    from epd.model_files.fingerprint import model_fingerprint

    status("loading", "")
    gateway, instance = spec.gateway, spec.instance
    if instance is None:
        from epd.runtime.front import serve_gateway

        assert gateway is not None
        return lambda ending: serve_gateway(gateway, ending, status)
    engines = load_engines(instance, LoadingShare(status).tell, ranks)
    if gateway is not None:
        from epd.runtime.front import serve_all

        return lambda ending: serve_all(gateway, instance, engines, ending, status)
    fingerprint = model_fingerprint(instance.model_dir, instance.engine.quantization)
    return lambda ending: serve_instance(instance, engines, fingerprint, ending, status)


def run(spec: ChildSpec, status: Status) -> int:
    """Be it until it, or stdin, ends; returns the exit status."""
    import uvloop

    set_up_logging(spec.name, spec.log_level, as_json=spec.log_json)
    pin(_cpus_of(spec))
    if spec.server is not None:
        return uvloop.run(_keep_server(spec.server, status))
    if spec.instance is not None and spec.instance.rank_of:
        return uvloop.run(_be_rank(spec.instance, status))
    ranks = _fork_ranks(spec)
    load = partial(prepare, spec, status, ranks)
    alone = load() if ranks is None else None

    async def live() -> int:
        ending = Ending()
        _watch_stdin(ending, status)
        serve = alone
        if ranks is not None:
            try:
                serve = await _unless(ending.now, ranks.form(load, status))
            except GroupLost as lost:
                if not ranks.config.ranks_elsewhere:
                    raise
                status("group lost", str(lost))  # by what another host did: another life may do
                return EXIT_EXPELLED
        ending.watch_signals()
        return ending.exit_status if serve is None else await serve(ending)

    return uvloop.run(live())


async def _be_rank(instance: InstanceConfig, status: Status) -> int:
    """Of a leader on another host, until that ends, or this process is asked to."""
    from epd.groups.elsewhere import be_rank

    ending = Ending()
    ending.watch_signals()
    _watch_stdin(ending, status)
    exit_status = await _unless(ending.drain, be_rank(instance, status))
    return ending.exit_status if exit_status is None else exit_status


async def _keep_server(server: ServerCommand, status: Status) -> int:
    from epd.vllm.child import keep

    ending = Ending()
    ending.watch_signals()
    _watch_stdin(ending, status)
    return await keep(server, ending, status)


async def _unless(asked: asyncio.Event, work: Awaitable[T]) -> T | None:
    """What comes of it; None if the process is asked to end before."""
    working, ends = asyncio.ensure_future(work), asyncio.ensure_future(asked.wait())
    await asyncio.wait((working, ends), return_when=asyncio.FIRST_COMPLETED)
    ends.cancel()
    return working.result() if working.done() else None


def _fork_ranks(spec: ChildSpec) -> RankProcesses | None:
    """None: the instance has one rank, or there is none."""
    instance = spec.instance
    if instance is None or instance.num_ranks == 1:
        return None
    from epd.groups.processes import fork_ranks

    return fork_ranks(instance, spec.log_level, log_json=spec.log_json)


def _cpus_of(spec: ChildSpec) -> str:
    """What is bound to CPUs is bound before it starts a thread."""
    if spec.instance is not None:
        return spec.instance.engine.cpu_affinity
    return spec.gateway.cpu_affinity if spec.gateway is not None else ""


def _watch_stdin(ending: Ending, status: Status) -> None:
    loop = asyncio.get_running_loop()

    def on_readable() -> None:
        try:
            ended = not os.read(0, 4096)
        except ConnectionError:  # it died with our last words unread
            ended = True
        if ended:
            loop.remove_reader(0)
            ending.at_once(0)
        else:
            status(ALIVE, "")

    loop.add_reader(0, on_readable)


_states = lines.Lines(1)  # a supervisor that stands still holds up no loop
os.register_at_fork(after_in_child=_states.forget)


def _say(state: str, detail: str = "") -> None:
    _states.say(msgspec.json.encode(StatusLine(state, detail)))


def main() -> int:
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):  # the supervisor died before it had said what to be
        return 1
    spec = msgspec.json.decode(line, type=ChildSpec)
    from epd.errors import explain

    try:
        with claimed(spec.claim, spec.supervisor):
            return run(spec, _say)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        status, sentence = explain(error)
        _say("failed", sentence)
        if os.environ.get("EPD_TRACEBACK"):
            raise
        return status


def main_and_exit() -> NoReturn:
    """`main`, then an end without teardown: all is closed, and unloading torch takes seconds."""
    exit_status = main()
    _states.flush()
    lines.flush()
    os._exit(exit_status)


if __name__ == "__main__":
    main_and_exit()
