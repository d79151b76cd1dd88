"""What `epd sim model` searches: every model, and what succeeds in both modes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from epd_lab.formal import models
from epd_lab.formal.explore import Mode, Progress, Space, explore
from epd_lab.formal.form import Model
from epd_lab.formal.world import Violation, World


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
        known = world_of(self.name).model.nodes[self.mode is Mode.TIMERS_LAST]
        if len(space.parents) != known:
            raise Violation(f"{len(space.parents)} nodes; its model has {known}: look why")
        return space


SEARCHES = (
    *(Search(name) for name in _by_name()),
    *(Search(name, Mode.TIMERS_LAST) for name, model in _by_name().items() if model.succeeds),
)
