"""The machines of a cluster, looked at: how many are where, since when, and what happened to one.

Theory of operation
-------------------
A process's journal keeps counts of edges and the machines of each state while it works
(`epd.fsm.story`). Nothing else is kept for those who look: `observe` reads it when somebody asks.
So the gateway polls its instances for each question, and one that does not answer is named.

A key is matched whole, or up to a slash: the id of a request finds its attempts, their images'
rooms and its KV room, at each process that has a part in them.  That of a room finds both ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Never

from epd.api.port import Refused
from epd.fsm.kernel import read_story
from epd.fsm.story import RecordingJournal, Resident
from epd.messages import ObserveReport, ObserveRequest
from epd.observed import EdgeCount, MachineFacts, Memory, Observed, Query, StateCount, StoryLine
from epd.roles.base import Actor, Component, receives
from epd.roles.poll import Poll
from epd.roles.registry import Registry
from epd.transport.base import Received

ANSWER_TIMEOUT_S = 2.0
MAX_OPEN = 16  # questions at a time
MAX_MACHINES = 200  # told of one process


def observe(actor: Actor, query: Query, memory: tuple[Memory, ...] = ()) -> Observed:
    """What this process knows now; nothing, if its journal does not record."""
    journal, now_s = actor.journal, actor.clock.now_s()
    if not isinstance(journal, RecordingJournal):
        return Observed()
    return Observed(
        in_use=tuple(sorted(item for one in actor.components for item in one.live().items())),
        memory=memory,
        states=tuple(_states(journal, now_s)),
        edges=tuple(_edges(journal)),
        machines=tuple(
            _facts(actor, resident, now_s) for resident in _wanted(journal, query, now_s)
        ),
    )


def _states(journal: RecordingJournal, now_s: float) -> Iterator[StateCount]:
    for table, state, machines in journal.residents():
        oldest_s = now_s - next(iter(machines.values()))
        yield StateCount(
            machine=table.name, state=state.name, count=len(machines), oldest_s=oldest_s
        )


def _edges(journal: RecordingJournal) -> Iterator[EdgeCount]:
    for edge, count in journal.transitions.items():
        yield EdgeCount(**edge._asdict(), count=count)
    for edge, (count, reason) in journal.unmoved_events.items():
        yield EdgeCount(**edge._asdict(), count=count, reason=reason)


def _wanted(journal: RecordingJournal, query: Query, now_s: float) -> list[Resident]:
    """The oldest ones; of those that are over only what a key asks for."""
    limit = min(query.limit, MAX_MACHINES)
    if not limit:
        return []
    found = [one for one in _residents(journal, query) if _is_wanted(one, query, now_s)]
    return heapq.nsmallest(limit, found, key=attrgetter("since_s"))


def _residents(journal: RecordingJournal, query: Query) -> Iterator[Resident]:
    for table, state, machines in journal.residents():
        for machine, since_s in machines.items():
            yield Resident(table, machine.key, state, since_s, machine.told)
    if query.key:
        yield from journal.ended()


def _is_wanted(one: Resident, query: Query, now_s: float) -> bool:
    return (
        (not query.machines or one.table.name in query.machines)
        and (not query.states or one.state.name in query.states)
        and now_s - one.since_s >= query.older_s
        and (not query.key or f"{one.key}/".startswith(f"{query.key}/"))
    )


def _facts(actor: Actor, one: Resident, now_s: float) -> MachineFacts:
    offset_s = actor.cluster_offset_s
    return MachineFacts(
        machine=one.table.name,
        key=one.key,
        state=one.state.name,
        age_s=now_s - one.since_s,
        is_over=one.is_over,
        story=tuple(
            StoryLine(
                at_s=entry.at_s + offset_s,
                source=entry.source,
                event=entry.event,
                target=entry.target,
                times=entry.times,
            )
            for entry in read_story(one.told)
        ),
    )


class Observable(Component[Never]):
    """An instance that answers the gateway."""

    def __init__(self, actor: Actor, memory: Callable[[], Iterator[Memory]]) -> None:
        super().__init__(actor)
        self._memory = memory

    @receives(ObserveRequest)
    def on_request(self, received: Received) -> None:
        message: ObserveRequest = received.message
        observed = observe(self.actor, message.query, tuple(self._memory()))
        self.actor.send(received.source, ObserveReport(serial=message.serial, observed=observed))


class Observatory(Component[Never]):
    """The gateway's side."""

    def __init__(self, actor: Actor, registry: Registry) -> None:
        super().__init__(actor)
        self._poll = Poll[Observed](actor, registry, ANSWER_TIMEOUT_S)

    async def ask(self, query: Query) -> tuple[dict[str, Observed], list[str]]:
        """By process, this one too; and the instances that did not answer.  Raises Refused."""
        if self._poll.num_open >= MAX_OPEN:
            raise Refused(429, f"{MAX_OPEN} others are looking at the cluster; ask again soon")
        told, silent = await self._poll.ask(
            lambda serial: ObserveRequest(serial=serial, query=query)
        )
        own = observe(self.actor, query)
        return {self.actor.address.instance_id: own, **told}, silent

    @receives(ObserveReport)
    def on_report(self, received: Received) -> None:
        message: ObserveReport = received.message
        self._poll.answered(received, message.serial, message.observed)
