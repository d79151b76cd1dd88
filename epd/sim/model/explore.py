"""Breadth-first search over everything that may happen, in an order that never changes.

Two modes.  `SAFETY`: any step at any moment; no law may break, and quiescence must stay reachable.
`TIMERS_LAST`: nothing fails, words may be lost a few times, and a retry timer fires only when
nothing else is left to happen; then no deadline may be needed, and all must succeed: a hang that
only a deadline ends is a counterexample here, though it breaks no law.

The first way found to a pair is a shortest one, and steps are tried in a fixed order, so a
counterexample is the same in every run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from epd.sim.model.pair import Pair, PairModel, Step, Violation, delivered, quiescent

MAX_PAIRS = 400_000
REPORT_EVERY = 2_000

Progress = Callable[[int, int], None]
"""Called now and then with the number of pairs known, and of those not yet looked at."""


class Mode(Enum):
    """Which steps are taken, and what every path has to come to."""

    SAFETY = "safety"
    TIMERS_LAST = "timers last, all must succeed"


@dataclass(slots=True)
class Space:
    """All reachable pairs, with the step that first led to each."""

    mode: Mode = Mode.SAFETY
    parents: dict[Pair, tuple[Pair, str] | None] = field(default_factory=dict)
    edges: dict[Pair, list[Pair]] = field(default_factory=dict)

    @property
    def num_edges(self) -> int:
        return sum(map(len, self.edges.values()))

    def path(self, pair: Pair) -> list[str]:
        """The shortest way to `pair`."""
        steps: list[str] = []
        while (parent := self.parents[pair]) is not None:
            pair, step = parent
            steps.append(step)
        return steps[::-1]

    def stuck(self) -> list[Pair]:
        """Pairs from which no continuation ends well; the nearest first."""
        good_end = quiescent if self.mode is Mode.SAFETY else delivered
        back: dict[Pair, list[Pair]] = {}
        for source, targets in self.edges.items():
            for target in targets:
                back.setdefault(target, []).append(source)
        frontier = [pair for pair in self.parents if good_end(pair)]
        good = set(frontier)
        while frontier:
            for source in back.get(frontier.pop(), ()):
                if source not in good:
                    good.add(source)
                    frontier.append(source)
        return [pair for pair in self.parents if pair not in good]

    def require_good_ends(self) -> None:
        """Raises Violation with the shortest way into a pair that cannot end well."""
        stuck = self.stuck()
        if stuck:
            wanted = "quiescence" if self.mode is Mode.SAFETY else "delivery"
            raise Violation(_told(f"no way to {wanted}", self.path(stuck[0]), stuck[0]))


def explore(
    model: PairModel,
    mode: Mode = Mode.SAFETY,
    *,
    limit: int = MAX_PAIRS,
    progress: Progress | None = None,
) -> Space:
    """Walk over all interleavings.  Raises Violation with the shortest way to a broken law."""
    start = model.initial()
    space = Space(mode, {start: None})
    frontier = deque([start])
    while frontier:
        pair = frontier.popleft()
        reached = space.edges.setdefault(pair, [])
        for step, after in _outcomes(model, pair, space):
            reached.append(after)
            if after not in space.parents:
                space.parents[after] = (pair, step.name)
                frontier.append(after)
        if len(space.parents) > limit:
            raise AssertionError(f"more than {limit} pairs: the model grew, look why")
        if progress is not None and len(space.edges) % REPORT_EVERY == 0:
            progress(len(space.parents), len(frontier))
    return space


def _outcomes(model: PairModel, pair: Pair, space: Space) -> list[tuple[Step, Pair]]:
    if space.mode is Mode.SAFETY:
        return [(step, _take(step, pair, space)) for step in model.steps(pair)]
    allowed = [step for step in model.steps(pair) if step.kind in ("word", "work", "loss", "retry")]
    prompt = [(s, _take(s, pair, space)) for s in allowed if s.kind != "retry"]
    happening = [(step, after) for step, after in prompt if after != pair]
    if any(step.kind != "loss" for step, _ in happening):
        return happening
    retries = [(s, _take(s, pair, space)) for s in allowed if s.kind == "retry"]
    return happening + retries


def _take(step: Step, pair: Pair, space: Space) -> Pair:
    try:
        return step.run()
    except Exception as error:
        story = [*space.path(pair), step.name]
        raise Violation(_told(str(error), story, pair)) from error


def _told(what: str, story: list[str], pair: Pair) -> str:
    lines = "\n  ".join(f"{number}. {line}" for number, line in enumerate(story, 1))
    return f"{what}\nafter\n  {lines}\n{pair}"
