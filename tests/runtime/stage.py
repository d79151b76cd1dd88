"""A supervised child whose processes do what a test says."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import msgspec

from epd.config import EngineConfig, InstanceConfig, Timing
from epd.fsm.child import S, StartDue
from epd.runtime import supervisor
from epd.runtime.child import ChildSpec, StatusLine
from epd.runtime.supervisor import Child
from epd.runtime.zygote import Process
from tests.patience import PATIENCE_S

SHORT_S = 0.01


class Played:
    """A process that does what a test says."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.stdin = mock.Mock()
        self.stdout: asyncio.StreamReader | None = asyncio.StreamReader()
        self.signals: list[int] = []
        self.dies_of: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def returncode(self) -> int | None:
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        return await self._ended

    def send_signal(self, signal: int) -> None:
        self.signals.append(signal)
        if signal in self.dies_of:
            self.end(-signal)

    def say(self, state: str, detail: str = "") -> None:
        self.print(msgspec.json.encode(StatusLine(state, detail)) + b"\n")

    def print(self, data: bytes) -> None:
        assert self.stdout is not None
        self.stdout.feed_data(data)

    def end(self, exit_status: int) -> None:
        assert self.stdout is not None
        self.stdout.feed_eof()
        self._ended.set_result(exit_status)


class Stage:
    """A child, its processes in order, and what was shown of it."""

    def __init__(self, timing: Timing | None = None) -> None:
        self.made: list[Played] = []
        self.shown: list[str] = []
        self.may_launch = asyncio.Event()
        self.may_launch.set()
        self.lost: Exception | None = None
        self.told_lost: list[str] = []
        timing = timing or Timing(drain_timeout_s=0.0)
        with mock.patch.object(supervisor, "_timing_of", return_value=timing):
            spec = ChildSpec("e0")
            self.child = Child(spec, self._changed, self._launch, self.told_lost.append)

    def _changed(self, child: Child) -> None:
        self.shown.append(f"{child.state} {child.detail}".strip())

    async def _launch(self) -> Process:
        await self.may_launch.wait()
        if self.lost is not None:
            raise self.lost
        self.made.append(Played(len(self.made) + 1))
        return self.made[-1]

    async def until(self, state: S, num_made: int = 0) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.child.machine.state is not state or len(self.made) < num_made:
                await asyncio.sleep(0)

    async def serves(self) -> Played:
        """It is started, or started again, and serves."""
        if self.child.machine.state is S.PENDING:
            self.child.fire(StartDue())
        async with asyncio.timeout(PATIENCE_S):
            while not self.made or self.made[-1].returncode is not None:
                await asyncio.sleep(0)
        self.made[-1].say("serving")
        await self.until(S.SERVING)
        return self.made[-1]


@contextlib.contextmanager
def pauses(first_s: float = SHORT_S, kill_s: float = 5.0) -> Iterator[None]:
    with (
        mock.patch.object(supervisor, "FIRST_BACKOFF_S", first_s),
        mock.patch.object(supervisor, "KILL_AFTER_S", kill_s),
    ):
        yield


def of_endpoint(endpoint: str, timing: Timing) -> ChildSpec:
    """A child that listens there, whose claim lies beside."""
    path = endpoint.removeprefix("ipc://")
    config = InstanceConfig(
        instance_id=Path(path).stem,
        roles=("encode",),
        model_dir="nowhere",
        endpoint=endpoint,
        gateway_endpoint="ipc:///nowhere",
        engine=EngineConfig(),
        timing=timing,
    )
    return ChildSpec(config.instance_id, config, claim=path.replace(".sock", ".pid"))
