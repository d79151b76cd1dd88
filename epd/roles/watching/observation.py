"""The machines of a cluster, looked at: how many are where, since when, and what happened to one.

Theory of operation
-------------------
A process's journal keeps counts of edges and the machines of each state while it works
(`epd.fsm.story`). Nothing else is kept for it: `observe` reads the journal on each question. So the
gateway polls its instances for each question, and one that does not answer is named.

A machine is late when its time is over and it is still in its state.  The tables have the clocks
that lead out of a state (a deadline, a limit of patience), and the process their times.  Time must
not end a state that is `held`: its machine is late when a clock has gone off in vain.  The first
question for the outcome of a write is one.

A key is matched whole, or up to a slash.  The id of a request finds its attempts, their images'
rooms and its KV room, at each process of theirs.  That of a room finds both ends.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from epd.fsm.instance import Instance, S
from epd.fsm.kernel import Machine, read_story
from epd.fsm.story import RecordingJournal, Resident, outlived_its_clock
from epd.observed import (
    EdgeCount,
    MachineFacts,
    Memory,
    Observed,
    Query,
    StageLoad,
    StateCount,
    StoryLine,
)
from epd.roles.base import Actor
from epd.roles.timers import Timers

MAX_MACHINES = 200  # told of one process
LAG_S = 1.0  # a clock that is due may wait so long for its turn on the loop


def observe(
    actor: Actor,
    query: Query,
    memory: tuple[Memory, ...] = (),
    loads: tuple[StageLoad, ...] = (),
    gone: Sequence[Instance] = (),
) -> Observed:
    """The process as it is now; nothing, if its journal does not record.  `gone`: instances that
    are over, and are shown all the same; a lost one is late."""
    journal = actor.journal
    if not isinstance(journal, RecordingJournal):
        return Observed()
    look = _Look(journal, actor.timers, actor.clock.now_s(), actor.cluster_offset_s, gone)
    return Observed(
        in_use=tuple(sorted(item for one in actor.components for item in one.live().items())),
        memory=memory,
        states=tuple(look.states()),
        edges=tuple(_edges(journal)),
        links=tuple(actor.times.links()),
        loads=loads,
        machines=tuple(look.machines(query)),
    )


def _edges(journal: RecordingJournal) -> Iterator[EdgeCount]:
    for edge, count in journal.transitions.items():
        yield EdgeCount(**edge._asdict(), count=count)
    for edge, (count, reason) in journal.unmoved_events.items():
        yield EdgeCount(**edge._asdict(), count=count, reason=reason)


@dataclass(frozen=True, slots=True)
class _Look:
    """At the machines of one process, now."""

    journal: RecordingJournal
    timers: Timers
    now_s: float
    offset_s: float  # to the gateway's time
    gone: Sequence[Instance]

    def states(self) -> Iterator[StateCount]:
        for table, state, machines in self.journal.residents():
            has_clock = state in table.held or table.ends_by[state]
            left = [self._left_s(machine) for machine in machines] if has_clock else []
            yield StateCount(
                machine=table.name,
                state=state.name,
                count=len(machines),
                oldest_s=self.now_s - next(iter(machines.values())),
                num_late=sum(map(_is_late, left)),
                left_s=_finite(min(left, default=math.inf)),
            )

        for name, those in groupby(sorted(self.gone, key=_by_state), _by_state):
            ages = [self.now_s - one.seen_s for one in those]
            yield StateCount(
                machine=Instance.table.name,
                state=name,
                count=len(ages),
                oldest_s=max(ages),
                num_late=len(ages) * (name == S.LOST.name),
                left_s=None,
            )

    def _left_s(self, machine: Machine | None) -> float:
        """Until a clock ends its state; inf: none will, -inf: one went off in vain, or it is an
        instance that was lost."""
        if machine is None:
            return math.inf
        table, state = machine.table, machine.state
        if machine.terminal:
            return -math.inf if state is S.LOST else math.inf
        if state not in table.held:
            return self.timers.due_s(machine, table.ends_by[state]) - self.now_s
        lines = ((s.name, event.__name__, t.name) for _, s, event, t, _ in reversed(machine.told))
        return -math.inf if outlived_its_clock(table, state.name, lines) else math.inf

    def machines(self, query: Query) -> Iterator[MachineFacts]:
        """The oldest ones; of those that are over only what a key asks for."""
        limit = min(query.limit, MAX_MACHINES)
        if limit:
            wanted = [one for one in self._residents(query) if self._is_wanted(one, query)]
            yield from map(self._facts, heapq.nsmallest(limit, wanted, key=attrgetter("since_s")))

    def _residents(self, query: Query) -> Iterator[Resident]:
        for table, state, machines in self.journal.residents():
            if query.machines and table.name not in query.machines:
                continue  # of thousands, whoever lists open requests wants none
            for machine, since_s in machines.items():
                yield Resident(table, machine.key, state, since_s, machine.told, machine)
        for one in self.gone:
            yield Resident(one.table, one.key, one.state, one.told[-1][0], one.told, one)
        if query.key:
            shown = {one.key for one in self.gone}
            yield from (one for one in self.journal.ended() if one.key not in shown)

    def _is_wanted(self, one: Resident, query: Query) -> bool:
        return (
            (not query.machines or one.table.name in query.machines)
            and (not query.states or one.state.name in query.states)
            and self.now_s - one.since_s >= query.older_s
            and (not query.key or f"{one.key}/".startswith(f"{query.key}/"))
            and (not query.late or _is_late(self._left_s(one.machine)))
        )

    def _facts(self, one: Resident) -> MachineFacts:
        left_s = self._left_s(one.machine)
        return MachineFacts(
            machine=one.table.name,
            key=one.key,
            state=one.state.name,
            age_s=self.now_s - one.since_s,
            is_over=one.machine is None or one.machine.terminal,
            is_late=_is_late(left_s),
            left_s=_finite(left_s),
            story=tuple(
                StoryLine(
                    at_s=entry.at_s + self.offset_s,
                    source=entry.source,
                    event=entry.event,
                    target=entry.target,
                    times=entry.times,
                )
                for entry in read_story(one.told)
            ),
        )


def _by_state(instance: Instance) -> str:
    return instance.state.name


def _is_late(left_s: float) -> bool:
    return left_s < -LAG_S


def _finite(left_s: float) -> float | None:
    """Seconds to show: at least 0.0; None if no clock ends the state."""
    return max(0.0, left_s) if math.isfinite(left_s) else None
