"""A state that a setting bounds in time is left in time, by the clock of its own process.

`LASTS` names the settings and their states.  Looked at when such a state is left; what is never
left is found by others.  Time in which a process stood still does not count: nobody can look at a
clock then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from epd.fsm import embedding, encoding, generation, incoming, instance, link, membership, request
from epd.fsm.kernel import STORY_LENGTH, Event, Machine, State
from epd.keys import is_kv
from epd_lab.sim.checkers.base import Checker, Context
from epd_lab.sim.cluster import Settings
from epd_lab.sim.core.process import SimProcess

LATE_S = 0.001  # of a clock's arithmetic


def entered_s(machine: Machine) -> float | None:
    """When the state that was just left was entered; None: before the kept story."""
    story = list(machine._story)
    left = story[-1][1]
    for at_s, source, _, target, _ in story[-2::-1]:
        if target is left and source is not left:
            return float(at_s)
    is_first = left is machine.table.initial and len(story) < STORY_LENGTH
    return float(story[0][0]) if is_first else None


def _silent_since_s(machine: Machine) -> float | None:
    """The same, if no message came meanwhile: any of them restarts the clock."""
    _, source, _, target, _ = machine._story[-2]
    return entered_s(machine) if source is not target else None


def _of_rows_s(machine: Machine) -> float | None:
    return None if is_kv(machine.key) else entered_s(machine)


def _seen_s(machine: Machine) -> float | None:
    assert isinstance(machine, instance.Instance)
    return machine.seen_s


def _heard_s(machine: Machine) -> float | None:
    """A message that ends the silence moves the machine first, as the notice of a drain does."""
    return max(_seen_s(machine) or 0.0, entered_s(machine) or 0.0)


def _pause_s(settings: Settings, machine: Machine) -> float:
    """Before an attempt is placed, and until it turns out that it cannot be."""
    assert isinstance(machine, generation.Generation)
    return settings.timing.retry_interval_s * machine.attempt


def _moves_s(settings: Settings, machine: Machine) -> float:
    return settings.timing.move_timeout_s


@dataclass(frozen=True, slots=True)
class Lasts:
    """A state, what bounds it, and since when it counts."""

    setting: str  # 0: no bound
    state: State
    since_s: Callable[[Machine], float | None] = entered_s
    more_s: Callable[[Settings, Machine], float] = lambda settings, machine: 0.0


LASTS = (
    Lasts("timing.accept_timeout_s", generation.S.PLACED, _silent_since_s),
    Lasts("timing.abort_timeout_s", generation.S.CANCELLING),
    Lasts("timing.abort_timeout_s", generation.S.STOPPING),
    Lasts("timing.topology_timeout_s", generation.S.AWAITING_TOPOLOGY),
    Lasts("timing.topology_timeout_s", generation.S.MIGRATING, more_s=_pause_s),
    Lasts("timing.abort_timeout_s", incoming.S.EXPIRE_PENDING),
    Lasts("timing.accept_timeout_s", embedding.S.AWAITING_ROOM),
    Lasts("prefill.rows_timeout_s", incoming.S.RESERVED, _of_rows_s),
    Lasts("timing.kv_lease_s", request.S.HELD),
    Lasts("encode.cache_load_timeout_s", encoding.S.DEMOTING),
    Lasts("encode.cache_load_timeout_s", encoding.S.PROMOTING),
    Lasts("timing.link_timeout_s", link.S.ASKED),
    Lasts("timing.link_timeout_s", link.S.MUTE),
    Lasts("timing.drain_timeout_s", membership.S.DRAINING, more_s=_moves_s),
    Lasts("timing.drain_timeout_s", membership.S.DRAINING_REJOINING, more_s=_moves_s),
    Lasts("timing.drain_timeout_s", membership.S.DRAINING_CUT_OFF, more_s=_moves_s),
    Lasts("timing.suspect_after_s", instance.S.HEALTHY, _heard_s),
    Lasts("timing.lost_after_s", instance.S.SUSPECT, _seen_s),
    Lasts(
        "timing.drain_timeout_s",
        instance.S.DRAINING,
        more_s=lambda settings, machine: (
            2 * settings.timing.lost_after_s + settings.timing.move_timeout_s
        ),
    ),
)
TABLES = (
    generation.TABLE, incoming.TABLE, embedding.TABLE, request.Request.table,
    encoding.Encoding.table, link.Link.table, instance.Instance.table, membership.Membership.table,
)  # fmt: skip


class Durations(Checker):
    name = "durations"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._settings = context.cluster.settings  # as they are meant, whatever roles are told
        self._lasts = {lasts.state: lasts for lasts in LASTS if self._limit_s(lasts)}
        rows = (row for table in TABLES for row in table.rows)
        leaving = {
            event: None
            for row in rows
            for event in row.events
            if any(s in self._lasts and row.target not in (None, s) for s in row.sources)
        }
        context.world.watch(self._watch, *leaving)

    def _limit_s(self, lasts: Lasts) -> float:
        part, name = lasts.setting.split(".")
        return float(getattr(getattr(self._settings, part), name))

    def _watch(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        lasts = self._lasts.get(source)
        if lasts is None or source is target or (since_s := lasts.since_s(machine)) is None:
            return
        lasted_s = machine._story[-1][0] - since_s
        part, name = lasts.setting.split(".")
        limit_s = getattr(getattr(self._settings, part), name) + lasts.more_s(
            self._settings, machine
        )
        has_run = process.resumed_s < self.world.loop.now_s - lasted_s
        if lasted_s > limit_s + LATE_S and has_run:
            self.violate(
                f"{process.name}: {machine.key} was {source.name} for {lasted_s:.3f} s, and "
                f"{lasts.setting} allows {limit_s:g}"
            )
