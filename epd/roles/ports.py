"""Everything outside of the roles, as they are given it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from epd.fsm.kernel import Journal
from epd.transport.base import Bus, Clock, DataPlane, Random, Storage


class Log:
    """The port for a component's log lines; the composition root binds it to `logging`."""

    def warning(self, text: str, **fields: object) -> None: ...
    def info(self, text: str, **fields: object) -> None: ...


Work = Coroutine[object, None, None]


def start_task(work: Work, name: str) -> asyncio.Task[None]:
    """On the running loop; where Python can (from 3.12 on) it begins at once, so that work with
    nothing to wait for costs no turn of the loop."""
    loop = asyncio.get_running_loop()
    if sys.version_info >= (3, 12):
        return asyncio.Task(work, loop=loop, name=name, eager_start=True)
    return loop.create_task(work, name=name)


@dataclass(slots=True)
class Ports:
    """Everything outside, injected; the simulator replaces all of it."""

    clock: Clock
    bus: Bus
    random: Random
    transfers: DataPlane
    journal: Journal
    log: Log
    storage: Storage | None = None  # of rows, at an encoder or where they are found without one
    start_task: Callable[[Work, str], asyncio.Task[None]] = start_task
