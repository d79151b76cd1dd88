"""A model in TLA+.

Every step is an action.  `Spec` states fairness to the happenings of time, `Everything` to what
has to be done anyway as well; promises are formulas.  The checker of the npm package
`tla-checker` looks at invariants and deadlocks, not at formulas: those are for a checker that
does.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from itertools import groupby

from epd_lab.formal.expressions import (
    Assign,
    ExpressionWords,
    Require,
    both,
    expression,
    negated,
    worth,
)
from epd_lab.formal.form import FINE, Law, Model, Promise, Step, Variable, Writer, steps


@dataclass(frozen=True, slots=True)
class _Tla(ExpressionWords):
    def value(self, name: str) -> str:
        return f'"{name}"'

    def among(self, one: str, values: list[str]) -> str:
        return f"({one} \\in {{{', '.join(values)}}})"


WORDS = _Tla("/\\", "\\/", "~", "TRUE", "FALSE", "=", "#", "<=", "(IF {} THEN {} ELSE {})")
_HOW = {"once": "<>({})", "again": "[]<>({})"}


def tla(model: Model) -> str:
    """The text of a module."""
    return "\n".join(_Writer(model).lines())


def tla_config(model: Model) -> str:
    """What the checker is asked."""
    invariants = ["TypeOK", "NothingIsBroken", *(law.name for law in model.laws)]
    return "\n".join(["INIT Init", "NEXT Next", *(f"INVARIANT {name}" for name in invariants), ""])


class _Writer(Writer):
    words = WORDS

    def lines(self) -> list[str]:
        names = [variable.name for variable in self.variables]
        lines = [f"---- MODULE {self.model.name} ----", f"(* {self.model.about}"]
        lines += ["   Written by epd diagrams. *)", "EXTENDS Naturals", ""]
        lines += [f"{k} == {str(v).upper()}" for k, v in self.model.constants.items()]
        lines += ["VARIABLES", *_listed(names), "", "vars == <<", *_listed(names), ">>", ""]
        lines += ["TypeOK ==", *(f"  /\\ {v.name} \\in {_domain(v)}" for v in self.variables), ""]
        lines += ["Init ==", *(f"  /\\ {v.name} = {_value(v.values[0])}" for v in self.variables)]
        return [*lines, "", *self._actions(), *self._laws(), "===="]

    def _actions(self) -> list[str]:
        lines: list[str] = []
        groups: dict[str, list[str]] = {}
        for happening, of in groupby(steps(self.model), lambda step: step.happening):
            names, of_one = [], list(of)
            for step in of_one:
                lines += self._action(step)
                names.append(f"A_{step.name}")
            groups.setdefault(happening.owed, []).append(happening.name)
            lines += [f"H_{happening.name} ==", f'  /\\ broken = "{FINE}"']
            lines += [f"  /\\ {self.show(of_one[0].when)}"]
            lines += ["  /\\ " + " \\/ ".join(names), ""]
        every = [name for of_kind in groups.values() for name in of_kind]
        lines += ["Next ==", *(f"  \\/ H_{name}" for name in every), ""]
        lines += ["Spec == Init /\\ [][Next]_vars", *_fair(groups.get("time", [])), ""]
        return [*lines, "Everything == Spec", *_fair(groups.get("work", [])), ""]

    def _action(self, step: Step) -> list[str]:
        start: dict[str, ast.expr] = {}
        values, broken = dict(start), ast.Name("broken")
        result: ast.expr = broken
        for statement in step.body:
            if isinstance(statement, Assign):
                values = worth([statement], values)
            else:
                result = self._breaks(result, statement, values)
        lines = [f"\\* {step.about}", f"A_{step.name} =="]
        lines += [f"  /\\ {self.show(step.row)}"]
        if result is not broken:
            values["broken"] = result
        lines += [f"  /\\ {name}' = {self.show(value)}" for name, value in values.items()]
        same = [v.name for v in self.variables if v.name not in values]
        return [*lines, f"  /\\ UNCHANGED <<{', '.join(same)}>>", ""]

    def _breaks(self, so_far: ast.expr, law: Require, values: dict[str, ast.expr]) -> ast.expr:
        holds = worth([Assign("holds", law.holds)], values)["holds"]
        named = ast.Constant(law.law)
        if isinstance(so_far, ast.Name):
            return ast.IfExp(negated(holds), named, ast.Constant(FINE))
        fine = ast.Compare(so_far, [ast.Eq()], [ast.Constant(FINE)])
        return ast.IfExp(both(fine, negated(holds)), named, so_far)

    def _laws(self) -> list[str]:
        lines = ["\\* Laws of docs/architecture.md, section 8."]
        every: tuple[Law | Promise, ...] = (*self.model.laws, *self.model.promises)
        for law in every:
            lines += [f"\\* {law.number}: {law.words}", f"{law.name} == {self._formula(law)}"]
        lines += ["\\* what each step requires of the moment in which it happens"]
        return [*lines, f'NothingIsBroken == broken = "{FINE}"', ""]

    def _formula(self, law: Law | Promise) -> str:
        how = "{}" if isinstance(law, Law) else _HOW[law.how]
        return how.format(self.show(expression(law.formula)))


def _listed(names: list[str]) -> list[str]:
    return [f"  {name}{',' if name != names[-1] else ''}" for name in names]


def _fair(names: list[str]) -> list[str]:
    return [f"  /\\ WF_vars(H_{name})" for name in names]


def _value(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).upper()


def _domain(variable: Variable) -> str:
    return "{" + ", ".join(map(_value, variable.values)) + "}"
