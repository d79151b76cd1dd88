"""The parts of a table: effects, owned things, states, events, guards, rows.

`epd.fsm.kernel` describes them; tables import them from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Never, Self


class Effect(Enum):
    """Base of a machine's effects: orders to the outside, described by their values."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is slow Python


class Owned(Enum):
    """Base of what a machine's objects own: `NAME = "what it is", release, *passed_on_by`."""

    __hash__ = object.__hash__
    release: Effect | None  # gives it back; None: it is in use, and only an event ends it
    passed_on_by: tuple[Effect, ...]  # a row that orders one of these gives nothing back

    def __new__(cls, about: str, release: Effect | None = None, *passed_on_by: Effect) -> Self:
        made = object.__new__(cls)
        made._value_ = about
        made.release, made.passed_on_by = release, passed_on_by
        return made


class State(Enum):
    """Base of a machine's states: `NAME = "what it is", *owns`."""

    __hash__ = object.__hash__
    owns: tuple[Owned, ...]

    def __new__(cls, about: str, *owns: Owned) -> Self:
        made = object.__new__(cls)
        made._value_, made.owns = about, owns
        return made


class Event:
    """Base of events: what happened, in the past tense, one class per outcome."""

    __slots__ = ()
    by_time: ClassVar[bool] = False
    brings: ClassVar[tuple[Owned, ...]] = ()  # is the object's own from now on
    ends: ClassVar[tuple[Owned, ...]] = ()  # is over, or another's: there is nothing to give back


Timers = Mapping[type[Event], tuple[Effect, ...]]
"""What arms each of a machine's timers, by the event that it fires; nothing: it runs from birth."""

# Of a machine and events that the row says; a test compares (tests/fsm/test_every_cell.py).
Guard = Callable[[Never, Never], bool]
Action = Callable[[Never, Never], None]


class Unless:
    """The complement of a predicate, so that both halves read alike in row and image."""

    __slots__ = ("__name__", "predicate")

    def __init__(self, predicate: Guard) -> None:
        self.predicate = predicate
        self.__name__ = f"not {predicate.__name__}"

    def __call__(self, machine: Never, event: Never) -> bool:
        return not self.predicate(machine, event)


def unless(predicate: Guard) -> Unless:
    return Unless(predicate)


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """Transitions of one kind: from a state or several, on an event or several; `target=None` stays
    (an internal one)."""

    source: State | tuple[State, ...]
    event: type[Event] | tuple[type[Event], ...]
    target: State | None
    effects: tuple[Effect, ...] = ()
    do: Action | None = None
    when: Guard | None = None
    note: str = ""

    @property
    def sources(self) -> tuple[State, ...]:
        return self.source if isinstance(self.source, tuple) else (self.source,)

    @property
    def events(self) -> tuple[type[Event], ...]:
        return self.event if isinstance(self.event, tuple) else (self.event,)

    def parted(self, source: State, event: type[Event]) -> tuple[Owned, ...]:
        """What leaves the object's hands when this row is taken, other than by the event itself."""
        kept = (*(self.target or source).owns, *event.ends)
        return tuple(
            thing for thing in dict.fromkeys((*source.owns, *event.brings)) if thing not in kept
        )

    def passes_on(self, thing: Owned) -> bool:
        return any(effect in thing.passed_on_by for effect in self.effects)

    def releases(self, source: State, event: type[Event]) -> tuple[Effect, ...]:
        """The effects that follow from what is owned, in the order of the machine's `Owned`."""
        parted = [thing for thing in self.parted(source, event) if not self.passes_on(thing)]
        order = list(type(parted[0])) if parted else []
        freed = (t.release for t in sorted(parted, key=order.index) if t.release is not None)
        return tuple(dict.fromkeys(freed))

    def all_effects(self, source: State, event: type[Event]) -> tuple[Effect, ...]:
        return (*self.releases(source, event), *self.effects)


@dataclass(frozen=True, slots=True)
class Ignore:
    """Events that change nothing in these states, and why that is right."""

    sources: tuple[State, ...]
    events: tuple[type[Event], ...]
    reason: str
