"""Held prompts leave room for others, and go when their instance does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

from epd.fsm.kernel import Event
from epd.fsm.request import LeaseEnded, LeaseRevoked
from epd.roles.prefill.held_prompts import HeldPrompts
from tests.roles.turns import AtOnce


class FakeRequests:
    def __init__(self) -> None:
        self.pool = SimpleNamespace(size=20)
        self.num_held = 0
        self.fired: list[tuple[str, type[Event]]] = []
        self.armed: list[tuple[str, float, type[Event]]] = []

    def extend(self, part: Any) -> None:
        self.part = part

    def arm(self, request: Any, delay_s: float, event: Event) -> None:
        self.armed.append((request.key, delay_s, type(event)))

    def fire(self, request: Any, event: Event) -> None:
        self.fired.append((request.key, type(event)))
        self.part.end_lease(request, event)
        request.blocks = ()  # they go back with it


def made() -> tuple[HeldPrompts, FakeRequests]:
    actor: Any = SimpleNamespace(
        add=lambda role: None,
        clock=None,
        mailbox=AtOnce(mock.Mock()),
        timers=SimpleNamespace(keep=None),
    )
    requests: Any = FakeRequests()
    return HeldPrompts(actor, requests), requests


def prompt(key: str, num_blocks: int) -> Any:
    blocks = tuple(range(num_blocks))
    return SimpleNamespace(key=key, blocks=blocks, lease_s=3.0)


def test_more_than_half_of_the_pool_is_not_held() -> None:
    """F24: others must find blocks; the oldest gives way, for it was held the longest."""
    held, requests = made()
    for key in ("a", "b", "c"):
        held.arm_lease(prompt(key, 4), LeaseEnded())
    assert requests.fired == [("a", LeaseRevoked)]
    held.arm_lease(prompt("whole", 11), LeaseEnded())
    assert [key for key, _ in requests.fired] == ["a", "b", "c", "whole"]
    assert held.live() == {"held_prompts": 0}


def test_an_instance_that_leaves_holds_nothing() -> None:
    """Nor what is answered while it leaves: it would wait for a lease."""
    held, requests = made()
    held.arm_lease(prompt("a", 4), LeaseEnded())
    assert held.live() == {"held_prompts": 1} and requests.num_held == 1
    held.drained()
    assert requests.fired == [("a", LeaseRevoked)], "at once"
    held.arm_lease(prompt("b", 4), LeaseEnded())
    assert requests.fired == [("a", LeaseRevoked), ("b", LeaseRevoked)]
    assert held.live() == {"held_prompts": 0} and requests.num_held == 0


def test_a_lease_ends_by_its_timer() -> None:
    held, requests = made()
    held.arm_lease(prompt("a", 4), LeaseEnded())
    assert requests.armed == [("a", 3.0, LeaseEnded)]
