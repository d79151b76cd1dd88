"""Each item is taken to its end before the next, and what it causes is never done inside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from epd.messages import LinkEcho
from epd.roles import mailbox as mailboxes
from epd.roles.mailbox import Mailbox, OutOfTurn
from tests.roles.test_base import Do, Planned, Port, Sample, machine, received, turns


@pytest.fixture
def errors() -> list[str]:
    return []


@pytest.fixture
def mailbox(errors: list[str]) -> Mailbox:
    return Mailbox(lambda name, error: errors.append(f"{name}: {error!r}"))


async def take(mailbox: Mailbox) -> None:
    """What is there."""
    for entry in await mailbox.batch():
        mailbox.take(*entry)


def noting(seen: list[str], *names: str) -> list[Callable[[], None]]:
    return [lambda name=name: seen.append(name) for name in names]  # type: ignore[misc]


async def test_an_item_waits_for_its_turn_and_one_that_raises_takes_none_along(
    mailbox: Mailbox, errors: list[str]
) -> None:
    seen: list[str] = []
    one, two = noting(seen, "one", "two")
    mailbox.put("1", one)
    mailbox.put("2", mock.Mock(side_effect=Planned))
    mailbox.put("3", two)
    assert not seen
    await take(mailbox)
    assert seen == ["one", "two"] and errors == ["2: Planned()"]


async def test_what_comes_while_an_item_is_taken_is_of_the_next_batch(mailbox: Mailbox) -> None:
    """Or an item that puts itself again would hold the loop; and nothing overtakes it."""
    seen: list[str] = []
    late = noting(seen, "late")[0]

    def again() -> None:
        mailbox.put("again", again)
        seen.append("again")

    mailbox.put("again", again)
    mailbox.put("late", late)
    await take(mailbox)
    assert seen == ["again", "late"]
    asyncio.get_running_loop().call_soon(seen.append, "the loop's other work")
    await take(mailbox)
    assert seen[2:] == ["the loop's other work", "again"]
    mailbox.close()
    mailbox.put("late", late)
    await take(mailbox)
    assert seen[4:] == ["late"]


async def test_who_waits_for_an_item_is_woken_by_the_next(mailbox: Mailbox) -> None:
    seen: list[str] = []
    for name in ("one", "two"):
        waiting = asyncio.ensure_future(take(mailbox))
        await asyncio.sleep(0)
        assert not waiting.done()
        mailbox.put(name, noting(seen, name)[0])
        await waiting
    assert seen == ["one", "two"]


async def test_what_is_caused_comes_after_what_causes_it_and_in_order(
    mailbox: Mailbox, errors: list[str]
) -> None:
    seen: list[str] = []
    last, other = noting(seen, "last", "the next item")

    def first() -> None:
        mailbox.post("second", second)
        mailbox.post("last", last)
        mailbox.post("breaks", mock.Mock(side_effect=Planned))
        seen.append("first")

    def second() -> None:
        mailbox.post_once("third", third)
        mailbox.post_once("third", third)
        seen.append("second")

    def third() -> None:
        seen.append("third")

    mailbox.post("first", first)
    mailbox.put("other", other)
    await take(mailbox)
    assert seen == ["first", "second", "last", "third", "the next item"]
    assert errors == ["breaks: Planned()"]
    mailbox.post_once("third", third)
    mailbox.post_once("third", third)
    await take(mailbox)
    assert seen[5:] == ["third"], "what was done may be asked for again, and is an item then"


# --- fire -----------------------------------------------------------------------------------------


def test_fire_is_done_when_it_returns_and_what_it_causes_is_not() -> None:
    """Whoever calls: a handler, or what was posted."""
    port = Port()
    role = Sample(port.actor)
    seen: list[str] = []
    role._perform[Do.FIRST] = lambda subject, event: role.post(other, event)
    other = machine(Do.SECOND)

    def handler(then: Callable[[], None]) -> None:
        role.fire(machine(Do.FIRST, Do.SECOND), mock.Mock())
        seen.append(f"{role.seen} {other.fire.call_count}")
        then()

    again = lambda: port.actor.mailbox.post("caused", handler, lambda: None)  # noqa: E731
    port.actor.mailbox.put("an item", handler, again)
    assert seen == ["['second'] 0", "['second', 'second', 'second'] 1"]
    assert other.fire.call_count == 2


def test_a_performer_does_not_fire_and_nobody_outside_the_inbox_does() -> None:
    port = Port()

    class Fires(Sample):
        def first(self, subject: Any, event: Any) -> None:
            self.fire(other, event)

    role = Fires(port.actor)
    role._perform[Do.FIRST] = role.first
    other = machine(Do.SECOND)
    with pytest.raises(OutOfTurn, match="Mock is to be posted"):
        role.fire(other, mock.Mock())
    role.post(machine(Do.FIRST, Do.SECOND), mock.Mock())
    assert not other.fire.called and port.actor.counters == {"faults": 1}
    assert "OutOfTurn" in port.log.warning.call_args.kwargs["error"]
    assert role.seen == ["second"], "its other effect is performed"
    role.post(other, mock.Mock())
    assert other.fire.called


@pytest.mark.parametrize("eager", [False, True], ids=["later", "at once"])
async def test_a_performer_that_is_a_coroutine_does_not_fire_either(*, eager: bool) -> None:
    """Whenever it begins: in the loop's next turn, or within the item that has caused it."""
    port = Port()
    if eager:
        port.actor.ports.start_task = begun
    role, other = Sample(port.actor), machine(Do.SECOND)

    async def fires(subject: Any, event: Any) -> None:
        role.fire(other, event)

    role._perform[Do.FIRST] = fires
    role.post(machine(Do.FIRST, Do.SECOND), mock.Mock())
    await turns()
    assert "OutOfTurn" in port.log.warning.call_args.kwargs["error"]
    assert not other.fire.called and not port.actor._tasks and not port.actor.mailbox.may_fire


def begun(work: Any, name: str) -> Any:
    """As eager tasks do, of a coroutine with nothing to wait for."""
    with pytest.raises(StopIteration):
        work.send(None)
    return mock.Mock(done=lambda: True)


def test_a_performer_posts_and_nothing_is_done_inside_it() -> None:
    port = Port()
    seen: list[str] = []

    class Posts(Sample):
        def first(self, subject: Any, event: Any) -> None:
            self.post(other, "caused")  # type: ignore[arg-type]
            seen.append("first is done")

    role = Posts(port.actor)
    role._perform[Do.FIRST] = role.first
    other = machine(Do.SECOND)
    other.fire.side_effect = lambda event: seen.append(event) or (Do.SECOND,)
    role.post(machine(Do.FIRST, Do.SECOND), mock.Mock())
    assert seen == ["first is done", "caused"]
    assert role.seen == ["second", "second"], "its own second effect, then the other's"


# --- the actor ------------------------------------------------------------------------------------


async def test_an_actor_runs_until_it_is_closed() -> None:
    port = Port(Mailbox)
    role = Sample(port.actor)
    port.actor.start()
    await turns()
    for count in (1, 2):
        port.actor.deliver(received(LinkEcho()))
        assert len(role.seen) == count - 1, "nothing is done in the callback that brings it"
        await turns()
        assert len(role.seen) == count
    await port.actor.close()
    port.actor.deliver(received(LinkEcho()))
    await turns()
    assert len(role.seen) == 2


async def test_messages_have_a_bound_and_nothing_else_is_lost() -> None:
    port = Port(Mailbox)
    role, actor = Sample(port.actor), port.actor
    actor.start()
    with mock.patch.object(mailboxes, "MAX_ITEMS", 3):
        for _ in range(5):
            actor.deliver(received(LinkEcho()))
        actor.mailbox.put("timers", role.note, "timers")
    await turns()
    assert role.seen == ["echo"] * 3 + ["timers"] and actor.counters == {"inbox_full": 2}
    await actor.close()


def test_messages_have_one_receiver_and_effects_one_performer_over_all_roles() -> None:
    """Whatever roles an instance has: no two of them could be asked the same."""
    from epd.messages import MESSAGES
    from epd.roles.base import Component
    from epd.roles.compose import Gateway, Instance  # imports every role
    from epd.roles.steps.absent import WithoutDecode, WithoutPrefill

    assert Gateway and Instance
    found = [role for role in every(Component) if role.__module__.startswith("epd.roles.")]
    roles = [role for role in found if not role.__subclasses__()]
    received = [message for role in roles for message in role.handlers]
    assert sorted(m.__name__ for m in received) == sorted(m.__name__ for m in MESSAGES)
    instead = (WithoutDecode, WithoutPrefill)
    performed = [
        effect
        for role in roles
        for effect in role.performers
        if role not in instead and (not role.fires or effect in role.fires.table.effects)
    ]
    wanted = {effect for role in roles if role.fires for effect in role.fires.table.effects}
    assert len(performed) == len(set(performed)) and set(performed) == wanted


def every(role: type) -> list[Any]:
    return [found for child in role.__subclasses__() for found in (child, *every(child))]


def test_names_of_what_failed_reach_the_log() -> None:
    port = Port()
    port.actor.mailbox.put("the pool", mock.Mock(side_effect=Planned))
    told = port.log.warning.call_args
    assert told.kwargs["where"] == "the pool" and port.actor.counters == {"faults": 1}
