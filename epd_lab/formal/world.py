"""A model as a world that moves: what is outside comes from its data, its machines are real.

The happenings, what they do and what effects do outside are read from the data, because there is
nothing else.  What a machine does is not: a real machine is made from the variables, a real event
is fired at it, and the variables are read back from it.  Every step is compared with what guards
and actions as data make of it, so what a foreign checker proves of the data holds for the machines.

Expressions are compiled into functions of a list of values, and what a machine does is remembered
by what it was made from.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from epd.failure import Failure, FailureKind
from epd.fsm.kernel import Effect, Event, IllegalEvent, Machine, Table
from epd_lab.formal.concrete import CONCRETE, Values
from epd_lab.formal.expressions import Require, Statement, expression, replaced, statements
from epd_lab.formal.form import Happening, Model, Part, steps
from epd_lab.formal.machines import make_event

Node = tuple[Any, ...]
Code = Callable[[Any], Any]


class Violation(AssertionError):
    """A law is broken; with the shortest way there."""


def require(holds: object, law: str) -> None:
    """Raises Violation."""
    if not holds:
        raise Violation(law)


@dataclass(frozen=True, slots=True)
class Reaction:
    """What a machine did: its new values by their places, the effects, and whether it knew the
    event as a row."""

    places: tuple[tuple[int, Any], ...]
    effects: tuple[Effect, ...]
    has_ended: bool
    is_row: bool


class Acting:
    """A machine's part of a world."""

    def __init__(self, part: Part, names: dict[str, int], start: Values) -> None:
        self.part = part
        self.concrete = CONCRETE[part.table.name]
        self.state = names[part.state]
        prefix = f"{part.owners['me']}_" if part.owners else ""
        local = {n.removeprefix(prefix): at for n, at in names.items() if n.startswith(prefix)}
        values = {name.removeprefix(prefix): value for name, value in start.items()}
        made = self.concrete.make(values)
        self._kind = _of_table(type(made), part.table)
        own = self.concrete.read(made)
        self.own = {name: local[name] for name in own}
        self._local = {name: local[name] for name in (*own, *self.concrete.also)}
        self.given = itemgetter(self.state, self.state, *self._local.values())

    def machine(self, given: Node, constants: Values) -> Any:
        """A real one, of the model's table, from `given(values)`."""
        made: Any = self.concrete.make(constants | dict(zip(self._local, given[2:], strict=True)))
        made.__class__ = self._kind
        made._state = self.part.table.state(given[0])
        return made

    def read(self, machine: Machine) -> tuple[tuple[int, Any], ...]:
        """Its values, by their places."""
        return tuple((self.own[n], value) for n, value in self.concrete.read(machine).items())


def _of_table(kind: type[Machine], table: Table) -> type[Machine]:
    if kind.table is table:
        return kind
    return type(kind.__name__, (kind,), {"__slots__": (), "table": table})


class World:
    """A model for `explore` and `wander`; its nodes are the values of the variables."""

    def __init__(self, model: Model, *, compares: bool = True) -> None:
        """`compares`: a step whose outcome by the data is another breaks a law."""
        self.model = model
        variables = model.all_variables
        self._start = tuple(variable.values[0] for variable in variables)
        self._names = {variable.name: at for at, variable in enumerate(variables)}
        states = {s.name: s.name for part in model.parts for s in part.table.states}
        self._outside = {"require": require, **states, **model.constants}
        self.constants: Values = dict(model.constants)
        start = dict(zip(self._names, self._start, strict=True)) | self.constants
        self.acting = [Acting(part, self._names, start) for part in model.parts]
        self._when = {h.name: self._function(expression(h.when)) for h in model.happenings}
        self._before = {h.name: self._does(statements(h.before)) for h in model.happenings}
        self._fields = {h.name: self._carried(h) for h in model.happenings}
        self._laws = [(self._function(expression(law.holds)), law.words) for law in model.laws]
        self._data = self._by_data() if compares else {}
        self._after: dict[Any, Code] = {}
        self._texts: dict[str, Code] = {}
        self._reactions: dict[Any, Reaction] = {}
        self.quiescent = self._function(expression(model.quiescence))
        self.succeeded = self._function(expression(model.succeeds or "False"))
        self.situations: list[tuple[Node, Happening]] = []
        """Where a machine did something that it had not done yet, and what it was fired."""
        self.fired: set[tuple[int, str]] = set()  # parts, and events that really moved them

    # --- code -------------------------------------------------------------------------------------

    def _text(self, tree: ast.expr) -> str:
        places: dict[str, ast.expr] = {n: ast.Name(f"v[{at}]") for n, at in self._names.items()}
        return ast.unparse(replaced(tree, places))

    def _function(self, tree: ast.expr) -> Code:
        code: Code = eval(f"lambda v: {self._text(tree)}", self._outside)
        return code

    def _does(self, body: Iterable[Statement]) -> Code:
        """Changes a list of values."""
        lines = ["def done(v):"]
        for said in body:
            if isinstance(said, Require):
                lines.append(f"    require({self._text(said.holds)}, {said.words!r})")
            else:
                lines.append(f"    v[{self._names[said.name]}] = {self._text(said.value)}")
        made: dict[str, Any] = {}
        exec("\n".join([*lines, "    pass"]), self._outside, made)
        code: Code = made["done"]
        return code

    def _carried(self, happening: Happening) -> Code:
        fields = {name: expression(text) for name, text in happening.event_fields.items()}
        of = ", ".join(f"({name!r}, {self._text(tree)})" for name, tree in fields.items())
        code: Code = eval(f"lambda v: ({of}{',' * bool(of)})", self._outside)
        return code

    def _by_data(self) -> dict[str, list[tuple[Code, Code, Code]]]:
        found: dict[str, Any] = {happening.name: [] for happening in self.model.happenings}
        for step in steps(self.model):
            body = [said for said in step.body if not isinstance(said, Require)]
            codes = (self._function(step.when), self._function(step.row), self._does(body))
            found[step.happening.name].append(codes)
        return found

    # --- steps ------------------------------------------------------------------------------------

    def initial(self) -> Node:
        return self._start

    def values(self, node: Node) -> Values:
        return dict(zip(self._names, node, strict=True))

    def tell(self, node: Node, before: Node | None = None) -> str:
        """What is not as it was before, or at the start."""
        told = zip(self._names, node, before or self._start, strict=True)
        return ", ".join(f"{name} {value}" for name, value, was in told if value != was)

    def holds(self, text: str, values: Any) -> bool:
        if text not in self._texts:
            self._texts[text] = self._function(expression(text))
        return bool(self._texts[text](values))

    def possible(self, node: Node) -> Iterator[Happening]:
        """What may happen next, in an order that never changes."""
        return (h for h in self.model.happenings if self._when[h.name](node))

    def take(self, happening: Happening, node: Node, live: Any = None) -> Node:
        """The node behind it.  Raises Violation.  `live` sees what the machine does."""
        values = list(node)
        self._before[happening.name](values)
        if happening.event is not None:
            fields = self._fields[happening.name](values)
            reaction = self._react(happening, values, fields, node)
            if live is not None:
                live(happening, dict(fields), reaction, values)
            for place, value in reaction.places:
                values[place] = value
            self._perform(happening.part, values, reaction)
        for holds, words in self._laws:
            require(holds(values), words)
        after = tuple(values)
        if self._data:
            self._compare(happening, node, after)
        return after

    def _react(self, happening: Happening, values: list[Any], fields: Node, node: Node) -> Reaction:
        acting = self.acting[happening.part]
        given = acting.given(values)
        key = (happening.name, given, fields)
        if key not in self._reactions:
            machine = acting.machine(given, self.constants)
            event = self.event(happening, machine, dict(fields))
            self._reactions[key] = self.fire(happening, machine, event)
            self.situations.append((node, happening))
        if (known := self._reactions[key]).is_row and happening.event is not None:
            self.fired.add((happening.part, happening.event.__name__))
        return known

    def event(self, happening: Happening, machine: Any, fields: Values) -> Event:
        """A happening's event, for a machine; a failure names its happening."""
        assert happening.event is not None
        why = {"reason": happening.name, "failure": Failure(FailureKind.ENGINE, happening.name)}
        carry = self.acting[happening.part].concrete.carry
        carried = carry(machine, self.constants | fields)
        return make_event(happening.event, **why | fields | carried)

    def fire(self, happening: Happening, machine: Any, event: Event) -> Reaction:
        """Raises Violation for an event that is illegal in the machine's state."""
        acting = self.acting[happening.part]
        is_row = bool(machine.table.dispatch[machine.state].get(type(event)))
        was_over = machine.terminal
        try:
            effects = machine.fire(event)
        except IllegalEvent as error:
            raise Violation(str(error)) from error
        own = acting.read(machine) if is_row else ()
        places = ((acting.state, machine.state.name), *own)
        return Reaction(places, effects, machine.terminal and not was_over, is_row)

    def _perform(self, number: int, values: list[Any], reaction: Reaction) -> None:
        """Timers that do not run any more, effects, and what is done at the end."""
        part, (_, state) = self.model.parts[number], reaction.places[0]
        key = (number, state, reaction.effects, reaction.has_ended)
        if key not in self._after:
            running = part.table.running[part.table.state(state)]
            body = [f"{a} = False" for a, event in part.timers.items() if event not in running]
            for effect in reaction.effects:
                body += part.effects.get(effect.name, ())
            body += part.at_end if reaction.has_ended else ()
            self._after[key] = self._does(statements(tuple(body), part.owners))
        self._after[key](values)

    def _compare(self, happening: Happening, node: Node, after: Node) -> None:
        outcomes = set()
        for when, row, does in self._data[happening.name]:
            if when(node) and row(node):
                values = list(node)
                does(values)
                outcomes.add(tuple(values))
        if outcomes - {node} != {after} - {node}:
            said = " or ".join(self.tell(outcome, node) for outcome in outcomes)
            here = f"{happening.name} at the machine: {self.tell(after, node)}"
            raise Violation(f"{here}; by the data: {said}")
