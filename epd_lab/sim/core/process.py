"""A simulated process: who runs a callback, and whether it still may.

The current process is a context variable, so every task, future callback and timer that a process
makes inherits it.  A killed process's callbacks are never run again, not even a `finally`: that is
what `kill -9` means, and cancelling its tasks would be something else.  A stalled one's callbacks
are parked, in order, until it resumes (SIGSTOP, a long GC pause, a swapped-out host).
"""

from __future__ import annotations

import contextvars
from typing import Any

from epd_lab.sim.core.breaks import Breaks

CURRENT: contextvars.ContextVar[SimProcess | None] = contextvars.ContextVar(
    "epd_sim_process", default=None
)


class SimProcess:
    """One life of one process; a restart is another object with a higher epoch."""

    __slots__ = (
        "alive", "breaks", "clock_offset_s", "clock_rate", "context", "epoch", "exited",
        "instance_id", "is_stranger", "name", "parked", "pid", "resumed_s", "runs", "slowness",
        "stalled", "stalled_s", "wall_skew_s",
    )  # fmt: skip

    def __init__(
        self, instance_id: str, epoch: int, pid: int, *, is_stranger: bool = False
    ) -> None:
        self.instance_id = instance_id
        self.epoch = epoch
        self.name = f"{instance_id}:{epoch}"
        self.pid = pid
        self.is_stranger = is_stranger  # of another parent: the name is another's
        self.alive = True
        self.exited = False  # ended by itself, in order
        self.stalled = False
        self.runs = True  # alive and not stalled: what the loop asks before each callback
        self.stalled_s = 0.0  # when it last stood still, of the world's time
        self.resumed_s = 0.0  # when it went on after it had stood still, of the world's time
        self.slowness = 1.0  # factor on what its engines take
        self.clock_offset_s = 0.0  # its monotonic clock against the world's
        self.clock_rate = 1.0  # and how fast it goes
        self.wall_skew_s = 0.0  # its wall clock against the true one
        self.parked: list[Any] = []  # handles of the loop
        self.breaks = Breaks()  # calls of its ports that raise
        self.context = contextvars.copy_context()
        self.context.run(CURRENT.set, self)

    def __repr__(self) -> str:
        state = "stalled" if self.stalled else "alive" if self.alive else "dead"
        return f"<SimProcess {self.name} {state}>"


def current_process() -> SimProcess | None:
    return CURRENT.get()
