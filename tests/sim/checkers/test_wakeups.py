"""Who waits in the roles is looked at by the checker of wake-ups, or is named with a reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from epd_lab.sim.checkers import waiters
from epd_lab.sim.drills import by_name
from epd_lab.sim.run import run

EPD = Path(__file__).parents[3] / "epd"
PARTS = "groups/*.py", "roles/**/*.py"
REAL = {"elsewhere.py", "following.py", "processes.py"}  # processes
PATHS = sorted(p for part in PARTS for p in EPD.glob(part) if p.name not in REAL)
PRIMITIVES = ("create_future", "Bell", "Event", "Condition", "Semaphore")
WAITED_IN = (*PRIMITIVES, "LeaseQueue", "Budget", "RunAhead")


def _places(tree: ast.AST, where: str = "") -> Iterator[str]:
    """`Class.attribute` or `Class.method` of whatever is made to be waited in."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _places(node, node.name)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Assign | ast.AnnAssign) and _makes(inner.value):
                    target = inner.targets[0] if isinstance(inner, ast.Assign) else inner.target
                    is_own = isinstance(target, ast.Attribute)
                    yield f"{where}.{target.attr if is_own else node.name}"
        elif isinstance(node, ast.AnnAssign) and "Bell" in ast.unparse(node.annotation):
            yield f"{where}.{ast.unparse(node.target)}"


def _makes(value: ast.expr | None) -> bool:
    called = [n.func for n in ast.walk(value) if isinstance(n, ast.Call)] if value else []
    return any(ast.unparse(func).rsplit(".", 1)[-1] in WAITED_IN for func in called)


def test_every_place_where_somebody_waits_is_looked_at() -> None:
    trees = {p: ast.parse(p.read_text()) for p in PATHS if p.name != "bell.py"}
    found = {place for tree in trees.values() for place in _places(tree)}
    assert {"EncodeRole._ahead", "SendRing._queue", "Stream._news"} <= found  # it sees such places
    named = set(waiters.PLACES) | set(waiters.NOT_LOOKED_AT)
    assert found <= named, "look at it in epd_lab/sim/checkers/waiters.py"
    assert all(hasattr(waiters, name) for name in waiters.PLACES.values())
    assert named <= found, "named, and not there any more"


@pytest.mark.parametrize("seed", [4])
def test_slots_that_a_second_eviction_frees_are_handed_out_at_once(seed: int) -> None:
    """Two wait for slots, and each needs rows of its own to be evicted."""
    drill = by_name("kill-encode-card")
    work = replace(drill.work, num_requests=30, num_images=30, spread_s=0.2)
    assert run(replace(drill, work=work).plan(seed)).violations == []
