"""The messages, transitions, timers and steps of one request without faults.

A quarter of an hour of the simulated day (`epd_lab.sim.campaigns.day`), counted instead of
timed: the numbers are the same on every machine.  docs/happy_path.md describes each.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from epd.fsm.kernel import Event, Machine, State
from epd.messages import Message
from epd_lab.sim.campaigns import day
from epd_lab.sim.cluster import Cluster
from epd_lab.sim.core.process import SimProcess
from epd_lab.sim.world import World

BY_TIME = ("Heartbeat", "HeartbeatAck", "Join", "Welcome", "Membership")
"""Messages that are said as often whether anybody asks for anything or not."""


@dataclass(slots=True)
class Counts:
    """Totals of `num_requests` requests, one per second, a third of them with images or more."""

    num_requests: int = 0
    num_steps: int = 0
    num_timers: int = 0  # armed or put off
    messages: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # kind, from, to
    edges: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)

    def told(self) -> dict[str, float]:
        """Per request."""
        by_time = sum(n for (kind, _, _), n in self.messages.items() if kind in BY_TIME)
        numbers = {
            "steps": self.num_steps,
            "messages": self.messages.total() - by_time,
            "messages_by_time": by_time,
            "transitions": self.edges.total(),
            "timers": self.num_timers,
        }
        return {name: round(n / self.num_requests, 2) for name, n in numbers.items()}


def count(num_requests: int = 900) -> Counts:
    """Live through so many seconds, one request in each."""
    counts = Counts(num_requests)

    def on_message(source: str, target: str, message: Message) -> None:
        counts.messages[type(message).__name__, _role(source), _role(target)] += 1

    def on_transition(
        process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        edge = (machine.table.name, source.name, type(event).__name__, target.name)
        counts.edges[edge] += 1

    def prepare(world: World, cluster: Cluster) -> None:
        world.network.on_message.append(on_message)
        world.watchers.append(on_transition)
        clusters.append(cluster)

    clusters: list[Cluster] = []
    lived = day.live_through(1, hour_s=num_requests, quiet=True, prepare=prepare)
    counts.num_steps = lived.steps
    counts.num_timers = sum(node.actor.timers.num_armed for node in clusters[0].nodes.values())
    return counts


def _role(process: str) -> str:
    """`e0:1` is an `e`."""
    return process.partition(":")[0].rstrip("0123456789")
