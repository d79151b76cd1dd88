"""What `epd sim model` searches: every model, and what succeeds in both modes.

The number of nodes is kept: a search that shrank would prove less than it says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from epd_lab.formal import models
from epd_lab.formal.explore import Mode, Progress, Space, explore
from epd_lab.formal.form import Model
from epd_lab.formal.world import Violation, World

STORE = Path(__file__).with_name("states.json")


@cache
def counted() -> dict[str, int]:
    """The nodes of each search, by its title."""
    known: dict[str, int] = json.loads(STORE.read_text(encoding="utf-8"))
    return known


@cache
def _by_name() -> Mapping[str, Model]:
    return {model.name: model for model in models()}


@cache
def world_of(name: str) -> World:
    """The world of a model, which is made but once."""
    return World(_by_name()[name])


@dataclass(frozen=True, slots=True)
class Search:
    """One exhaustive search of a model, in a mode."""

    name: str
    mode: Mode = Mode.SAFETY

    @property
    def title(self) -> str:
        return self.name if self.mode is Mode.SAFETY else f"{self.name}, timers last"

    @property
    def machine(self) -> str:
        """What `epd sim model` calls it: a machine, or the pair of both ends of a room."""
        first, *others = _by_name()[self.name].parts
        return "pair" if others else first.table.name.lower()

    def run(self, progress: Progress | None = None) -> Space:
        """Raises Violation with the shortest counterexample."""
        space = explore(world_of(self.name), self.mode, progress=progress)
        space.require_good_ends()
        known = counted().get(self.title)
        if len(space.parents) != known:
            raise Violation(f"{len(space.parents)} nodes; {STORE.name} has {known}: look why")
        return space


SEARCHES = (
    *(Search(name) for name in _by_name()),
    *(Search(name, Mode.TIMERS_LAST) for name, model in _by_name().items() if model.succeeds),
)
