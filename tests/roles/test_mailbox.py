"""Each item is taken to its end before the next, and what it causes is never done inside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from epd.roles.mailbox import Mailbox
from tests.roles.test_base import Do, Planned, Port, Sample, machine


@pytest.fixture
def errors() -> list[str]:
    return []


@pytest.fixture
def mailbox(errors: list[str]) -> Mailbox:
    return Mailbox(lambda name, error: errors.append(f"{name}: {error!r}"))


def noting(seen: list[str], *names: str) -> list[Callable[[], None]]:
    return [lambda name=name: seen.append(name) for name in names]  # type: ignore[misc]


def test_an_item_is_taken_at_once_and_one_that_raises_takes_none_along(
    mailbox: Mailbox, errors: list[str]
) -> None:
    seen: list[str] = []
    one, two = noting(seen, "one", "two")
    mailbox.put("1", one)
    assert seen == ["one"]
    mailbox.put("2", mock.Mock(side_effect=Planned))
    mailbox.put("3", two)
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
    assert seen == ["again"]
    await asyncio.sleep(0)
    assert seen == ["again", "again", "late"]
    mailbox.close()
    await asyncio.sleep(0)
    assert len(seen) == 3


async def test_no_item_is_taken_while_an_effect_is_performed(mailbox: Mailbox) -> None:
    seen: list[str] = []
    mailbox.performs = True
    mailbox.put("1", noting(seen, "one")[0])
    mailbox.performs = False
    mailbox.append("caused", lambda: mailbox.put("2", noting(seen, "two")[0]))
    assert seen == []
    await asyncio.sleep(0)
    assert seen == ["one", "two"]


def test_what_is_caused_comes_after_what_causes_it_and_in_order(
    mailbox: Mailbox, errors: list[str]
) -> None:
    seen: list[str] = []
    last = noting(seen, "last")[0]

    def first() -> None:
        mailbox.append("second", second)
        mailbox.append("last", last)
        mailbox.append("breaks", mock.Mock(side_effect=Planned))
        seen.append("first")

    def second() -> None:
        mailbox.append_once("third", third)
        mailbox.append_once("third", third)
        seen.append("second")

    def third() -> None:
        seen.append("third")

    mailbox.append("first", first)
    assert seen == ["first", "second", "last", "third"] and errors == ["breaks: Planned()"]
    mailbox.append_once("third", third)
    assert seen[-2:] == ["third", "third"], "what was done may be asked for again"


def test_a_performer_fires_nothing_inside_itself() -> None:
    port = Port()
    seen: list[str] = []

    class Fires(Sample):
        def first(self, subject: Any, event: Any) -> None:
            self.fire(other, "caused")  # type: ignore[arg-type]
            seen.append("first is done")

    role = Fires(port.actor)
    role._perform[Do.FIRST] = role.first
    other = machine(Do.SECOND)
    other.fire.side_effect = lambda event: seen.append(event) or (Do.SECOND,)
    role.fire(machine(Do.FIRST, Do.SECOND), mock.Mock())
    assert seen == ["first is done", "caused"]
    assert role.seen == ["second", "second"], "its own second effect, then the other's"


def test_a_handler_sees_its_event_and_all_that_follows_done() -> None:
    port = Port()
    role = Sample(port.actor)
    role._perform[Do.FIRST] = lambda subject, event: role.fire(other, event)
    other = machine(Do.SECOND)
    role.fire(machine(Do.FIRST), mock.Mock())
    assert other.fire.called and role.seen == ["second"]


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
    port.actor.mailbox.append("the pool", mock.Mock(side_effect=Planned))
    told = port.log.warning.call_args
    assert told.kwargs["where"] == "the pool" and port.actor.counters == {"faults": 1}
