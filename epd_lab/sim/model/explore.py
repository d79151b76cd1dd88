"""Breadth-first search over everything that may happen, in an order that never changes.

Two modes.  `SAFETY`: any step at any moment; no law may break, and quiescence must stay reachable.
`TIMERS_LAST`: nothing fails, messages may be lost a few times, and a retry timer fires only when
nothing else is left to happen; then no deadline may be needed, and all must succeed: a hang that
only a deadline ends is a counterexample here, though it breaks no law.

The first way found to a node is a shortest one, and steps are tried in a fixed order, so a
counterexample is the same in every run.
"""

from __future__ import annotations

import contextlib
import gc
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic

from epd_lab.sim.model.laws import Model, Node, Step, Violation

MAX_NODES = 400_000
REPORT_EVERY = 2_000
PROMPT = ("message", "work", "loss", "retry")  # kinds of steps that happen though nothing fails

Progress = Callable[[int, int], None]
"""Called now and then with the number of nodes known, and of those not yet looked at."""


class Mode(Enum):
    """Which steps are taken, and what every path has to come to."""

    SAFETY = "safety"
    TIMERS_LAST = "timers last, all must succeed"


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """What a search makes it keeps: looking for garbage there takes longer than the search."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclass(slots=True)
class Space(Generic[Node]):
    """All reachable nodes of a model, with the step that first led to each."""

    model: Model[Node]
    mode: Mode
    parents: dict[Node, tuple[Node, str] | None] = field(default_factory=dict)
    edges: dict[Node, list[Node]] = field(default_factory=dict)

    @property
    def num_edges(self) -> int:
        return sum(map(len, self.edges.values()))

    def path(self, node: Node) -> list[str]:
        """The shortest way to `node`."""
        steps: list[str] = []
        while (parent := self.parents[node]) is not None:
            node, step = parent
            steps.append(step)
        return steps[::-1]

    @no_collections()
    def stuck(self) -> list[Node]:
        """Nodes from which no continuation ends well; the nearest first."""
        model = self.model
        ends_well = model.quiescent if self.mode is Mode.SAFETY else model.succeeded
        back: dict[Node, list[Node]] = {}
        for source, targets in self.edges.items():
            for target in targets:
                back.setdefault(target, []).append(source)
        frontier = [node for node in self.parents if ends_well(node)]
        good = set(frontier)
        while frontier:
            for source in back.get(frontier.pop(), ()):
                if source not in good:
                    good.add(source)
                    frontier.append(source)
        return [node for node in self.parents if node not in good]

    def require_good_ends(self) -> None:
        """Raises Violation with the shortest way into a node that cannot end well."""
        stuck = self.stuck()
        if stuck:
            wanted = "quiescence" if self.mode is Mode.SAFETY else "success"
            raise Violation(_told(f"no way to {wanted}", self.path(stuck[0]), stuck[0]))


@no_collections()
def explore(
    model: Model[Node],
    mode: Mode = Mode.SAFETY,
    *,
    limit: int = MAX_NODES,
    progress: Progress | None = None,
) -> Space[Node]:
    """Walk over all interleavings.  Raises Violation with the shortest way to a broken law."""
    start = model.initial()
    space = Space(model, mode, {start: None})
    frontier = deque([start])
    while frontier:
        node = frontier.popleft()
        reached = space.edges.setdefault(node, [])
        for step, after in _outcomes(space, node):
            reached.append(after)
            if after not in space.parents:
                space.parents[after] = (node, step.name)
                frontier.append(after)
        if len(space.parents) > limit:
            raise AssertionError(f"more than {limit} nodes: the model grew, look why")
        if progress is not None and len(space.edges) % REPORT_EVERY == 0:
            progress(len(space.parents), len(frontier))
    return space


def _outcomes(space: Space[Node], node: Node) -> list[tuple[Step[Node], Node]]:
    steps = space.model.steps(node)
    if space.mode is Mode.SAFETY:
        return [(step, _take(step, node, space)) for step in steps]
    allowed = [step for step in steps if step.kind in PROMPT]
    prompt = [(s, _take(s, node, space)) for s in allowed if s.kind != "retry"]
    happening = [(step, after) for step, after in prompt if after != node]
    if any(step.kind != "loss" for step, _ in happening):
        return happening
    retries = [(s, _take(s, node, space)) for s in allowed if s.kind == "retry"]
    return happening + retries


def _take(step: Step[Node], node: Node, space: Space[Node]) -> Node:
    try:
        return step.run()
    except Exception as error:
        story = [*space.path(node), step.name]
        raise Violation(_told(str(error), story, node)) from error


def _told(what: str, story: list[str], node: object) -> str:
    lines = "\n  ".join(f"{number}. {line}" for number, line in enumerate(story, 1))
    return f"{what}\nafter\n  {lines}\n{node}"
