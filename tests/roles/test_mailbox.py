"""Each item is taken to its end before the next, and what it causes is never done inside it."""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
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


async def test_what_is_posted_comes_after_what_posts_it_and_in_order(
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
        mailbox.post("third", noting(seen, "third")[0])
        seen.append("second")

    mailbox.post("first", first)
    mailbox.put("other", other)
    await take(mailbox)
    assert seen == ["first", "second", "last", "third", "the next item"]
    assert errors == ["breaks: Planned()"]


async def test_a_look_comes_once_after_the_item_and_all_that_it_posts(mailbox: Mailbox) -> None:
    seen: list[str] = []
    posted, other = noting(seen, "posted", "the next item")

    def item() -> None:
        for look in (one, two, one):
            mailbox.look("a queue", look)
        mailbox.post("posted", posted)
        seen.append("item")

    def one() -> None:
        assert mailbox.may_fire, "it is as good as an item"
        mailbox.post("posted", posted)
        mailbox.look("a queue", two)
        seen.append("one")

    def two() -> None:
        if "two" not in seen:
            mailbox.look("a queue", one)
        seen.append("two")

    mailbox.put("an item", item)
    mailbox.put("other", other)
    await take(mailbox)
    assert seen[:5] == ["item", "posted", "one", "posted", "two"]
    assert seen[5:] == ["one", "posted", "two", "the next item"], "it may be asked for again"
    mailbox.look("a queue", two)
    await take(mailbox)
    assert seen[9:] == ["two"], "without an item it is one"


# --- fire -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("asks", ["put", "look"])
def test_fire_has_taken_its_event_to_its_end_when_it_returns(asks: str) -> None:
    """Whoever calls, an item or a look: the effects are performed, and those of the events that
    they cause, and of those that these cause; so an item that fires twice overtakes nothing."""
    port = Port()
    seen = list[str]()
    machines = [machine(Do.FIRST) for _ in range(3)]
    after = dict(zip(map(id, machines), [*machines[1:], None], strict=True))

    class Causes(Sample):
        def first(self, subject: Any, event: Any) -> None:
            seen.append(f"{machines.index(subject)} begins")
            if (caused := after[id(subject)]) is not None:
                self.post(caused, event)
            seen.append("ends")

    role = Causes(port.actor)
    whole = ["0 begins", "ends", "1 begins", "ends", "2 begins", "ends"]

    def handler() -> None:
        for count in (1, 2):
            role.fire(machines[0], mock.Mock())
            assert seen == whole * count, "or the next line would see a machine that is half-way"

    getattr(port.actor.mailbox, asks)("an item", handler)
    assert len(seen) == 12 and not port.actor.counters


def test_what_an_item_has_posted_is_not_overtaken_by_what_it_fires() -> None:
    port = Port()
    role, seen = Sample(port.actor), list[str]()
    one, other = machine(), machine()
    one.fire.side_effect = lambda event: seen.append("posted") or ()
    other.fire.side_effect = lambda event: seen.append("fired") or ()

    def handler() -> None:
        role.post(one, mock.Mock())
        assert not seen
        role.fire(other, mock.Mock())
        assert seen == ["posted", "fired"]

    port.actor.mailbox.put("an item", handler)
    assert len(seen) == 2 and not port.actor.counters


def test_what_is_posted_fires_nothing() -> None:
    """It is a part of another event's end; a look at a queue is none."""
    port = Port()
    role, subject = Sample(port.actor), machine()
    mailbox = port.actor.mailbox
    fires = lambda: role.fire(subject, mock.Mock())  # noqa: E731
    mailbox.put("an item", lambda: mailbox.post("posted", fires))
    assert "OutOfTurn" in port.log.warning.call_args.kwargs["error"] and not subject.fire.called
    mailbox.put("an item", lambda: mailbox.look("a queue", fires))
    assert subject.fire.called and port.actor.counters == {"faults": 1}


def test_a_performer_does_not_fire_and_nobody_outside_the_inbox_does() -> None:
    port = Port()

    class Fires(Sample):
        def first(self, subject: Any, event: Any) -> None:
            self.fire(other, event)

    role = Fires(port.actor)
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
        port.start_task = begun
    other = machine(Do.SECOND)

    class Fires(Sample):
        async def first(self, subject: Any, event: Any) -> None:  # type: ignore[override]
            self.fire(other, event)

    role = Fires(port.actor)
    role.post(machine(Do.FIRST, Do.SECOND), mock.Mock())
    await turns()
    assert "OutOfTurn" in port.log.warning.call_args.kwargs["error"]
    assert not other.fire.called and not port.num_tasks and not port.actor.mailbox.may_fire


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
    from epd import roles as roles_of
    from epd.messages import MESSAGES
    from epd.roles.base import Component
    from epd.roles.steps.absent import WithoutDecode, WithoutPrefill

    for module in pkgutil.walk_packages(roles_of.__path__, "epd.roles."):
        importlib.import_module(module.name)
    found = [role for role in every(Component) if role.__module__.startswith("epd.roles.")]
    roles = [role for role in found if not set(found) & set(role.__subclasses__())]
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
