"""A run as the page at `/ui` shows a cluster, in a file: its slider goes through virtual time.

Everything is read from the trace: a `Fold` follows it, and gives an answer of `GET /state` at
regular times and after each violation, with the machines of the failing step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from epd.api.watching.cluster_view import (
    ClusterView,
    EdgeView,
    KeptAnswer,
    KeptAnswers,
    LineView,
    MachineView,
    ProcessView,
    StateView,
)
from epd.fsm.kernel import STORY_LENGTH
from epd.fsm.story import outlived_its_clock
from epd.fsm.tables import TABLES
from epd.topology import ROLE_OF_LETTER
from epd_lab.sim.world import Entry

LOOKS = 100  # at regular times
MAX_ANSWERS = 120  # with those after violations
TOLD = frozenset({"fault", "kill", "stall", "violation"})  # in the note of the next look
BY_NAME = {table.name: table for table in TABLES}
TERMINAL = {table.name: {state.name for state in table.terminal} for table in TABLES}


@dataclass(slots=True)
class FoldedMachine:
    """A machine of a process, so far."""

    view: MachineView
    since_s: float


@dataclass(slots=True)
class Fold:
    """The trace up to now."""

    processes: dict[str, ProcessView] = field(default_factory=dict)  # by name with epoch
    lives: dict[tuple[str, str, str], FoldedMachine] = field(default_factory=dict)
    edges: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def take(self, entry: Entry) -> None:
        at_s, kind, fields = entry
        names = [str(one) for one in fields]
        if kind in TERMINAL:
            process, key, source, event, target = names
            line = LineView(at_s=at_s, source=source, event=event, target=target)
            self._moved((process, kind, key), line)
        elif kind == "spawn":
            instance, _, epoch = names[0].rpartition(":")
            self.processes[names[0]] = ProcessView(
                instance=instance, roles=_roles(instance), state="ALIVE", epoch=int(epoch)
            )
        elif kind in {"kill", "exit"}:
            self.processes.pop(names[0], None)
            self.lives = {of: life for of, life in self.lives.items() if of[0] != names[0]}
        if kind in TOLD:
            self.notes.append(f"{at_s:.3f} s: {kind} {' '.join(names)}")

    def _moved(self, of: tuple[str, str, str], line: LineView) -> None:
        process, machine, key = of
        self.edges[machine, line.source, line.event, line.target] += 1
        life = self.lives.get(of)
        if life is None or life.view.is_over:
            instance = process.rpartition(":")[0]
            view = MachineView(
                instance=instance, machine=machine, key=key, state=line.source, age_s=0.0
            )
            life = self.lives[of] = FoldedMachine(view, line.at_s)
        view = life.view
        view.story = [*view.story, line][-STORY_LENGTH:]
        if line.target != line.source:
            view.state, life.since_s = line.target, line.at_s
            view.is_over = line.target in TERMINAL[machine]

    def answer(self, at_s: float, *, whole: bool) -> KeptAnswer:
        """`whole`: with the machines that are over."""
        states: dict[tuple[str, str], StateView] = {}
        machines = []
        for life in self.lives.values():
            one, age_s = life.view, at_s - life.since_s
            one.is_late = not one.is_over and _is_late(one)
            if whole or not one.is_over:
                machines.append(replace(one, age_s=age_s))
            if not one.is_over:
                fresh = StateView(machine=one.machine, state=one.state)
                view = states.setdefault((one.machine, one.state), fresh)
                view.count += 1
                view.late += one.is_late
                view.oldest_s = max(view.oldest_s, age_s)
                view.instances[one.instance] = view.instances.get(one.instance, 0) + 1
        told = ClusterView(
            processes=list(self.processes.values()),
            states=[states[of] for of in sorted(states)],
            edges=[
                EdgeView(machine=machine, source=source, event=event, target=target, count=count)
                for (machine, source, event, target), count in sorted(self.edges.items())
            ],
            machines=sorted(machines, key=lambda one: -one.age_s),
        )
        note, self.notes = "; ".join(self.notes), []
        return KeptAnswer(at_ms=at_s * 1000, told=told, note=note)


def _roles(name: str) -> list[str]:
    """Of an instance that is called after them, such as pd0."""
    letters = name.rstrip("0123456789")
    is_short = set(letters) <= ROLE_OF_LETTER.keys()
    return [ROLE_OF_LETTER[letter] for letter in letters] if is_short else []


def _is_late(one: MachineView) -> bool:
    backwards = ((line.source, line.event, line.target) for line in reversed(one.story))
    return outlived_its_clock(BY_NAME[one.machine], one.state, backwards)


def answers_of(
    events: Iterable[Entry], end_s: float, title: str, wrong: Iterable[str]
) -> KeptAnswers:
    """`wrong`: what is wrong with the run, for the note of its end."""
    fold, answers = Fold(), []
    step_s = end_s / LOOKS
    next_s = step_s
    for entry in events:
        while entry[0] > next_s:
            answers.append(fold.answer(next_s, whole=False))
            next_s += step_s
        fold.take(entry)
        if entry[1] == "violation" and len(answers) < MAX_ANSWERS:
            answers.append(fold.answer(entry[0], whole=True))
    fold.notes += wrong
    answers.append(fold.answer(end_s, whole=True))
    return KeptAnswers(title=title, answers=answers)
