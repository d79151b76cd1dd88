"""How sharp the drills are, and which seeds are worth running again and again.

A measurement runs every drill, and it with each of its mutants, under the same N seeds.  It notes
the seeds in which the drill's faults happened and in which each mutant was noticed.  Seeds are
ranked by the edges of the tables, and pairs of successive edges in one process, that they cover.
The first has the most, each further one adds the most to those before it.

The tests run the first seeds of that order, as many as the drill's weakest mutant needs.  An
equally hard bug is then missed in fewer than `MISSED` of all choices of seeds.  Where all N are too
few, those behind them are run as well; a drill whose weakest mutant needs more than `MOST` times N
is not good enough.  The quick tests run fewer (`MISSED_BY_FEW`), and among them one that notices
each mutant.

It takes minutes, so its outcome is stored beside the mutants (`STORE`).
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from epd.fsm.kernel import Event, Machine, State
from epd_lab.sim import drills
from epd_lab.sim.campaigns.hunt import noticed
from epd_lab.sim.campaigns.parallel import Progress, interrupts, results
from epd_lab.sim.campaigns.runner import SimJob, execute
from epd_lab.sim.cluster import Cluster
from epd_lab.sim.core.process import SimProcess
from epd_lab.sim.run import WAITED_OUT, run
from epd_lab.sim.world import World

STORE = Path(__file__).resolve().parents[3] / "tests" / "sim" / "measured.json"
COMMAND = "python -m epd sim list --measure 20 --write"
MISSED = 0.001
MISSED_BY_FEW = 0.15
MOST = 3  # times the measured seeds: more are run of no drill
UNMEASURED = range(5)  # what CI runs of a drill that nobody has measured yet

Edge = tuple[str, str, str, str]


class Covered:
    """What a run covers: edges, and pairs of them that follow each other in a process."""

    def __init__(self) -> None:
        self.seen: set[Edge | tuple[Edge, Edge]] = set()
        self._last: dict[str, Edge] = {}

    def watch(self, world: World, cluster: Cluster) -> None:
        """A `Prepare` of a run."""
        world.watchers.append(self._note)

    def _note(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        edge = (machine.table.name, source.name, type(event).__name__, target.name)
        self.seen.add(edge)
        if (last := self._last.get(process.name)) is not None:
            self.seen.add((last, edge))
        self._last[process.name] = edge


def ranked(covered: Sequence[set[Edge | tuple[Edge, Edge]]]) -> list[int]:
    """Their indices: who covers most first, then who adds most to those before it."""
    left, order = list(range(len(covered))), []
    known: set[Edge | tuple[Edge, Edge]] = set()
    while left:
        best = max(left, key=lambda n: (len(covered[n] - known), -n))
        left.remove(best)
        order.append(best)
        known |= covered[best]
    return order


def seeds_needed(caught: int, num_seeds: int, missed: float = MISSED) -> int:
    """So many that a bug noticed in `caught` of `num_seeds` is missed less often than `missed`.

    The share is estimated low, as if one seed more had noticed nothing: no bug is certain.
    """
    if not caught:
        return MOST * num_seeds + 1
    return math.ceil(math.log(missed) / math.log(1 - caught / (num_seeds + 1)))


@dataclass(slots=True)
class DrillMeasures:
    """Under `num_seeds` seeds: in how many each drill happened, which noticed each mutant, and the
    order in which they are worth running."""

    num_seeds: int = 0
    fired: dict[str, int] = field(default_factory=dict)  # by drill
    ranked: dict[str, list[int]] = field(default_factory=dict)  # by drill
    caught: dict[tuple[str, str], list[int]] = field(default_factory=dict)  # by drill and mutant

    def seeds(self, drill: str, missed: float = MISSED) -> Sequence[int]:
        """What the tests run of a drill: one waits until timers and tombstones have gone, and each
        mutant is noticed in one."""
        order = self.ranked.get(drill)
        if order is None:
            return UNMEASURED
        needed = self.needed(drill, missed)
        chosen = [*order[:needed], *range(self.num_seeds, needed)]
        if all(seed % WAITED_OUT for seed in chosen):
            chosen[-1] = next(seed for seed in order if seed % WAITED_OUT == 0)
        for caught in self._caught_by(drill):
            if caught and not {*caught} & {*chosen}:
                chosen.append(min(caught, key=order.index))
        return chosen

    def needed(self, drill: str, missed: float) -> int:
        """How many seeds the weakest of its mutants needs."""
        found = [len(seeds) for seeds in self._caught_by(drill)] or [self.num_seeds]
        return max(seeds_needed(count, self.num_seeds, missed) for count in found)

    def _caught_by(self, drill: str) -> list[list[int]]:
        return [seeds for (name, _), seeds in self.caught.items() if name == drill]

    def fired_told(self, drill: str) -> str:
        return f"{self.fired[drill]} of {self.num_seeds}" if drill in self.fired else "not measured"

    def caught_told(self, drill: str, mutant: str) -> str:
        seeds = self.caught.get((drill, mutant))
        return "not measured" if seeds is None else f"{len(seeds)} of {self.num_seeds}"

    def knows(self, task: Count) -> bool:
        """Whether this was counted."""
        if task.mutant:
            return (task.drill, task.mutant) in self.caught
        return task.drill in self.fired

    def missed(self) -> list[str]:
        """Drills that notice what they claim to so seldom that CI cannot run enough seeds."""
        return [
            f"{drill} noticed {mutant} in {len(seeds)} of {self.num_seeds} seeds"
            for (drill, mutant), seeds in self.caught.items()
            if seeds_needed(len(seeds), self.num_seeds) > MOST * self.num_seeds
        ]

    def store(self, path: Path = STORE) -> None:
        """A row per line: a measurement is read, and merged."""
        rows: dict[str, list[list[Any]]] = {
            "fired": [[drill, count] for drill, count in self.fired.items()],
            "ranked": [[drill, seeds] for drill, seeds in self.ranked.items()],
            "caught": [[drill, mutant, seeds] for (drill, mutant), seeds in self.caught.items()],
        }
        parts = [f'"measured by": {json.dumps(COMMAND)}', f'"num_seeds": {self.num_seeds}']
        for name, found in rows.items():
            lines = ",\n".join(f"  {json.dumps(row)}" for row in found)
            parts.append(f'"{name}": [\n{lines}\n]')
        path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")

    @classmethod
    def stored(cls, path: Path = STORE) -> DrillMeasures:
        """The last measurement; an empty one where there is none."""
        if not path.exists():
            return cls()
        found = json.loads(path.read_text(encoding="utf-8"))
        caught = {(drill, mutant): seeds for drill, mutant, seeds in found["caught"]}
        return cls(found["num_seeds"], dict(found["fired"]), dict(found["ranked"]), caught)


@dataclass(frozen=True, slots=True)
class Count:
    """A drill under many seeds, with a mutant or as it is."""

    drill: str
    mutant: str
    num_seeds: int


@dataclass(frozen=True, slots=True)
class MutantCounts:
    """The seeds in which it happened or was noticed; without a mutant, all seeds in their order."""

    seeds: list[int]
    ranked: list[int]


def count(task: Count) -> MutantCounts:
    """Runs in a worker."""
    if task.mutant:
        jobs = [SimJob("drill", task.drill, seed, task.mutant) for seed in range(task.num_seeds)]
        return MutantCounts([job.seed for job in jobs if noticed(execute(job))], [])
    drill, seeds, covered = drills.by_name(task.drill), [], []
    for seed in range(task.num_seeds):
        shown = Covered()
        if drill.fired(run(drill.plan(seed), prepare=shown.watch)):
            seeds.append(seed)
        covered.append(shown.seen)
    return MutantCounts(seeds, ranked(covered))


def measure(
    num_seeds: int, workers: int, known: DrillMeasures | None = None, only: Sequence[str] = ()
) -> DrillMeasures:
    """`known` is kept if it has as many seeds, but for the drills of `only`, which then are all
    that is measured; what is gone is left out.

    Raises KeyError for a drill that is not there, KeyboardInterrupt when it is stopped: half a
    table is of no use.
    """
    measured = (
        known if known is not None and known.num_seeds == num_seeds else DrillMeasures(num_seeds)
    )
    for name in only:
        drills.by_name(name)
    tasks = list(_tasks(num_seeds))
    _keep(measured, [task for task in tasks if task.drill not in only])
    tasks = [t for t in tasks if not measured.knows(t) and (not only or t.drill in only)]
    progress = Progress("measure", len(tasks), "drills and mutants")
    with interrupts(), contextlib.closing(results(count, tasks, workers)) as counts:
        for done, (task, found) in enumerate(zip(tasks, counts, strict=False), 1):
            if task.mutant:
                measured.caught[task.drill, task.mutant] = found.seeds
            else:
                measured.fired[task.drill] = len(found.seeds)
                measured.ranked[task.drill] = found.ranked
            progress.show(done, f"{num_seeds} seeds each")
    return measured


def _keep(measured: DrillMeasures, tasks: Sequence[Count]) -> None:
    """Forget what else was counted."""
    pairs = {(task.drill, task.mutant) for task in tasks}
    measured.caught = {pair: seeds for pair, seeds in measured.caught.items() if pair in pairs}
    measured.fired = {name: n for name, n in measured.fired.items() if (name, "") in pairs}
    measured.ranked = {name: n for name, n in measured.ranked.items() if (name, "") in pairs}


def _tasks(num_seeds: int) -> Iterator[Count]:
    for drill in drills.DRILLS:
        for mutant in ("", *drill.mutants):
            yield Count(drill.name, mutant, num_seeds)
