"""Machines looked at from the gateway: a stream in its middle, its end, and who does not answer."""

from __future__ import annotations

import asyncio
from operator import attrgetter
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from epd.frontend import Refused
from epd.fsm import instance
from epd.fsm.incoming import CancelRequested, SlotsLeased
from epd.fsm.outgoing import BytesReady
from epd.fsm.room import DeadlinePassed, PeerLost, RetryDue
from epd.fsm.story import RecordingJournal
from epd.messages import Address, InstanceInfo, Load
from epd.observed import Query
from epd.roles.timers import Timers
from epd.roles.watching.observation import LAG_S, observe
from epd.roles.watching.observers import MAX_OPEN, Observatory
from epd.roles.watching.stage_times import StageTimes
from epd.tiny.samples import read_index
from tests.fsm.tables import make_embedding, make_incoming, make_outgoing
from tests.roles.topologies.test_cluster import cluster_of, loaded, prepared, preparer

__all__ = ["loaded", "preparer"]  # fixtures


async def test_a_stream_is_seen_at_every_process(preparer: Any, loaded: Any) -> None:
    cluster = cluster_of("1e1p1d", loaded)
    async with cluster.running() as gateway:
        stream = gateway.role.submit(await prepared(preparer, read_index()[0], max_tokens=400))
        await anext(aiter(stream))
        key = stream.request_id
        told, silent = await gateway.role.observe(Query(key=key, limit=50))
        assert silent == []
        seen = {(name, m.machine, m.key) for name, one in told.items() for m in one.machines}
        room, kv = f"{key}/1/0", f"{key}/1/kv"
        assert seen >= {
            ("gateway", "GENERATION", key),
            ("p0", "REQUEST", f"{key}/1"),
            ("d0", "REQUEST", f"{key}/1"),
            ("e0", "OUTGOING", room),
            ("p0", "INCOMING", room),
            ("p0", "OUTGOING", kv),
            ("d0", "INCOMING", kv),
        }
        ends = [m for name in ("e0", "p0") for m in told[name].machines if m.key == room]
        assert [one.is_over for one in ends] == [True, True]
        times = [line.at_s for line in ends[0].story]
        assert times == sorted(times) and ends[0].story[-1].target == ends[0].state
        assert abs(times[0] - ends[1].story[0].at_s) < 5.0  # one clock for both
        open_ones = {(s.machine, s.state): s.count for s in told["d0"].states}
        assert open_ones["REQUEST", "DECODING"] == 1
        assert {m.kind for m in told["p0"].memory} == {"kv", "rows"}
        assert dict(told["d0"].in_use)["requests"] == 1
        assert [one.peer for one in told["e0"].links] == ["p0"] and told["e0"].links[0].nbytes > 0
        loads = {(one.instance, one.stage): one.load_s for one in told["gateway"].loads}
        assert loads["e0", "encode"] == loads["p0", "prefill"] == 0.0 < loads["d0", "decode"]
        async for _ in stream:
            pass
        await cluster.settle()
        told, _ = await gateway.role.observe(Query(limit=50))
        assert not [m for one in told.values() for m in one.machines if m.key.startswith(key)]
        told, _ = await gateway.role.observe(Query(key=key, machines=("GENERATION",), limit=50))
        (ended,) = told["gateway"].machines
        assert (ended.state, ended.is_over) == ("FINISHED", True)
        edges = {(e.machine, e.event, e.target): e.count for e in told["gateway"].edges}
        assert edges["GENERATION", "FinalTokensArrived", "FINISHED"] == 1


class Process:
    """An actor with machines that were opened 10 s apart from each other, the first at 0."""

    def __init__(self, *keys: str) -> None:
        self.now_s = 0.0
        self.journal = RecordingJournal(lambda: self.now_s)
        call_at = mock.MagicMock()  # the loop does not run: no clock goes off by itself
        self.clock = SimpleNamespace(now_s=lambda: self.now_s, call_at=call_at)
        self.timers = Timers(self.clock, mock.MagicMock())  # type: ignore[arg-type]
        self.components: list[Any] = []
        self.times = StageTimes(lambda: self.now_s)
        self.cluster_offset_s = 1000.0
        self.machines = []
        for key in keys:
            machine = make_outgoing(self.journal)
            machine.key = key
            self.machines.append(machine)
            self.now_s += 10.0

    def keys(self, **query: Any) -> list[str]:
        observed = observe(self, Query(**{"limit": 10, **query}))  # type: ignore[arg-type]
        return [one.key for one in observed.machines]


def test_the_oldest_machines_are_told_first() -> None:
    process = Process("a", "b", "c")
    process.machines[0].fire(BytesReady(64))  # it enters PARKED now, at 30
    make_embedding(process.journal)
    assert process.keys() == ["b", "c", "a", "hash"]
    assert process.keys(limit=1) == ["b"]
    assert process.keys(limit=0) == []
    assert process.keys(older_s=10.0) == ["b", "c"]
    assert process.keys(older_s=10.1) == ["b"]
    assert process.keys(states=("PARKED",)) == ["a"]
    assert process.keys(machines=("EMBEDDING",)) == ["hash"]
    told = observe(process, Query())  # type: ignore[arg-type]
    assert [(one.machine, one.state, one.count, one.oldest_s) for one in told.states] == [
        ("OUTGOING", "PENDING", 2, 20.0),
        ("OUTGOING", "PARKED", 1, 0.0),
        ("EMBEDDING", "ABSENT", 1, 0.0),
    ]


def late_of(process: Process) -> dict[str, tuple[int, float | None]]:
    """By state: how many are late, and what time the next to be ended has."""
    observed = observe(process, Query(limit=9))  # type: ignore[arg-type]
    told = {one.state: (one.num_late, one.left_s) for one in observed.states}
    assert {one.state: (int(one.is_late), one.left_s) for one in observed.machines} == told
    late = observe(process, Query(limit=9, late=True)).machines  # type: ignore[arg-type]
    assert len(late) == sum(num_late for num_late, _ in told.values())
    return told


def test_who_outlives_a_clock_that_ends_its_state_is_late() -> None:
    process = Process("a")
    (room,) = process.machines
    for event, delay_s in ((RetryDue, 0.5), (DeadlinePassed, 8.0)):
        process.timers.arm(room, event, delay_s, mock.MagicMock())
    assert late_of(process) == {"PENDING": (0, 8.0)}  # a repeated offer ends nothing
    process.now_s += 8.0 + LAG_S
    assert late_of(process) == {"PENDING": (0, 0.0)}
    process.now_s += 0.1
    assert late_of(process) == {"PENDING": (1, 0.0)}


def test_where_time_must_not_end_it_who_outlives_a_clock_in_vain_is_late() -> None:
    process = Process()
    room = make_incoming(process.journal)
    for event in (SlotsLeased((1,), 64), RetryDue(), PeerLost()):
        room.fire(event)
    process.timers.arm(room, RetryDue, 0.5, mock.MagicMock())
    process.now_s += 60.0
    assert late_of(process) == {"QUARANTINED": (0, None)}
    room.fire(RetryDue())
    room.fire(CancelRequested())
    assert late_of(process) == {"QUARANTINED": (1, None)}


def test_a_key_is_matched_up_to_a_slash() -> None:
    process = Process("r/1", "r/1/0", "r/10", "r")
    assert process.keys(key="r/1") == ["r/1", "r/1/0"]
    assert process.keys(key="r") == ["r/1", "r/1/0", "r/10", "r"]
    assert process.keys(key="r/") == []


def test_a_story_is_told_in_the_time_of_the_gateway() -> None:
    process = Process("a")
    process.machines[0].fire(BytesReady(64))
    for _ in range(2):
        process.machines[0].fire(RetryDue())
    (told,) = observe(process, Query(limit=1)).machines  # type: ignore[arg-type]
    lines = [(one.at_s, one.event, one.target, one.times) for one in told.story]
    assert lines[0] == (1010.0, "BytesReady", "PARKED", 1)


async def test_as_many_as_there_are_places_for_may_look() -> None:
    actor = mock.MagicMock()
    present = SimpleNamespace(
        present=True, terminal=False, info=SimpleNamespace(address=Address("silent", 1, ""))
    )
    observatory = Observatory(actor, SimpleNamespace(instances=[present]), tuple)  # type: ignore[arg-type]
    looking = [asyncio.ensure_future(observatory.ask(Query())) for _ in range(MAX_OPEN)]
    await asyncio.sleep(0)
    with pytest.raises(Refused, match="others are looking"):
        await observatory.ask(Query())
    for call in actor.timers.call_later.call_args_list:
        call.args[1]()  # nobody answers in time
    assert [(await one)[1] for one in looking] == [["silent"]] * MAX_OPEN
    again = asyncio.ensure_future(observatory.ask(Query()))
    await asyncio.sleep(0)
    assert not again.done() and again.cancel(), "there are places again"


def test_an_instance_that_is_gone_is_counted_and_found_and_lost_is_late() -> None:
    """F79: its journal keeps no state that is terminal."""
    ends = (instance.HeartbeatsEnded(), instance.LeftReceived())
    actor, gone = mock.MagicMock(), list[instance.Instance]()
    actor.components = []
    actor.times.links.return_value = ()
    journal = actor.journal = RecordingJournal(lambda: 5.0)
    actor.clock.now_s.return_value, actor.cluster_offset_s = 20.0, 0.0
    for number, event in enumerate(ends):
        info = InstanceInfo(address=Address(f"e{number}", 1, ""), roles=(), host_id="", pid=1)
        made = instance.Instance(info, Load(), 7.0, journal)
        for one in (instance.JoinAccepted(7.0), event):
            made.fire(one)
        gone.append(made)
    assert observe(actor, Query(limit=9)).states == ()
    left, lost = sorted(observe(actor, Query(), gone=gone).states, key=attrgetter("state"))
    assert (left.state, left.count, left.num_late, left.oldest_s) == ("LEFT", 1, 0, 13.0)
    assert (lost.state, lost.count, lost.num_late, lost.oldest_s) == ("LOST", 1, 1, 13.0)
    for query in (
        Query(limit=9, states=("LOST",)),
        Query(limit=9, late=True),
        Query(limit=9, key="e0:1"),
    ):
        (found,) = observe(actor, query, gone=gone).machines
        assert (found.key, found.is_over, found.is_late) == ("e0:1", True, True)
