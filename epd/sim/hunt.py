"""Do the drills notice the bugs that are put back?  One hunt per mutant, and a measured table.

A hunt ends with the first seed that some drill notices; that is what CI asks.  A measurement runs
every drill with each of its mutants under the same N seeds and counts, which says how sharp a
drill is.  It takes minutes, so its outcome is stored beside the mutants (`STORE`) and shown until
somebody measures again.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from epd.sim import drills
from epd.sim.parallel import Progress, interrupts, results
from epd.sim.runner import SIMULATOR, Job, Report, execute

STORE = Path(__file__).resolve().parents[2] / "tests" / "sim" / "measured.json"


def noticed(report: Report) -> bool:
    """A checker objected; a simulator that broke down has noticed nothing."""
    return any(not line.startswith(SIMULATOR) for line in report.violations)


# --- until the first one is caught ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hunt:
    """A mutant under the drills that name it, seed by seed."""

    mutant: str
    seeds: range


@dataclass(frozen=True, slots=True)
class Catch:
    """How a hunt ended; `report` is the run that noticed, or None: the mutant survived."""

    mutant: str
    runs: int
    report: Report | None


def hunt(task: Hunt) -> Catch:
    """Runs in a worker."""
    runs = 0
    for seed in task.seeds:
        for drill in drills.naming(task.mutant):
            runs += 1
            report = execute(Job("drill", drill.name, seed, task.mutant))
            if noticed(report):
                return Catch(task.mutant, runs, report)
    return Catch(task.mutant, runs, None)


# --- in how many seeds ----------------------------------------------------------------------------


@dataclass(slots=True)
class Measured:
    """In how many of `num_seeds` seeds each drill's fault happened, and each mutant was caught."""

    num_seeds: int = 0
    fired: dict[str, int] = field(default_factory=dict)  # by drill
    caught: dict[tuple[str, str], int] = field(default_factory=dict)  # by drill and mutant

    def fired_told(self, drill: str) -> str:
        return f"{self.fired[drill]} of {self.num_seeds}" if drill in self.fired else "not measured"

    def caught_told(self, drill: str, mutant: str) -> str:
        count = self.caught.get((drill, mutant))
        return "not measured" if count is None else f"{count} of {self.num_seeds}"

    def knows(self, task: Count) -> bool:
        """Whether this was counted."""
        if task.mutant:
            return (task.drill, task.mutant) in self.caught
        return task.drill in self.fired

    def missed(self) -> list[str]:
        """Drills that never notice what they claim to."""
        return [
            f"{drill} noticed {mutant} in none of {self.num_seeds} seeds"
            for (drill, mutant), count in self.caught.items()
            if not count
        ]

    def store(self, path: Path = STORE) -> None:
        found = {
            "num_seeds": self.num_seeds,
            "fired": self.fired,
            "caught": [[drill, mutant, n] for (drill, mutant), n in self.caught.items()],
        }
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def stored(cls, path: Path = STORE) -> Measured:
        """The last measurement; an empty one where there is none."""
        if not path.exists():
            return cls()
        found = json.loads(path.read_text(encoding="utf-8"))
        caught = {(drill, mutant): n for drill, mutant, n in found["caught"]}
        return cls(found["num_seeds"], found["fired"], caught)


@dataclass(frozen=True, slots=True)
class Count:
    """A drill under many seeds, with a mutant or as it is."""

    drill: str
    mutant: str
    num_seeds: int


def count(task: Count) -> int:
    """Runs in a worker: in how many seeds the fault happened, or the mutant was noticed."""
    found = 0
    for seed in range(task.num_seeds):
        report = execute(Job("drill", task.drill, seed, task.mutant))
        found += noticed(report) if task.mutant else report.fired
    return found


def measure(num_seeds: int, workers: int, known: Measured | None = None) -> Measured:
    """What is `known` of as many seeds is not measured again.

    Raises KeyboardInterrupt when it is stopped: half a table says nothing.
    """
    measured = Measured(num_seeds)
    if known is not None and known.num_seeds == num_seeds:
        measured.fired, measured.caught = dict(known.fired), dict(known.caught)
    tasks = [task for task in _tasks(num_seeds) if not measured.knows(task)]
    progress = Progress("measure", len(tasks), "drills and mutants")
    with interrupts(), contextlib.closing(results(count, tasks, workers)) as counts:
        for done, (task, number) in enumerate(zip(tasks, counts, strict=False), 1):
            if task.mutant:
                measured.caught[task.drill, task.mutant] = number
            else:
                measured.fired[task.drill] = number
            progress.show(done, f"{num_seeds} seeds each")
    return measured


def _tasks(num_seeds: int) -> Iterator[Count]:
    for drill in drills.DRILLS:
        for mutant in ("", *drill.mutants):
            yield Count(drill.name, mutant, num_seeds)
