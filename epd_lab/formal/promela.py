"""A model in Promela, for SPIN.

Every step is one `d_step`.  Happenings of one name are a process of their own, so that SPIN's weak
fairness (`pan -f`) is fairness to each of them.  Those of a kind that is not assumed to be fair may
idle for ever: `-DFAIR_TIME`, `-DFAIR_WORK` assume it.  Faults are never owed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from epd_lab.formal.expressions import ExpressionWords, Require, Statement, both, expression
from epd_lab.formal.form import FINE, Law, Model, Promise, Step, Variable, Writer, steps

KINDS = ("time", "work")
EVERY_LAW = "every_law"


@dataclass(frozen=True, slots=True)
class _Promela(ExpressionWords):
    def value(self, name: str) -> str:
        return f"V_{name}"

    def among(self, one: str, values: list[str]) -> str:
        return "(" + " || ".join(f"{one} == {value}" for value in values) + ")"


WORDS = _Promela("&&", "||", "!", "true", "false", "==", "!=", "<=", "({} -> {} : {})")
_HOW = {"once": "<> ({})", "again": "[] <> ({})"}


def promela(model: Model) -> str:
    """The text of a model."""
    writer = _Writer(model)
    return "\n".join((*writer.head(), *writer.processes(), *writer.laws()))


class _Writer(Writer):
    words = WORDS

    def head(self) -> list[str]:
        lines = [f"/* {self.model.name}: {self.model.about}", "   Written by epd diagrams. */", ""]
        lines += [f"#define {k} {str(v).lower()}" for k, v in self.model.constants.items()]
        for kind in KINDS:
            fair = f"FAIR_{kind.upper()}"
            lines += [f"#ifdef {fair}", f"#define IDLE_{kind.upper()} false", "#else"]
            lines += [f"#define IDLE_{kind.upper()} true", "#endif"]
        values = [v for variable in self.variables for v in variable.values if isinstance(v, str)]
        lines += ["", "mtype = {", *_wrapped([f"V_{v}" for v in dict.fromkeys(values)]), "};", ""]
        return lines + [self._declared(variable) for variable in self.variables] + [""]

    def _declared(self, variable: Variable) -> str:
        first = variable.values[0]
        note = f" /* {variable.note} */" if variable.note else ""
        if isinstance(first, bool):
            return f"bool {variable.name} = {str(first).lower()};{note}"
        if isinstance(first, int):
            return f"byte {variable.name} = {first};{note}"
        return f"mtype {variable.name} = V_{first};{note}"

    def processes(self) -> list[str]:
        lines: list[str] = []
        all_steps = list(steps(self.model))
        faults = [step for step in all_steps if step.happening.owed == "fault"]
        for happening, group in groupby(all_steps, lambda step: step.happening):
            if happening.owed != "fault":
                lines += self._process(happening.name, f"IDLE_{happening.owed.upper()}", [*group])
        return lines + self._process("faults", "true", faults)

    def _process(self, name: str, idle: str, of: list[Step]) -> list[str]:
        lines = [f"active proctype P_{name}() {{", "  do"]
        for step in of:
            lines += [f"  /* {step.about} */", f"  :: d_step {{ broken == V_{FINE}"]
            lines[-1] += f" && {self.show(both(step.when, step.row))} ->"
            lines += [f"      {self._said(statement)}" for statement in step.body]
            lines += ["      skip", "    }"]
        return [*lines, f"  :: d_step {{ {idle} -> skip }}", "  od", "}", ""]

    def _said(self, statement: Statement) -> str:
        if isinstance(statement, Require):
            fails = f"broken == V_{FINE} && !({self.show(statement.holds)})"
            return f"if :: {fails} -> broken = V_{statement.law} :: else fi;"
        return f"{statement.name} = {self.show(statement.value)};"

    def laws(self) -> list[str]:
        lines = ["/* Laws of docs/architecture.md, section 8. */"]
        for law in self.model.laws:
            lines += [f"/* {law.number}: {law.words} */"]
            lines += [f"#define LAW_{law.name} {self._shown(law)}"]
            lines += [f"ltl {law.name} {{ [] (LAW_{law.name}) }}"]
        lines += ["/* and what each step requires of the moment in which it happens */"]
        every = [f"broken == V_{FINE}", *(f"LAW_{law.name}" for law in self.model.laws)]
        lines += [f"ltl {EVERY_LAW} {{ [] ({' && '.join(every)}) }}", ""]
        for promise in self.model.promises:
            kinds = " and ".join(promise.fair)
            lines += [f"/* {promise.number}: {promise.words};"]
            lines += [f"   with fairness of {kinds} alone: -f, -DFAIR_... at spin -a."]
            lines += [f"   It may rest where {rest}: {why}." for rest, why in promise.rests.items()]
            lines[-1] += " */"
            lines += [f"ltl {promise.name} {{ {self._ltl(promise)} }}"]
            for judged in promise.judgements:
                lines += ["/* fails: the rest that is left out is needed */"]
                lines += [f"ltl {judged.name} {{ {self._ltl(judged)} }}"]
        return [*lines, ""]

    def _ltl(self, promise: Promise) -> str:
        return _HOW[promise.how].format(self._shown(promise))

    def _shown(self, law: Law | Promise) -> str:
        return self.show(expression(law.formula))


def _wrapped(words: list[str], width: int = 6) -> list[str]:
    rows = [words[i : i + width] for i in range(0, len(words), width)]
    return ["  " + ", ".join(row) + ("," if row is not rows[-1] else "") for row in rows]
