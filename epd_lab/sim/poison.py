"""An input that kills whoever computes it, and what each process computes.

A fault of this kind arms: the first image, or prompt, that an engine computes from then on is the
pill.  Whoever computes it later dies as well, when the work would end, and with it all else that
the process had at hand; it is started anew.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

from epd.engine.base import DeviceLost, EngineError, StepResult, StepSequence
from epd_lab.sim.process import SimProcess

Kill = Callable[[SimProcess], None]
Step = asyncio.Future[StepResult]


def request_of(key: str) -> str:
    """Of an attempt's key."""
    return key.partition("/")[0]


def both(*calls: Callable[[], None]) -> Callable[[], None]:
    def call_all() -> None:
        for call in calls:
            call()

    return call_all


class Poison:
    """Of one world."""

    def __init__(self) -> None:
        self.deaths: dict[str, list[str]] = {}  # by pill, in order: an image's name, a request's id
        self._kill: dict[str, Kill] = {}  # by kind: "image", "prompt", "decode"
        self._kinds: dict[str, str] = {}  # of pills
        self._at_hand: defaultdict[str, Counter[str]] = defaultdict(Counter)  # by process

    def arm(self, kind: str, kill: Kill) -> None:
        self._kill[kind] = kill
        self._kinds.setdefault(kind, "")

    def disarm(self) -> None:
        self._kill.clear()

    @contextlib.contextmanager
    def work(self, process: SimProcess, keys: list[str]) -> Iterator[Callable[[], None]]:
        """A call of an engine with these, which has them at hand from what this gives."""
        begun: list[str] = []

        def begin() -> None:
            begun.extend(keys)
            self._at_hand[process.name].update(keys)

        try:
            yield begin
        finally:
            self._at_hand[process.name].subtract(begun)

    def step(
        self, process: SimProcess, batch: Sequence[StepSequence], launch: Callable[[], Step]
    ) -> Step:
        """What is in a step until it is over; what a device was lost with stays: its process ends
        with that."""
        keys = [request_of(sequence.request_id) for sequence in batch]
        at_hand = self._at_hand[process.name]
        at_hand.update(keys)
        over = launch()

        def is_over(step: Step) -> None:
            if step.cancelled() or not isinstance(step.exception(), DeviceLost):
                at_hand.subtract(keys)

        over.add_done_callback(is_over)
        return over

    def at_hand(self, name: str) -> list[str]:
        """What a process computes, or computed when it died."""
        return [key for key, count in self._at_hand[name].items() if count > 0]

    def meet_in_step(self, process: SimProcess, sequence: StepSequence) -> None:
        """Of who does nothing but decode it is the first step, of others the first chunk."""
        decodes = process.instance_id.startswith("d")
        is_first = sequence.output_index == 1 if decodes else sequence.output_index <= 0
        kind, key = "decode" if decodes else "prompt", request_of(sequence.request_id)
        self.meet(process, kind, key, is_first=is_first)

    def meet(self, process: SimProcess, kind: str, key: str, *, is_first: bool = True) -> None:
        """A computed input, for the first time there; raises EngineError if it is a pill, which
        nobody lives to see."""
        if kind not in self._kill:
            return
        if is_first and not self._kinds[kind]:
            self._kinds[kind] = key
        if self._kinds[kind] == key:
            self.deaths.setdefault(key, []).append(process.name)
            self._kill[kind](process)
            raise EngineError("this input ends its process")
