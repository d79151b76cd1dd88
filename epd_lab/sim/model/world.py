"""Models written the way roles are: real machines, and an object that performs their effects.

A `World` is mutable while a step runs and a value afterwards: a step forks it, acts on the fork,
and the search compares worlds by what they hold (`key`).  What counts as a machine's content is its
state and all its slots; its story is not part of it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from enum import Enum
from functools import cache, partial
from operator import attrgetter
from typing import Any, Generic, Self, TypeVar

from epd.fsm.kernel import Effect, Event, Machine
from epd_lab.sim.model.laws import Step

W = TypeVar("W", bound="World")
OUTSIDE = frozenset({"_journal", "_story", "key"})


# Types whose objects nobody changes, and how others become such: both grow by what is met.
_COPIES: set[type] = {str, int, bool, tuple, frozenset, type(None)}  # are their own copies
_KEYS = _COPIES.copy()  # are their own keys


@cache
def _slots(kind: Any) -> tuple[str, ...]:
    names = (name for base in kind.__mro__ for name in getattr(base, "__slots__", ()))
    return tuple(sorted(set(names) - OUTSIDE))


@cache
def _content(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    return attrgetter(*_slots(kind))


def _copied(value: Any) -> Any:
    """A copy as deep as what worlds hold: machines, and containers of values."""
    kind: Any = type(value)
    if kind in _COPIES:
        return value
    if kind is dict:
        return {k: v if type(v) in _COPIES else _copied(v) for k, v in value.items()}
    if kind is set or kind is list:
        return value.copy()
    if kind is array:
        return value[:]
    if isinstance(value, Machine):
        machine = object.__new__(kind)
        machine.key, machine._journal, machine._story = value.key, value._journal, deque()
        for name, part in zip(_slots(kind), _content(kind)(value), strict=True):
            setattr(machine, name, part if type(part) in _COPIES else _copied(part))
        return machine
    _COPIES.add(kind)  # a world inside another is replaced by a fork of it, never changed
    return value


def _frozen(value: Any) -> Hashable:
    kind: Any = type(value)
    if kind in _KEYS:
        return value  # type: ignore[no-any-return]
    if kind is dict:
        return tuple([(k, v if type(v) in _KEYS else _frozen(v)) for k, v in value.items()])
    if kind is set:
        return frozenset(value)
    if kind is list or kind is array:
        return tuple(value)
    if isinstance(value, Machine):
        parts = _content(kind)(value)
        return (value.key, *[v if type(v) in _KEYS else _frozen(v) for v in parts])
    if isinstance(value, World):
        return value.key
    _KEYS.add(kind)
    return value  # type: ignore[no-any-return]


class World:
    """One moment of a small configuration."""

    __slots__ = ("__dict__", "_hash", "_key")  # what a world holds is in its __dict__

    def __hash__(self) -> int:
        if not hasattr(self, "_hash"):
            self._hash = hash(self.key)
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, World) and self.key == other.key

    @property
    def key(self) -> Hashable:
        """All that this world holds; asked only when its step is over."""
        if not hasattr(self, "_key"):
            parts = vars(self).values()
            self._key: Hashable = tuple([v if type(v) in _KEYS else _frozen(v) for v in parts])
        return self._key

    def fork(self) -> Self:
        other = object.__new__(type(self))
        other.__dict__ = {name: _copied(value) for name, value in vars(self).items()}
        return other

    def __str__(self) -> str:
        return "\n".join(f"{name}: {_told(value)}" for name, value in vars(self).items())

    def act(self, name: str, kind: str, do: Callable[[Self], None]) -> Step[Self]:
        """A step: `do` on a fork of this world, whose laws must hold afterwards."""
        return Step(name, kind, partial(_after, self, do))

    def changes(self, machine: Machine, event: Event) -> bool:
        """Whether the event is a row of the table, or not known to it, rather than ignored."""
        return machine.table.dispatch[machine.state].get(type(event)) != ()

    def perform(self, machine: Machine, effects: tuple[Effect, ...], event: Event) -> None:
        """Each effect by the method that bears its name, if there is one."""
        for effect in effects:
            performer = getattr(self, effect.name.lower(), None)
            if performer is not None:
                performer(machine, event)

    def steps(self) -> Iterator[Step[Self]]:
        """Everything that may happen next, in an order that never changes."""
        raise NotImplementedError

    def check(self) -> None:
        """The laws of every moment.  Raises Violation."""

    def quiescent(self) -> bool:
        raise NotImplementedError

    def succeeded(self) -> bool:
        raise NotImplementedError


def _after(world: W, do: Callable[[W], None]) -> W:
    after = world.fork()
    do(after)
    after.check()
    return after


def _told(value: Any) -> str:
    if isinstance(value, World):
        return "(" + str(value).replace("\n", "; ") + ")"
    if isinstance(value, Machine):
        return str(value.state.name)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_told(item)}" for key, item in value.items()) or "-"
    return value.name if isinstance(value, Enum) else str(value)


class WorldModel(Generic[W]):
    """A `Model` whose nodes are worlds."""

    def __init__(self, begin: Callable[[], W]) -> None:
        self._begin = begin

    def initial(self) -> W:
        return self._begin()

    def steps(self, world: W) -> Iterator[Step[W]]:
        return world.steps()

    def quiescent(self, world: W) -> bool:
        return world.quiescent()

    def succeeded(self, world: W) -> bool:
        return world.succeeded()
