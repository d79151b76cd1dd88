"""Walks through a model with machines that live as long as the walk: those of a search, and random
ones.

A search makes a machine anew for every step, from the variables of its model.  Here it keeps the
effects of all its events, so a walk finds memory outside the model: a room that was there before,
or a reason.  A reported failure must have the reason of the event that just happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any

from epd.failure import FailureKind
from epd.fsm.kernel import Event
from epd_lab.formal.concrete import Values
from epd_lab.formal.explore import Space
from epd_lab.formal.form import Happening
from epd_lab.formal.world import Node, Reaction, Violation, World, require

LATE = ("DeadlinePassed", "TokenTimedOut")  # of these alone a client hears that its time is over


class ModelWalk:
    """One walk."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.node = world.initial()
        self.past: list[str] = []
        self._machines = [self._made(part) for part in range(len(world.acting))]
        self._rooms: dict[str, str] = {}  # by their letters
        self._numbers = count(1)

    def _made(self, part: int) -> Any:
        acting = self.world.acting[part]
        return acting.machine(acting.given(self.node), self.world.constants)

    def along(self, happenings: Iterable[Happening]) -> Node:
        """Raises Violation with the way."""
        try:
            for happening in happenings:
                self._step(happening)
        except Violation as error:
            raise Violation(f"{error}\nafter {' '.join(self.past)}") from error
        return self.node

    def _step(self, happening: Happening) -> None:
        self.past.append(happening.name)
        self.node = self.world.take(happening, self.node, self._fire)
        for number, acting in enumerate(self.world.acting):
            read = acting.read(self._machines[number])
            if any(self.node[place] != value for place, value in read):
                # Its role answers within the step, which the model does in one go.
                self._machines[number] = self._made(number)
                self._rooms.clear()

    def _fire(
        self, happening: Happening, fields: Values, made: Reaction, values: list[Any]
    ) -> None:
        machine = self._machines[happening.part]
        event = self.world.event(happening, machine, self._renamed(happening, fields))
        reaction = self.world.fire(happening, machine, event)
        require(reaction == made, f"what it remembers changes what it does: {machine.tell_story()}")
        concrete = self.world.acting[happening.part].concrete
        told = [concrete.tells[e.name] for e in reaction.effects if e.name in concrete.tells]
        if any(self.world.holds(when, values) for when in told):
            self._hear(concrete.why(machine), event)

    def _renamed(self, happening: Happening, fields: Values) -> Values:
        joins = self.world.acting[happening.part].concrete.joins
        if joins and (letter := fields.get("room")):
            if happening.event in joins:
                self._rooms[letter] = f"{letter}{next(self._numbers)}"
            fields["room"] = self._rooms.get(letter, letter)
        return fields

    def _hear(self, failure: Any, event: Event) -> None:
        require(failure is not None and failure.reason, "a failure is told, and no reason")
        own = getattr(event, "reason", None) or getattr(event, "failure", None)
        reason = getattr(own, "reason", own) or failure.reason
        name = type(event).__name__
        require(failure.reason == reason, f"{failure.reason!r} is told of {name}")
        late = failure.kind is FailureKind.DEADLINE
        require(late == (name in LATE), f"another kind of failure is told of {name}")


def replay(space: Space) -> None:
    """All that machines did in a search, by machines that have come the whole way.

    Raises Violation with the way.
    """
    world = space.world
    named = {happening.name: happening for happening in world.model.happenings}
    for node, last in list(world.situations):
        ModelWalk(world).along(named[step] for step in (*space.path(node), last.name))


def wander(world: World, choose: Callable[[int], int], num_steps: int = 40) -> Node:
    """`choose(n)` picks one of the `n` things that may happen.  Raises Violation with the way."""
    walk = ModelWalk(world)

    def chosen() -> Iterator[Happening]:
        for _ in range(num_steps):
            if possible := list(world.possible(walk.node)):
                yield possible[choose(len(possible))]

    return walk.along(chosen())
