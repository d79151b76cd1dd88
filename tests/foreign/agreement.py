"""What each checker says of each model, and whether they agree; and how long that takes.

The own search is `epd sim model`'s: over the real machines (tests/foreign/walk.py), or, of both
ends of a room, the searches of `epd sim model transfer` themselves.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from epd_lab.diagrams.models_page import STORE
from epd_lab.formal import PAIRS
from epd_lab.formal.form import Model
from epd_lab.sim.model.explore import explore
from epd_lab.sim.model.laws import Violation
from epd_lab.sim.model.scenarios import TRANSFER
from tests.foreign.checkers import Found, Spin, check_tla
from tests.foreign.concrete import CONCRETE
from tests.foreign.walk import Walked

# Pairs that tla-checker, which is slower, looks at.
TLA_PAIRS = ("PAIR", "PAIR_KV_IN_PARTS_IN_DOUBT", "PAIR_CONTRACT_DRIFT", "PAIR_SHORT_COMMIT")


def own_search(model: Model) -> Found | None:
    """The states that `epd sim model`'s search counts; None for a model that it does not have."""
    if model.name in PAIRS:
        name, _ = PAIRS[model.name]
        search = next((s for s in TRANSFER if s.name == name), None)
        return Found(len(search.run().parents), "") if search is not None else None
    try:
        space = explore(walked(model))
    except Violation as violation:
        return Found(0, str(violation))
    return Found(len(space.parents), "")


def walked(model: Model) -> Walked:
    return Walked(model, CONCRETE[model.parts[0].table.name])


def has_as_many(model: Model, states: int) -> bool:
    """Whether it has as many states as docs/drills/models.md says."""
    known: dict[str, int] = json.loads(STORE.read_text(encoding="utf-8"))
    return known.get(model.name) == states


def suits_tla(model: Model) -> bool:
    return model.name not in PAIRS or model.name in TLA_PAIRS


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one model; `problems` is empty if all is as it should be."""

    name: str
    states: dict[str, int]
    promises: int
    problems: list[str]
    wall_s: float


def judge(model: Model, folder: Path, *, spin: bool = True, tla: bool = True) -> Verdict:
    """Ask the checkers that are wanted, and the own search."""
    began_s = time.perf_counter()
    found: dict[str, Found] = {}
    own = own_search(model)
    if own is not None:
        found["own"] = own
    problems: list[str] = []
    checked = 0
    if spin:
        checker = Spin(model, folder / "spin")
        found["spin"] = checker.laws()
        for promise in model.promises:
            checked += 1
            if error := checker.promise(promise).error:
                problems.append(f"spin: {promise.name} fails: {error}")
            if not checker.promise(promise, fairly=False).error:
                problems.append(f"{promise.name} needs no fairness: say so")
            idle = [j.name for j in promise.judgements if not checker.promise(j).error]
            problems += [f"{name} holds: that rest is needed no more" for name in idle]
    if tla and suits_tla(model):
        found["tla"] = check_tla(model, folder / "tla")
    problems += [f"{who}: {said.error}" for who, said in found.items() if said.error]
    states = {who: said.states for who, said in found.items()}
    if not has_as_many(model, max(states.values())):
        problems.append(f"{STORE.name} does not say {states}")
    if len(set(states.values())) != 1:
        problems.append(f"states differ: {states}")
    return Verdict(model.name, states, checked, problems, time.perf_counter() - began_s)
