"""What processes learn of the ends of others: of those on other hosts only by asking."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from epd.transport.base import Life
from epd_lab.sim.core.process import SimProcess

TOO_SLOW = 5.0  # a process that takes so many times as long does not answer in time


class Witnesses:
    """`lives`: all that there have been.  `is_cut`: whether messages of one instance do not get to
    another."""

    def __init__(self, lives: Mapping[Life, SimProcess]) -> None:
        self._lives = lives
        self.is_cut: Callable[[str, str], bool] = lambda one, other: False
        self._cut_short: set[tuple[Life, Life]] = set()  # owners, and writers that died in a write

    def has_ended(self, life: Life, *, attested: bool) -> bool:
        """By the kernel, which shows a process, though that may go on as a later epoch; or attested
        by that.  Raises RuntimeError if it lives, and somebody takes it for ended."""
        one = self._lives.get(life)
        if one is not None and one.alive and attested:
            raise RuntimeError(f"{one.name} lives, and is taken for ended")
        if one is None or attested:
            return one is not None
        return not any(other.alive and other.pid == one.pid for other in self._lives.values())

    def died_in_a_write(self, writer: Life, owner: Life) -> None:
        self._cut_short.add((owner, writer))

    def answers(self, asker: SimProcess, life: Life) -> bool:
        """Whether this life answers in time."""
        peer = self._lives.get(life)
        if peer is None or not peer.runs or peer.slowness >= TOO_SLOW:
            return False
        one, other = asker.instance_id, peer.instance_id
        return not (self.is_cut(one, other) or self.is_cut(other, one))

    def lacks(self, asker: SimProcess, writer: Life) -> bool:
        """The writer died in a write to the asker, and no later life of that instance, which is of
        its host, answers and attests it."""
        if ((asker.instance_id, asker.epoch), writer) not in self._cut_short:
            return False
        later = (life for life in self._lives if life[0] == writer[0] and life[1] > writer[1])
        return not any(self.answers(asker, life) for life in later)
