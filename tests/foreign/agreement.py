"""What each checker says of each model, and whether they agree; and how long that takes.

The own search is that of `epd sim model`, with the machines that run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from epd_lab.formal.explore import explore
from epd_lab.formal.form import Model
from epd_lab.formal.pair import PAIRS
from epd_lab.formal.world import Violation, World
from tests.foreign.checkers import Found, Spin, check_tla

# Pairs that tla-checker, which is slower, looks at.
TLA_PAIRS = ("PAIR", "PAIR_KV_IN_PARTS_IN_DOUBT", "PAIR_CONTRACT_DRIFT", "PAIR_SHORT_COMMIT")


def own_search(model: Model) -> Found:
    """The states that `epd sim model` counts."""
    try:
        space = explore(World(model))
    except Violation as violation:
        return Found(0, str(violation))
    return Found(len(space.parents), "")


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
    found = {"own": own_search(model)}
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
    if model.nodes[0] != max(states.values()):
        problems.append(f"the model has {model.nodes[0]}, not {states}")
    if len(set(states.values())) != 1:
        problems.append(f"states differ: {states}")
    return Verdict(model.name, states, checked, problems, time.perf_counter() - began_s)
