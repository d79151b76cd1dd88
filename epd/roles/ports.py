"""Everything outside of the roles, as they are given it."""

from __future__ import annotations

from dataclasses import dataclass

from epd.fsm.kernel import Journal
from epd.transport.base import Bus, Clock, DataPlane, Random, Storage


class Log:
    """The port for a component's log lines; the composition root binds it to `logging`."""

    def warning(self, text: str, **fields: object) -> None: ...
    def info(self, text: str, **fields: object) -> None: ...


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
