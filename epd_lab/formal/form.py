"""The one form of a model from which both writers print: variables, steps, laws and promises.

Theory of operation
-------------------
A `Model` is what a small world around one or two machines consists of, as data.  Its machines are
tables of `epd.fsm`; each `Part` has the table's guards and actions in the model's variables, and
the outside's reaction to the effects.  A `Happening` is something that may occur: a word that
arrives, a thread that ends, a timer; with the event that it fires at a part.

`steps` expands every happening by the rows of the table: each row gives a step.  Its condition is
that of the happening, the row's sources and its guard.  Its body is the happening's, the row's
action and its effects, in the order of the kernel and a role.  States that ignore the event give
one more; so do those without it, and there `broken` becomes `illegal_event`.

A law is an invariant.  A promise is a formula of linear temporal logic with the fairness that it
needs; without that it must fail, or the assumption would be idle.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from epd.fsm.kernel import Effect, Event, Row, State, Table, Unless
from epd_lab.formal.expressions import (
    Assign,
    Body,
    ExpressionWords,
    Require,
    Statement,
    both,
    expression,
    is_false,
    negated,
    printed,
    replaced,
    statements,
    worth,
)

FINE = "nothing"
ILLEGAL = Require(
    ast.Constant(False), "illegal_event", "the table knows every event that may occur"
)


@dataclass(frozen=True, slots=True)
class Variable:
    """`values` are names, True and False, or numbers; the first is the one at the start."""

    name: str
    values: tuple[Any, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """A machine in a model.  What has no place in the mappings changes no variable and is named in
    `silent`, so that nothing is left out by oversight."""

    table: Table
    state: str = "state"
    guards: Mapping[str, str] = field(default_factory=dict)
    actions: Mapping[str, Body] = field(default_factory=dict)
    effects: Mapping[str, Body] = field(default_factory=dict)
    silent: frozenset[str] = frozenset()
    at_end: Body = ()
    timers: Mapping[str, type[Event]] = field(default_factory=dict)  # by the variable: it is armed
    owners: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that may occur when `when` holds.

    `kind`: `time` (a timer, or noticed silence), `retry` (a timer that repeats), `work` (which is
    done anyway), `fault` (it may happen, or never) or `loss` (of a message). `guards` and `actions`
    stand before those of the part: they depend on what the event carries (`event_fields`: name to
    expression).
    """

    name: str
    kind: str
    when: str = "True"
    event: type[Event] | None = None
    part: int = 0
    before: Body = ()
    guards: Mapping[str, str] = field(default_factory=dict)
    event_fields: Mapping[str, str] = field(default_factory=dict)
    actions: Mapping[str, Body] = field(default_factory=dict)

    @property
    def owed(self) -> str:
        """The kind, as far as fairness goes: a retry is owed by time, a loss never."""
        return {"retry": "time", "loss": "fault"}.get(self.kind, self.kind)


@dataclass(frozen=True, slots=True)
class Law:
    """Holds at every moment; `number` is that of docs/architecture.md, section 8."""

    name: str
    number: int
    words: str
    holds: str

    @property
    def formula(self) -> str:
        return self.holds


@dataclass(frozen=True, slots=True)
class Promise:
    """Comes true on every path that is fair to the kinds of happenings in `fair`, or rests.

    `how`: `once` (some day), `again` (again and again).  `rests`: where it may stay for ever, or
    come back to for ever, and why that is right: judgements, without each of which it fails.
    """

    name: str
    number: int
    words: str
    how: str
    holds: str
    fair: tuple[str, ...] = ("time",)
    rests: Mapping[str, str] = field(default_factory=dict)

    @property
    def formula(self) -> str:
        return " or ".join((self.holds, *self.rests))

    @property
    def judgements(self) -> Iterator[Promise]:
        """The promise without each of its rests, one at a time: these must fail."""
        for number, rest in enumerate(self.rests, 1):
            others = {other: why for other, why in self.rests.items() if other != rest}
            yield replace(self, name=f"{self.name}_without_rest_{number}", rests=others)


@dataclass(frozen=True, slots=True)
class Model:
    """One world, as data.

    `succeeds`: what happens if nothing fails; empty: it has no such aim.  `rests`: where nothing is
    left to do; empty: where its promises have come true.  `nodes`: of a search, and of one
    with timers last where it succeeds: a search that shrank would prove less than before.
    """

    name: str
    about: str
    parts: tuple[Part, ...]
    variables: tuple[Variable, ...]
    happenings: tuple[Happening, ...]
    laws: tuple[Law, ...]
    promises: tuple[Promise, ...]
    nodes: tuple[int, ...]
    constants: Mapping[str, bool | int] = field(default_factory=dict)
    succeeds: str = ""
    rests: str = ""

    @property
    def quiescence(self) -> str:
        return self.rests or " and ".join(f"({p.formula})" for p in self.promises) or "True"

    @property
    def all_variables(self) -> tuple[Variable, ...]:
        """With the machines' states, and `broken`."""
        states = tuple(
            Variable(part.state, _initial_first(part.table), f"of {part.table.name}")
            for part in self.parts
        )
        laws = dict.fromkeys(
            done.law for step in steps(self) for done in step.body if isinstance(done, Require)
        )
        return (*states, *self.variables, Variable("broken", (FINE, *laws), "the first law broken"))


class Writer:
    """A model, and how a language writes its expressions."""

    words: ClassVar[ExpressionWords]

    def __init__(self, model: Model) -> None:
        self.model = model
        self.variables = model.all_variables
        self.names = frozenset(v.name for v in self.variables) | frozenset(model.constants)

    def show(self, tree: ast.expr) -> str:
        return printed(tree, self.words, self.names)


@dataclass(frozen=True, slots=True)
class Step:
    """A happening and the row that answers it: a condition, and what is done at once."""

    name: str
    about: str
    happening: Happening
    when: ast.expr  # the happening's own condition
    row: ast.expr  # and that of the row: its sources and its guard
    body: tuple[Statement, ...]


def _initial_first(table: Table) -> tuple[str, ...]:
    others = [state.name for state in table.states if state is not table.initial]
    return (table.initial.name, *others)


def steps(model: Model) -> Iterator[Step]:
    """Everything that may be done in one go, in the order of happenings and rows."""
    told = {part.state: [*part.table.told_rows()] for part in model.parts}
    for happening in model.happenings:
        if happening.event is None:
            when, body = expression(happening.when), statements(happening.before)
            yield Step(happening.name, "no machine", happening, when, ast.Constant(True), body)
        else:
            part = model.parts[happening.part]
            answers = [pair for pair in told[part.state] if happening.event in pair[0].events]
            yield from _expanded(part, happening, happening.event, answers)


def _expanded(
    part: Part,
    happening: Happening,
    event: type[Event],
    answers: list[tuple[Row, tuple[Effect, ...]]],
) -> Iterator[Step]:
    when = expression(happening.when, part.owners)
    before = statements(happening.before, part.owners)
    values = worth(before, {})
    known: list[State] = []
    for number, (row, effects) in enumerate(answers):
        known += row.sources
        guard = replaced(_guard(part, happening, row), values)
        condition = both(_state_in(part, row.sources), guard)
        if is_false(condition):
            continue
        name = f"{happening.name}_{number + 1}"
        about = _told(row, event, effects)
        body = (*before, *_answer(part, happening, row, effects))
        yield Step(name, about, happening, when, condition, body)
    ignoring = [s for s in part.table.states if part.table.ignore_of(s, event)]
    if ignoring and before:
        condition = _state_in(part, ignoring)
        about = f"{event.__name__} changes nothing here"
        yield Step(f"{happening.name}_ignored", about, happening, when, condition, before)
    strange = [s for s in part.table.states if s not in known and s not in ignoring]
    if strange:
        condition = _state_in(part, strange)
        about = f"{event.__name__} is illegal here"
        yield Step(f"{happening.name}_illegal", about, happening, when, condition, (ILLEGAL,))


def _state_in(part: Part, states: Any) -> ast.expr:
    here: ast.expr = ast.Name(part.state)
    names: list[ast.expr] = [ast.Name(state.name) for state in states]
    if len(names) == len(part.table.states):
        return ast.Constant(True)
    if len(names) == 1:
        return ast.Compare(here, [ast.Eq()], names)
    return ast.Compare(here, [ast.In()], [ast.Tuple(names)])


def _guard(part: Part, happening: Happening, row: Row) -> ast.expr:
    if row.when is None:
        return ast.Constant(True)
    predicate = row.when.predicate if isinstance(row.when, Unless) else row.when
    guards = {**part.guards, **happening.guards}
    held = expression(guards[predicate.__name__], part.owners)
    return negated(held) if isinstance(row.when, Unless) else held


def _answer(
    part: Part, happening: Happening, row: Row, effects: tuple[Effect, ...]
) -> Iterator[Statement]:
    if row.do is not None:
        yield from _known(part, {**part.actions, **happening.actions}, row.do.__name__)
    if row.target is not None:
        yield Assign(part.state, ast.Name(row.target.name))
        running = part.table.running[row.target]
        stopped = (
            f"{armed} = False" for armed, event in part.timers.items() if event not in running
        )
        yield from statements(tuple(stopped), part.owners)
    for effect in effects:
        yield from _known(part, part.effects, effect.name)
    if row.target in part.table.terminal:
        yield from statements(part.at_end, part.owners)


def _known(part: Part, mapping: Mapping[str, Body], name: str) -> tuple[Statement, ...]:
    if name in part.silent:
        return ()
    if name not in mapping:
        raise KeyError(f"{part.table.name}: the model does not say what {name} does")
    return statements(mapping[name], part.owners)


def _told(row: Row, event: type[Event], effects: tuple[Effect, ...]) -> str:
    here = "|".join(state.name for state in row.sources)
    guard = f" [{row.when.__name__}]" if row.when is not None else ""
    target = row.target.name if row.target is not None else "same"
    told = ", ".join(effect.name for effect in effects)
    return f"{here} -{event.__name__}{guard}-> {target}" + (f": {told}" if told else "")
