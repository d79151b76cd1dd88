"""The hunt: measure once what reaches what, then try each mutant against what is nearest to it.

Nearest are the tests and runs that execute the changed statement, or a changed cell of a table; of
those the module's own are chosen, then the cheapest, as many as the budget of processor time
allows.  The cheapest run first, and the first that fails ends it.  So does one that takes ten times
as long as it should, or dies.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.mutation import judging, planting, reach
from tests.mutation.forks import Fork, Tell, forked
from tests.mutation.mutants import Mutant, modules
from tests.mutation.reach import MARKING, Reach

RUNS = "tests/mutation/runs.py::"
BEFORE = "importing or collecting"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a mutant.  `caught_by`: a test, a run, or importing; empty: it survived."""

    mutant: Mutant
    caught_by: str
    why: str
    num_tried: int


@dataclass(frozen=True, slots=True)
class Hunt:
    """Where mutants are planted, and what may catch them.

    `targets` and `tests`: paths from the root of the repository; `libraries`: what is imported
    once, before the processes part.
    """

    targets: tuple[str, ...]
    tests: tuple[str, ...]
    libraries: tuple[str, ...]
    scratch: Path
    jobs: int
    budget_s: float

    # --- measuring --------------------------------------------------------------------------------

    def reach(self, file: Path) -> Reach:
        """As measured before on the same source, or measured now."""
        self._import_libraries()
        source = reach.digest(repr((self.targets, self.tests)))
        known = Reach.load(file, source)
        if known is None:
            known = self._measured()
            known.save(file, source)
        return known

    def _measured(self) -> Reach:
        found = Reach()
        for fork in forked(range(self.jobs), self.jobs, self._measure):
            for said in fork.told:
                _take_in(found, said)
            if fork.cut or not fork.told:
                raise RuntimeError(f"measuring did not end: {fork.told[-1:]}")
        return found

    def _measure(self, share: int, tell: Tell) -> None:
        marked = set(modules(self.targets))

        def tree_of(path: str) -> Any:
            return MARKING.instrumented(path) if path in marked else None

        def run(items: list[pytest.Item]) -> None:
            tell({"at_import": MARKING.take(), "rows": reach.table_rows(), "limit_s": 600})
            MARKING.watch_tables()
            for item, plugin, cost_s in judging.outcomes(items[share :: self.jobs]):
                said = {"item": item.nodeid, "failure": plugin.failure, "limit_s": 600}
                tell({**said, "cost_s": cost_s, "places": MARKING.take(), **plugin.properties})

        sys.meta_path.insert(0, planting.Importer(tree_of))
        judging.session(self.tests, self.scratch, run)

    def _import_libraries(self) -> None:
        for name in self.libraries:
            importlib.import_module(name)

    # --- trying -----------------------------------------------------------------------------------

    def run(self, mutants: Iterable[Mutant], known: Reach, hear: Callable[[Verdict], None]) -> None:
        """Try each; `hear` is told of each verdict, as it is known."""
        self._import_libraries()
        tried: list[Mutant] = []
        for mutant in mutants:
            at = _place(mutant)
            if mutant.in_body and at not in known.places and at not in known.at_import:
                hear(Verdict(mutant, "", "nothing reaches it", 0))
            else:
                tried.append(mutant)
        for fork in forked(tried, self.jobs, lambda mutant, tell: self._anew(mutant, tell, known)):
            hear(_verdict(fork))

    def _anew(self, mutant: Mutant, tell: Tell, known: Reach) -> None:
        """In a process that has imported nothing that could be changed."""
        planting.serve(mutant)
        names = self._nearest(mutant, known)
        files = tuple(dict.fromkeys(name.partition("::")[0] for name in names))

        def run(items: list[pytest.Item]) -> None:
            chosen = {item.nodeid: item for item in items}
            judging.judge([chosen[n] for n in names if n in chosen], known, self.budget_s, tell)

        if names:
            judging.session(files, self.scratch, run)
        else:
            tell({"survived": True})

    def _nearest(self, mutant: Mutant, known: Reach) -> list[str]:
        """Raises what importing the mutant raises."""
        at = _place(mutant)
        if at in known.places:
            return self._affordable(known.items([at]), known, mutant)
        importlib.import_module(mutant.module)
        rows = reach.table_rows()
        changed = [cell for cell in known.rows if rows.get(cell, "") != known.rows[cell]]
        of_loaded = {cell.partition(":")[0] for cell in rows}
        changed = [cell for cell in changed if cell.partition(":")[0] in of_loaded]
        if changed:
            return self._affordable(known.items(changed), known, mutant)
        return self._affordable(known.items(known.within(mutant.path)), known, mutant)

    def _affordable(self, names: list[str], known: Reach, mutant: Mutant) -> list[str]:
        """Half of the budget is for tests, half for runs.  Tests of the module's own come before
        cheaper ones that only pass through it; the first seed of each drill comes before the second
        of any."""
        own = f"/test_{Path(mutant.path).stem}.py::"
        tests = sorted((n for n in names if RUNS not in n), key=lambda name: own not in name)
        runs = sorted((n for n in names if RUNS in n), key=lambda n: (_round(n), known.costs_s[n]))
        chosen: list[str] = []
        for kind in (tests, runs):
            total_s = 0.0
            for name in kind:
                total_s += known.costs_s[name]
                if total_s <= self.budget_s / 2:
                    chosen.append(name)
        return sorted(chosen, key=lambda name: (known.costs_s[name], name))


def _round(run: str) -> int:
    """The seed of a drill's run; of the swarm, forty seeds count as one."""
    title, _, seed = run.partition("[")[2].removesuffix("]").rpartition(" ")
    return int(seed) // (40 if title == "swarm" else 1)


def _place(mutant: Mutant) -> str:
    return f"{mutant.path}:{mutant.statement}"


def _take_in(found: Reach, said: dict[str, Any]) -> None:
    if "at_import" in said:
        found.at_import = dict.fromkeys(said["at_import"], 1)
        found.rows.update(said["rows"])
    elif "error" in said:
        raise RuntimeError(f"measuring failed: {said['error']}")
    elif said["failure"]:
        print(f"left out, it fails unchanged: {said['item']}: {said['failure']}", file=sys.stderr)
    else:
        found.note(said["item"], said["cost_s"], said["places"])
        if "fired" in said:
            found.fired[said["item"]] = bool(said["fired"])


def _verdict(fork: Fork[Mutant]) -> Verdict:
    """An exception, or a death, before the first test is the mutant's."""
    tried = [said["item"] for said in fork.told if "item" in said]
    for said in fork.told:
        if "caught" in said:
            return Verdict(fork.task, said["caught"], said["why"], len(tried))
        if "survived" in said:
            return Verdict(fork.task, "", "", len(tried))
        if "error" in said and tried:
            raise RuntimeError(f"{fork.task.key}: {said['error']}")
        if "error" in said:
            return Verdict(fork.task, BEFORE, said["error"].strip().split("\n")[-1], 0)
    if not fork.cut:
        raise RuntimeError(f"{fork.task.key}: no verdict: {fork.told[-1:]}")
    return Verdict(fork.task, tried[-1] if tried else BEFORE, "it did not end", len(tried))


def scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="mutation-")
