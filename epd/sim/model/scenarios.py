"""What `epd sim model` searches: each a small configuration, a mode, and how big it must be.

`at_least` keeps a search from becoming vacuous: one that shrank would prove less than it says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from epd.sim.model.explore import Mode, Progress, Space, explore
from epd.sim.model.laws import Model, Violation
from epd.sim.model.pair import PairModel, Scenario

ALIVE = {"may_die": False, "may_be_declared_lost": False}
EVERYTHING = Scenario(engine_is_certain=False)
LAST = Mode.TIMERS_LAST


@dataclass(frozen=True, slots=True)
class Search:
    """One exhaustive search; `machine` is what `epd sim model` calls it."""

    machine: str
    name: str
    make: Callable[[], Model[Any]]
    at_least: int
    mode: Mode = Mode.SAFETY

    def run(self, progress: Progress | None = None) -> Space[Any]:
        """Raises Violation with the shortest counterexample."""
        space = explore(self.make(), self.mode, progress=progress)
        space.require_good_ends()
        if len(space.parents) < self.at_least:
            raise Violation(f"only {len(space.parents)} nodes: the search shrank, look why")
        return space


def _transfer(name: str, scenario: Scenario, at_least: int, mode: Mode = Mode.SAFETY) -> Search:
    return Search("transfer", name, lambda: PairModel(scenario), at_least, mode)


TRANSFER = (
    _transfer("everything", EVERYTHING, 10_000),  # what the engine is certain of is part of it
    _transfer(
        "unknown outcomes, words lost for good",
        Scenario(engine_is_certain=False, forgetful=True, **ALIVE),
        3_000,
    ),
    _transfer("kv", Scenario(offers=True, may_die=False), 3_000),
    _transfer("contract drift (F11)", Scenario(rows_granted=3), 5_000),
    _transfer("short commit (F11)", Scenario(commit_is_short=True, may_die=False), 3_000),
    _transfer("words lost for good", Scenario(forgetful=True, **ALIVE), 3_000),
    _transfer("words lost for good, kv", Scenario(forgetful=True, offers=True, **ALIVE), 3_000),
    _transfer("declared lost, wrongly", Scenario(forgetful=True, may_die=False), 10_000),
    _transfer("timers last", Scenario(**ALIVE), 10, LAST),
    _transfer("timers last, kv", Scenario(offers=True, **ALIVE), 10, LAST),
    _transfer("timers last, words lost", Scenario(forgetful=True, max_lost=4, **ALIVE), 100, LAST),
    _transfer(
        "timers last, words lost, kv",
        Scenario(forgetful=True, max_lost=4, offers=True, **ALIVE),
        100,
        LAST,
    ),
)

SEARCHES = TRANSFER
