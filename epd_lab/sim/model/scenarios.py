"""What `epd sim model` searches: each a small configuration, a mode, and how big it must be.

`at_least` keeps a search from becoming vacuous: one that shrank would prove less than it says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from epd_lab.sim.model.embedding import EmbeddingWorld
from epd_lab.sim.model.encoding import EncodingWorld
from epd_lab.sim.model.ends import Scenario
from epd_lab.sim.model.explore import Mode, Progress, Space, explore
from epd_lab.sim.model.generation import GenerationWorld
from epd_lab.sim.model.instance import InstanceWorld
from epd_lab.sim.model.laws import Model, Violation
from epd_lab.sim.model.pair import PairModel
from epd_lab.sim.model.request import RequestWorld
from epd_lab.sim.model.world import World, WorldModel

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
    return Search("transfer", name, partial(PairModel, scenario), at_least, mode)


TRANSFER = (
    _transfer("everything", EVERYTHING, 8_000),  # what the engine is certain of is part of it
    _transfer(
        "unknown outcomes, messages lost for good",
        Scenario(engine_is_certain=False, forgetful=True, **ALIVE),
        3_000,
    ),
    _transfer("kv", Scenario(offers=True, may_die=False), 2_000),
    _transfer("kv in parts", Scenario(offers=True, may_die=False, in_parts=True), 3_000),
    _transfer(
        "kv in parts, unknown outcomes",
        Scenario(offers=True, in_parts=True, engine_is_certain=False, **ALIVE),
        1_000,
    ),
    _transfer("contract drift (F11)", Scenario(rows_granted=3), 3_000),
    _transfer("short commit (F11)", Scenario(commit_is_short=True, may_die=False), 2_000),
    _transfer("messages lost for good", Scenario(forgetful=True, **ALIVE), 3_000),
    _transfer("messages lost for good, kv", Scenario(forgetful=True, offers=True, **ALIVE), 3_000),
    _transfer("declared lost, wrongly", Scenario(forgetful=True, may_die=False), 10_000),
    _transfer("timers last", Scenario(**ALIVE), 10, LAST),
    _transfer("timers last, kv", Scenario(offers=True, **ALIVE), 10, LAST),
    _transfer("timers last, kv in parts", Scenario(offers=True, in_parts=True, **ALIVE), 10, LAST),
    _transfer(
        "timers last, messages lost", Scenario(forgetful=True, max_lost=4, **ALIVE), 100, LAST
    ),
    _transfer(
        "timers last, messages lost, kv",
        Scenario(forgetful=True, max_lost=4, offers=True, **ALIVE),
        100,
        LAST,
    ),
)

AB = ("a", "b")


def _world(
    machine: str,
    name: str,
    begin: Callable[[], World],
    at_least: int,
    last_at_least: int = 0,
) -> tuple[Search, ...]:
    """A configuration in both modes; in the second one too if it can succeed at all."""
    make = partial(WorldModel, begin)
    safety = Search(machine, name, make, at_least)
    if not last_at_least:
        return (safety,)
    return safety, Search(machine, f"timers last, {name}", make, last_at_least, LAST)


EMBEDDING = (
    *_world("embedding", "one room, mortal", partial(EmbeddingWorld, ("a",), ("a",)), 100, 5),
    *_world(
        "embedding",
        "a further room",
        partial(EmbeddingWorld, ("a",), ("a",), ("a2",)),
        1_000,
        5,
    ),
    *_world("embedding", "two requests of one hash", partial(EmbeddingWorld, AB), 8_000, 20),
)
ENCODING = (
    *_world("encoding", "one room, mortal", partial(EncodingWorld, ("a",), ("a",)), 100, 5),
    *_world("encoding", "one room, tiers", partial(EncodingWorld, ("a",), tiers=True), 300, 5),
    *_world("encoding", "two rooms of one hash", partial(EncodingWorld, AB), 4_000, 50),
)
REQUEST = (
    *_world("request", "text, decodes here", RequestWorld, 30, 8),
    *_world("request", "text, KV leaves", partial(RequestWorld, decode_here=False), 30, 6),
    *_world("request", "two items, decodes here", partial(RequestWorld, 2), 50, 10),
    *_world(
        "request", "two items, KV goes away", partial(RequestWorld, 2, decode_here=False), 50, 10
    ),
    *_world("request", "an item, its KV is held", partial(RequestWorld, 1, held=True), 30, 6),
    *_world("request", "KV comes", partial(RequestWorld, remote_kv=True), 20, 5),
    *_world("request", "text, a step ahead", partial(RequestWorld, ahead=True), 100, 10),
    *_world("request", "two items, a step ahead", partial(RequestWorld, 2, ahead=True), 100, 10),
    *_world(
        "request",
        "KV comes, a step ahead",
        partial(RequestWorld, remote_kv=True, ahead=True),
        50,
        5,
    ),
)
GENERATION = (
    *_world("generation", "an attempt with an item", partial(GenerationWorld, 1, 1), 100, 10),
    *_world("generation", "an attempt with two items", partial(GenerationWorld, 2, 1), 200, 15),
    *_world("generation", "two attempts", partial(GenerationWorld, 0, 2), 5_000, 10),
)
INSTANCE = (
    *_world("instance", "two lives", InstanceWorld, 2_000),
    *_world("instance", "a restart", partial(InstanceWorld, replaced=True), 50, 5),
)

SEARCHES = (*TRANSFER, *EMBEDDING, *ENCODING, *REQUEST, *GENERATION, *INSTANCE)
