"""What roles share: whatever goes wrong stays with its own message, machine, effect or task."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import inspect
import sys
import weakref
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from epd.engine.base import DeviceLost
from epd.fsm.kernel import Effect, IllegalEvent
from epd.messages import Address, LinkEcho, Message, RequestAborted, RowsKept
from epd.roles.base import Actor, Component, performs, receives
from epd.roles.mailbox import Mailbox
from epd.roles.ports import start_task
from epd.transport.base import Received
from tests.roles.test_timers import ManualClock
from tests.roles.turns import AtOnce


class Planned(Exception):
    """What a test lets a role raise."""


class Do(Effect):
    FIRST = "one"
    SECOND = "another"
    LATER = "as a task"
    ELSEWHERE = "by another role"


class Sample(Component[Any]):
    """Notes what it is asked; `breaks`: names of what raises."""

    def __init__(self, actor: Actor, *breaks: str) -> None:
        super().__init__(actor)
        self.breaks, self.seen = breaks, list[str]()

    def note(self, name: str) -> None:
        self.seen.append(name)
        if name in self.breaks:
            raise Planned(name)

    @receives(LinkEcho)
    def on_echo(self, received: Received) -> None:
        self.note("echo")

    @performs(Do.FIRST)
    def first(self, machine: Any, event: Any) -> None:
        self.note("first")

    @performs(Do.SECOND)
    def second(self, machine: Any, event: Any) -> None:
        self.note("second")

    @performs(Do.LATER)
    async def later(self, machine: Any, event: Any) -> Any:
        self.note("later")
        return event

    def ended(self, machine: Any) -> None:
        self.note("ended")


class Port:
    """Of an actor alone; an item is taken at once, unless its inbox waits for `run`."""

    def __init__(self, inbox: type[Mailbox] = AtOnce) -> None:
        self.bus = mock.Mock(address=Address("a", 4, "here"), close=mock.AsyncMock())
        self.log = mock.Mock()
        self.clock = ManualClock()
        ports: Any = SimpleNamespace(
            clock=self.clock,
            bus=self.bus,
            journal=None,
            log=self.log,
            transfers=None,
            start_task=self._begin,
        )
        self.start_task = start_task
        self._tasks = weakref.WeakSet[Any]()
        with mock.patch("epd.roles.base.Mailbox", inbox):
            self.actor = Actor(ports)

    def _begin(self, work: Any, name: str) -> Any:
        self._tasks.add(task := self.start_task(work, name))
        return task

    @property
    def num_tasks(self) -> int:
        """That somebody keeps."""
        gc.collect()
        return len(self._tasks)


def machine(*effects: Do, terminal: bool = False, raises: Exception | None = None) -> Any:
    fire = mock.Mock(return_value=effects, side_effect=raises)
    return SimpleNamespace(fire=fire, terminal=terminal, key="m", state=None)


def received(message: Message) -> Received:
    return Received("b", 1, message, ())


async def test_work_that_never_began_is_closed_with_its_actor() -> None:
    port, seen = Port(), list[str]()
    port.start_task = lambda work, name: asyncio.get_running_loop().create_task(work, name=name)

    async def work() -> None:
        seen.append("began")

    port.actor.spawn("work", begun := work())
    assert inspect.getcoroutinestate(begun) == inspect.CORO_CREATED
    await port.actor.close()
    assert inspect.getcoroutinestate(begun) == inspect.CORO_CLOSED and not seen


def test_a_message_has_one_role() -> None:
    port = Port()
    Sample(port.actor)
    with pytest.raises(ValueError, match="LinkEcho"):
        Sample(port.actor)


def test_a_message_that_breaks_its_role_is_a_fault_and_one_without_a_role_is_counted() -> None:
    port = Port()
    role = Sample(port.actor, "echo")
    port.actor.deliver(received(LinkEcho()))
    assert port.actor.counters == {"faults": 1} and role.seen == ["echo"]
    told = port.log.warning.call_args
    assert told.kwargs["where"] == "LinkEcho" and "Planned" in told.kwargs["error"]
    port.actor.deliver(received(RowsKept(request_id="r", attempt=1, room="room")))
    assert port.actor.counters == {"faults": 1, "message_without_role": 1}
    port.actor.closing = True
    port.actor.deliver(received(LinkEcho()))
    assert role.seen == ["echo"]


def test_an_event_that_its_machine_does_not_take_changes_nothing() -> None:
    port = Port()
    role = Sample(port.actor)
    table = SimpleNamespace(name="SAMPLE")
    subject: Any = SimpleNamespace(
        table=table, key="m", state=SimpleNamespace(name="S"), tell_story=lambda: ""
    )
    for error, counted in (
        (IllegalEvent(subject, mock.Mock()), "illegal_events"),
        (Planned(), "faults"),
    ):
        role.post(machine(Do.FIRST, terminal=True, raises=error), mock.Mock())
        assert port.actor.counters[counted] == 1
    assert not role.seen and sum(port.actor.counters.values()) == 2


def test_each_effect_is_guarded_on_its_own() -> None:
    port = Port()
    role = Sample(port.actor, "first", "ended")
    role.post(machine(Do.FIRST, Do.SECOND, terminal=True), mock.Mock())
    assert role.seen == ["first", "second", "ended"] and port.actor.counters["faults"] == 2
    where = [call.kwargs["where"] for call in port.log.warning.call_args_list]
    assert where == ["FIRST m", "m"]


def test_another_role_may_perform_some_of_the_effects() -> None:
    port = Port()
    role = Sample(port.actor)
    elsewhere = mock.Mock(return_value=None)
    part: Any = SimpleNamespace(_perform={Do.ELSEWHERE: elsewhere})
    role.extend(part)
    role.post(machine(Do.FIRST, Do.ELSEWHERE), mock.Mock())
    assert role.seen == ["first"] and elsewhere.called


def test_an_effect_has_one_performer_and_never_none() -> None:
    port = Port()
    role = Sample(port.actor)
    with pytest.raises(ValueError, match="two components perform FIRST"):
        role.extend(SimpleNamespace(_perform={Do.FIRST: mock.Mock()}))  # type: ignore[arg-type]
    table = SimpleNamespace(effects=tuple(Do))
    with mock.patch.object(Sample, "fires", SimpleNamespace(table=table)):
        with pytest.raises(ValueError, match="nobody performs ELSEWHERE"):
            port.actor.start()
        role.extend(SimpleNamespace(_perform={Do.ELSEWHERE: mock.Mock()}))  # type: ignore[arg-type]
        role.check()


async def turns() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


async def test_what_an_effect_comes_to_is_the_machines_next_event() -> None:
    port = Port()
    role = Sample(port.actor)
    made, event = machine(Do.LATER), mock.Mock()
    made.fire.side_effect = [(Do.LATER,), ()]
    role.post(made, event)
    await turns()
    assert made.fire.call_args_list == [mock.call(event)] * 2 and not port.num_tasks
    made.fire.side_effect = [(Do.LATER,)]
    role.post(made, None)  # type: ignore[arg-type]
    await turns()
    assert made.fire.call_count == 3, "no outcome is no event"


async def test_a_task_begins_at_once_where_python_can() -> None:
    begun: list[str] = []

    async def work(name: str) -> None:
        begun.append(name)

    task = start_task(work("one"), "one")
    assert begun == (["one"] if sys.version_info >= (3, 12) else [])
    await task
    port = Port()
    port.actor.spawn("two", work("two"))
    await turns()
    assert begun == ["one", "two"] and not port.num_tasks


async def test_a_task_that_fails_is_a_fault_and_a_lost_device_is_told() -> None:
    port = Port()
    lost = port.actor.on_device_lost = mock.Mock()

    async def fails(error: Exception) -> None:
        raise error

    then = mock.Mock()
    port.actor.spawn("one", fails(Planned()), then)
    port.actor.spawn("two", fails(DeviceLost("gone")), then)
    await turns()
    assert port.actor.counters["faults"] == 2 and not port.num_tasks
    lost.assert_called_once_with("gone")
    then.assert_not_called()


async def test_closing_ends_tasks_and_timers_and_what_they_would_do() -> None:
    port = Port()
    actor, then, lost = port.actor, mock.Mock(), mock.Mock()
    actor.on_device_lost = lost
    ended: list[str] = []

    async def waits(name: str) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append(name)

    async def done() -> None:
        actor.closing = True
        raise DeviceLost("gone")

    for name in ("one", "two"):
        actor.spawn(name, waits(name), then)
    actor.timers.call_later(1.0, then)
    await turns()
    await actor.close()
    assert ended == ["one", "two"]
    port.bus.close.assert_awaited_once_with()
    port.clock.run_until(2.0)
    actor.spawn("three", done(), then)
    await turns()
    assert not port.num_tasks
    then.assert_not_called()
    lost.assert_not_called()


async def test_messages_for_another_life_are_not_sent() -> None:
    """F44."""
    port = Port()
    actor = port.actor
    word, payloads = RequestAborted(request_id="r", attempt=1), (b"bytes",)
    assert actor.send(Address("b", 7, ""), word, payloads)  # not known yet
    actor.connect(Address("b", 8, ""))
    assert not actor.send(Address("b", 7, ""), word)
    assert actor.counters == {"message_to_other_epoch": 1}
    assert actor.send(Address("b", 8, ""), word) and actor.send("b", word)
    assert port.bus.send.call_args_list == [
        mock.call("b", word, payloads),
        *[mock.call("b", word, ())] * 2,
    ]


def test_a_bus_that_takes_nothing_raises_a_doubt_of_whom_it_knows() -> None:
    port = Port()
    actor = port.actor
    port.bus.send.return_value = False
    doubt = actor.doubt = mock.Mock()
    assert not actor.send("b", RequestAborted(request_id="r", attempt=1))
    doubt.assert_not_called()
    actor.connect(Address("b", 8, "there"))
    port.bus.connect.assert_called_once_with(Address("b", 8, "there"))
    assert not actor.send("b", RequestAborted(request_id="r", attempt=1))
    doubt.assert_called_once_with(Address("b", 8, ""))
    assert actor.counters == {"message_not_queued": 2}


async def test_messages_to_itself_take_the_next_turn_and_no_socket() -> None:
    port = Port(Mailbox)
    role = Sample(port.actor)
    port.actor.start()
    assert port.actor.send("a", LinkEcho(), ()) and not role.seen
    await turns()
    assert role.seen == ["echo"] and not port.bus.send.called
    await port.actor.close()


def test_who_is_itself_and_who_is_lost_or_listed() -> None:
    actor = Port().actor
    assert actor.is_self(Address("a", 4, "elsewhere"))
    assert not actor.is_self(Address("a", 5, "")) and not actor.is_self(Address("b", 4, ""))
    actor.lost.add(("b", 1))
    actor.connect(Address("c", 5, ""))
    lives = [("b", 1), ("b", 2), ("c", 4), ("c", 5), ("c", 6), ("d", 1)]
    assert [actor.is_lost(Address(*life, "")) for life in lives] == [True, False, True] + [
        False
    ] * 3
    assert not actor.is_lost(Address("d", 0, "")), "whatever its life: nobody was met"
    actor.listed.update(lives[:4])
    assert [actor.is_listed(Address(*life, "")) for life in lives] == [
        *(False, True, False, True),
        *(False, False),
    ]


def test_deadlines_are_in_the_gateways_time() -> None:
    port = Port()
    port.clock.at_s = 10.0
    port.actor.cluster_offset_s = 100.0
    assert port.actor.cluster_s() == 110.0 and port.actor.until(115.0, "gateway") == 5.0
    assert port.actor.knows_time_of("gateway"), "a gateway's own clock is that"
    timers, callback = port.actor.timers, mock.Mock()
    timers.call_later(1.0, callback)
    timers.call_later(2.0, callback)
    assert timers.num_armed == 2 and timers.will_call(callback)


def test_a_story_is_told_in_the_gateways_time_without_what_stayed() -> None:
    @dataclasses.dataclass
    class Entry:
        source: str
        target: str
        at_s: float

    port = Port()
    port.clock.wall_s = lambda: 5000.0  # type: ignore[method-assign]
    port.clock.at_s, port.actor.cluster_offset_s = 10.0, 990.0
    table = SimpleNamespace(name="SAMPLE")
    story = [Entry("A", "B", 7.0), Entry("B", "B", 8.0), Entry("B", "C", 9.0)]
    told: Any = SimpleNamespace(table=table, key="m", story=story)
    spans = port.actor.spans(told, None)
    assert [(s.machine, s.state, s.at_s, s.key) for s in spans] == [
        ("SAMPLE", "B", 997.0, "m"),
        ("SAMPLE", "C", 999.0, "m"),
    ]
