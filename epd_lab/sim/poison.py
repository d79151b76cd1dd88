"""An input that kills whoever computes it, and what each process computes.

A fault of this kind arms: the first image, or prompt, that an engine computes from then on is the
pill.  Whoever computes it later dies as well, when the work would end, and with it all else that
the process had at hand; it is started anew.  The ranks of a group are one life: its leader has at
hand what any of them still computes, and what they have left apart, of which the group ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

from epd.engine.base import DeviceLost, EngineError, StepResult, StepSequence
from epd.keys import request_of
from epd.records import TokenLogprobs
from epd_lab.sim.core.process import SimProcess

Kill = Callable[[SimProcess], None]
Step = asyncio.Future[StepResult]


def content_of(key: str) -> str:
    """What is computed: an attempt's request, or an image."""
    return request_of(key) or key


def both(*calls: Callable[[], None]) -> Callable[[], None]:
    def call_all() -> None:
        for call in calls:
            call()

    return call_all


class Poison:
    """Of one world."""

    def __init__(self) -> None:
        self.deaths: dict[str, dict[str, None]] = {}  # by pill (an image's name, a request's id)
        self._kill: dict[str, Kill] = {}  # by kind: "image", "prompt", "decode"
        self._kinds: dict[str, str] = {}  # of pills
        self._at_hand: defaultdict[str, Counter[str]] = defaultdict(Counter)  # by process
        self._yielded: defaultdict[str, set[str]] = defaultdict(set)  # attempts, by process
        self._left_s: defaultdict[str, dict[str, float]] = defaultdict(dict)  # when, the last time

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
        except DeviceLost:
            begun.clear()  # it ends with them
            raise
        finally:
            self._leave(process, begun)

    def step(
        self, process: SimProcess, batch: Sequence[StepSequence], launch: Callable[[], Step]
    ) -> Step:
        """The sequences of a step until it is over, or until an earlier one gave a token.  Those
        with which a device was lost stay: its process ends with them."""
        keys = [sequence.request_id for sequence in batch]
        self._at_hand[process.name].update(keys)

        def is_over(step: Step) -> None:
            error = asyncio.CancelledError() if step.cancelled() else step.exception()
            if error is None:
                given = zip(keys, step.result().outcomes, strict=True)
                tokens = (key for key, one in given if isinstance(one, TokenLogprobs | tuple))
                self._yielded[process.name].update(tokens)
            if not isinstance(error, DeviceLost):
                self._leave(process, keys)

        try:
            over = launch()
        except DeviceLost:
            raise
        except Exception:
            self._leave(process, keys)
            raise
        over.add_done_callback(is_over)
        return over

    def _leave(self, process: SimProcess, keys: Sequence[str]) -> None:
        self._at_hand[process.name].subtract(keys)
        now_s = asyncio.get_running_loop().time()
        self._left_s[process.name].update((content_of(key), now_s) for key in keys)

    def at_hand(self, name: str, since_s: float = math.inf) -> set[str]:
        """What a process computes, or computed when it died, and had yielded nothing of; and what
        left after that time."""
        yielded = self._yielded[name]
        counts = self._at_hand[name].items()
        left = {key for key, left_s in self._left_s[name].items() if left_s >= since_s}
        return left | {content_of(key) for key, n in counts if n > 0 and key not in yielded}

    def meet_in_step(self, process: SimProcess, sequence: StepSequence) -> None:
        """Of who does nothing but decode it is the first step, of others the first chunk."""
        decodes = process.instance_id.startswith("d")
        is_first = sequence.output_index == 1 if decodes else sequence.output_index <= 0
        kind, key = "decode" if decodes else "prompt", content_of(sequence.request_id)
        self.meet(process, kind, key, is_first=is_first)

    def meet(self, process: SimProcess, kind: str, key: str, *, is_first: bool = True) -> None:
        """A computed input, for the first time there; raises EngineError if it is a pill, which
        nobody lives to see."""
        if kind not in self._kill:
            return
        if is_first and not self._kinds[kind]:
            self._kinds[kind] = key
        if self._kinds[kind] == key:
            leader = process.instance_id.partition(".")[0]
            self.deaths.setdefault(key, {})[f"{leader}:{process.epoch}"] = None
            self._kill[kind](process)
            raise EngineError("this input ends its process")
