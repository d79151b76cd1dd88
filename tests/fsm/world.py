"""What a random walk walks in: one machine, and everything outside it.

A `World` knows what may happen now, performs the effects in a ledger, and complains at once when
something is given back twice, freed while in use, or left over at the end.  What a peer, a client
or a clock may do is offered in every state, so that a walk also finds an event that can really
arrive and that the table does not know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from epd.fsm.kernel import Event, Machine

Choices = Iterator[Event]


class World:
    """One machine and everything outside it."""

    machine: Machine

    def __init__(self) -> None:
        self.done: Counter[Any] = Counter()
        self.past: list[str] = []

    def choices(self) -> Choices:
        """What may happen now."""
        raise NotImplementedError

    def before(self, event: Event) -> None:
        """The world changes as the event happens."""

    def perform(self, effect: Any, event: Event) -> None:
        """An effect, in the ledger."""

    def at_end(self) -> None:
        """The machine has just reached a terminal state."""

    def fire(self, event: Event) -> None:
        was_over = self.machine.terminal
        self.past.append(type(event).__name__)
        self.before(event)
        for effect in self.machine.fire(event):
            self.done[effect] += 1
            self.perform(effect, event)
        if self.machine.terminal and not was_over:
            self.at_end()

    def need_reason(self, told: str, event: Event) -> None:
        """What is told is the reason of what just happened, not of something before."""
        reason = getattr(event, "reason", None) or getattr(event, "failure", None)
        reason = getattr(reason, "reason", reason) or told
        self.need(bool(told) and told == reason, f"{told!r} is told of {type(event).__name__}")

    def need(self, holds: bool, law: str) -> None:
        assert holds, f"{law}; after {' '.join(self.past)}; {self.machine.tell_story()}"


def walk(world: World, choose: Callable[[int], int], steps: int = 40) -> None:
    """`choose(n)` picks one of the `n` things that may happen now."""
    for _ in range(steps):
        choices = list(world.choices())
        if not choices:
            return
        world.fire(choices[choose(len(choices))])
