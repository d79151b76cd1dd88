"""Makes code of `epd` that reads the real clock, sleeps, draws real randomness or starts a thread
raise while a simulation runs.

The functions are replaced in their modules for the time of the run.  A replacement asks who calls:
the standard library may go on (logging stamps its records), a module of `epd` outside
`epd_lab.sim` may not.  A name bound early (`from time import monotonic`) escapes it; the lint of
tests/sim/test_determinism.py forbids that in roles, fsm and scheduling.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from epd_lab.sim.core.loop import SimulationEscape

FORBIDDEN: tuple[tuple[Any, str], ...] = (
    (time, "time"),
    (time, "time_ns"),
    (time, "monotonic"),
    (time, "monotonic_ns"),
    (time, "perf_counter"),
    (time, "sleep"),
    (random, "random"),
    (random, "randint"),
    (random, "choice"),
    (random, "uniform"),
    (os, "urandom"),
    (uuid, "uuid4"),
    (uuid, "uuid1"),
    (socket, "socketpair"),
    (socket, "create_connection"),
    (threading.Thread, "start"),
)


def _forbid(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def forbidden(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__") or ""
        if caller.startswith("epd."):
            raise SimulationEscape(f"{caller} called {name} inside the simulation: inject a port")
        return real(*args, **kwargs)

    return forbidden


@contextlib.contextmanager
def no_escape() -> Iterator[None]:
    """Forbid the real world to modules of `epd` while the block runs."""
    kept = [(owner, name, getattr(owner, name)) for owner, name in FORBIDDEN]
    try:
        for owner, name, real in kept:
            setattr(owner, name, _forbid(f"{owner.__name__}.{name}", real))
        yield
    finally:
        for owner, name, real in kept:
            setattr(owner, name, real)
