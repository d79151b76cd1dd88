"""The models of `epd_lab.formal`, walked by `epd sim model`'s search with machines that run.

What a step does outside (its happening, the effects) is read from the model's data, because there
is nothing else.  What the machine does is not: a real machine is made from the variables, a real
event is fired at it, and the variables are read back from it.  So where this walk and a foreign
checker count the same moments, guards and actions as data are those that run.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from epd.failure import Failure, FailureKind
from epd.fsm.kernel import IllegalEvent, Machine
from epd_lab.formal import models
from epd_lab.formal.expressions import Assign, Body, Require, expression, statements
from epd_lab.formal.form import Happening, Model, steps
from epd_lab.sim.model.laws import Step, Violation, require
from tests.fsm.tables import make_event

Values = dict[str, Any]
Node = tuple[Any, ...]


@dataclass(frozen=True)
class Concrete:
    """How a real machine is made from variables, and what is read back from it."""

    make: Callable[[Values], Machine]
    read: Callable[[Machine], Values] = lambda machine: {}
    carried: Mapping[str, Any] | None = None  # by its events


@cache
def _code(text: str) -> Any:
    return _compiled(expression(text))


def _compiled(tree: ast.expr) -> Any:
    return compile(ast.unparse(tree), "<model>", "eval")


@cache
def _commands(body: Body) -> tuple[tuple[str, Any, str], ...]:
    """Variable (empty: a law), code, law."""
    return tuple(
        ("", _compiled(done.holds), done.words)
        if isinstance(done, Require)
        else (done.name, _compiled(done.value), "")
        for done in statements(body)
    )


class Walked:
    """A model for `explore`; its nodes are the values of the variables."""

    def __init__(self, model: Model, concrete: Concrete) -> None:
        self.model = model
        self.part = model.parts[0]
        self.concrete = concrete
        self.names = tuple(variable.name for variable in model.all_variables)
        names = {state.name: state.name for state in self.part.table.states}
        self.outside = {"__builtins__": {}, **names, **model.constants}
        self.fired: set[str] = set()  # names of rows' events that really came

    def initial(self) -> Node:
        return tuple(variable.values[0] for variable in self.model.all_variables)

    def quiescent(self, node: Node) -> bool:
        return True

    succeeded = quiescent

    def values(self, node: Node) -> Values:
        return dict(zip(self.names, node, strict=True))

    def holds(self, text: str, values: Values) -> Any:
        return eval(_code(text), self.outside, values)

    def allows(self, happening: Happening, node: Node) -> bool:
        return bool(self.holds(happening.when, self.values(node)))

    def steps(self, node: Node) -> Iterator[Step[Node]]:
        for happening in self.model.happenings:
            if self.allows(happening, node):
                yield Step(happening.name, happening.kind, lambda h=happening: self.take(h, node))

    def take(self, happening: Happening, node: Node) -> Node:
        values = self.values(node)
        carried = {n: self.holds(text, values) for n, text in happening.event_fields.items()}
        if kind := carried.get("failure"):
            carried["failure"] = Failure(FailureKind(kind), "because")
        self._do(happening.before, values)
        if happening.event is not None:
            machine = self.concrete.make(values | dict(self.model.constants))
            machine._state = self.part.table.state(values["state"])
            self._fire(machine, happening, carried, values)
        for law in self.model.laws:
            require(self.holds(law.holds, values), law.words)
        return tuple(values[name] for name in self.names)

    def _fire(
        self, machine: Machine, happening: Happening, carried: Values, values: Values
    ) -> None:
        assert happening.event is not None
        was_over = machine.terminal
        event = make_event(happening.event, **(self.concrete.carried or {}) | carried)
        edges = machine.table.dispatch[machine.state].get(happening.event)
        try:
            effects = machine.fire(event)
        except IllegalEvent as error:
            raise Violation(str(error)) from error
        if edges:
            self.fired.add(happening.event.__name__)
            values |= self.concrete.read(machine)
        values["state"] = machine.state.name
        running = machine.table.running[machine.state]
        values |= {a: False for a, event in self.part.timers.items() if event not in running}
        for effect in effects:
            self._do(self.part.effects.get(effect.name, ()), values)
        if machine.terminal and not was_over:
            self._do(self.part.at_end, values)

    def _do(self, body: Body, values: Values) -> None:
        for name, code, law in _commands(body):
            result = eval(code, self.outside, values)
            if name:
                values[name] = result
            else:
                require(result, law)


def differences(walk: Walked, node: Node) -> list[str]:
    """Happenings whose outcome at this node is another by the data than by the machine."""
    found = []
    for happening in walk.model.happenings:
        mine = {walk.take(happening, node)} if walk.allows(happening, node) else set()
        if mine - {node} != set(_by_data(walk, happening, node)) - {node}:
            found.append(f"{happening.name} at {walk.values(node)}")
    return found


def _by_data(walk: Walked, happening: Happening, node: Node) -> Iterator[Node]:
    for when, row, body in _steps(walk.model.name)[happening.name]:
        values = walk.values(node)
        if eval(when, walk.outside, values) and eval(row, walk.outside, values):
            for name, code in body:
                values[name] = eval(code, walk.outside, values)
            yield tuple(values[name] for name in walk.names)


@cache
def _steps(name: str) -> dict[str, list[tuple[Any, Any, list[tuple[str, Any]]]]]:
    model = next(model for model in models() if model.name == name)
    found: dict[str, list[Any]] = {happening.name: [] for happening in model.happenings}
    for step in steps(model):
        body = [(s.name, _compiled(s.value)) for s in step.body if isinstance(s, Assign)]
        found[step.happening.name].append((_compiled(step.when), _compiled(step.row), body))
    return found
