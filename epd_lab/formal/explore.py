"""Breadth-first search over everything that may happen, in an order that never changes.

Two modes.  `SAFETY`: any step at any moment; no law may break, and quiescence must stay reachable.
`TIMERS_LAST`: nothing fails but messages, and a retry timer fires only when nothing else is left to
happen.  Then all must succeed without a deadline: a hang that only a deadline ends is a
counterexample here, though it breaks no law.

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

from epd_lab.formal.form import Happening
from epd_lab.formal.world import Node, Violation, World

MAX_NODES = 400_000
REPORT_EVERY = 2_000
PROMPT = ("work", "loss", "retry")  # kinds of happenings that there are though nothing fails

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
class Space:
    """All reachable nodes of a world, with the step that first led to each."""

    world: World
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
        world = self.world
        ends_well = world.quiescent if self.mode is Mode.SAFETY else world.succeeded
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
            raise Violation(self.tell(f"no way to {wanted}", self.path(stuck[0]), stuck[0]))

    def tell(self, what: str, story: list[str], node: Node) -> str:
        lines = "\n  ".join(f"{number}. {line}" for number, line in enumerate(story, 1))
        return f"{what}\nafter\n  {lines}\n{self.world.tell(node)}"


@no_collections()
def explore(
    world: World,
    mode: Mode = Mode.SAFETY,
    *,
    limit: int = MAX_NODES,
    progress: Progress | None = None,
) -> Space:
    """Walk over all interleavings.  Raises Violation with the shortest way to a broken law."""
    start = world.initial()
    space = Space(world, mode, {start: None})
    frontier = deque([start])
    while frontier:
        node = frontier.popleft()
        reached = space.edges.setdefault(node, [])
        for happening, after in _outcomes(space, node):
            reached.append(after)
            if after not in space.parents:
                space.parents[after] = (node, happening.name)
                frontier.append(after)
        if len(space.parents) > limit:
            raise AssertionError(f"more than {limit} nodes: the model grew, look why")
        if progress is not None and len(space.edges) % REPORT_EVERY == 0:
            progress(len(space.parents), len(frontier))
    return space


def _outcomes(space: Space, node: Node) -> list[tuple[Happening, Node]]:
    possible = list(space.world.possible(node))
    if space.mode is Mode.SAFETY:
        return [(one, _take(one, node, space)) for one in possible]
    allowed = [one for one in possible if one.kind in PROMPT]
    prompt = [(one, _take(one, node, space)) for one in allowed if one.kind != "retry"]
    happening = [(one, after) for one, after in prompt if after != node]
    if any(one.kind != "loss" for one, _ in happening):
        return happening
    retries = [(one, _take(one, node, space)) for one in allowed if one.kind == "retry"]
    return happening + retries


def _take(happening: Happening, node: Node, space: Space) -> Node:
    try:
        return space.world.take(happening, node)
    except Violation as error:
        story = [*space.path(node), happening.name]
        raise Violation(space.tell(str(error), story, node)) from error
