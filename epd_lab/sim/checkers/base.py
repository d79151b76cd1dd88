"""What every checker is made with, and may do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from epd.frontend import TimeLimits
from epd_lab.sim.client import Clients, Record
from epd_lab.sim.cluster import Cluster
from epd_lab.sim.world import World

MayFail = Callable[[Record], str]
"""Why this request was allowed not to be answered in full; empty if it was not."""


@dataclass(slots=True)
class Context:
    """One run, as checkers see it."""

    world: World
    cluster: Cluster
    clients: Clients
    may_fail: MayFail
    bus_loses: bool = False  # single messages: what they would have freed waits for its deadline
    undisturbed: bool = False  # no fault, no loss, nobody hangs up
    devices_hang: bool = False  # or are so slow that they seem to
    engine_faults: bool = False  # devices were told to fail: roles report it as their own fault
    all_stay: bool = False  # no process ends, and none stands still while others run
    instances_stay: bool = False  # the same of instances; a gateway may be gone for a short while

    def limits_of(self, record: Record) -> TimeLimits:
        """How long its client waits."""
        return record.ask.limits or TimeLimits.of(self.cluster.settings.timing)


class Checker:
    """Base of all checkers."""

    name = ""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.world = context.world

    def violate(self, text: str) -> None:
        self.world.violate(f"[{self.name}] {text}")

    def at_rest(self) -> None:
        """Called when every request is answered and a moment has passed; long before deadlines."""

    def at_end(self) -> None:
        """Called at quiescence, when every deadline and tombstone is over."""
