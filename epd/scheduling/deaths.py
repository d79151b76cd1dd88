"""Inputs at which instances died: how many, for how long that counts, and who may still take them.

Theory of operation
-------------------
An input that ends whatever computes it, a *poison pill*, looks like a run of bad luck: its instance
is lost, and it moves on to the next one.  So deaths are counted by input, and the second one that
counts is the last (`MAX_DEATHS`).  Two by chance are rare, and a third instance would be lost to
each real poison pill.  A death counts only against what that life had at hand (`roles/hands.py`),
not against what waited there.  Restarts and silence beyond the bound count alike, since an input
that hangs its process is poison, too; an instance that left in order counts for nothing.  Lives of
one host that fall silent together have one cause, such as its cable, and count as one death.  A
life that sends again was cut off and not dead: its count is taken back.

What is an input.  An image is its `mm_hash`, whoever asks for it: the hash is of one tenant.  A
request is its content (`roles/gateway/suspects.py`: tokens, images, sampling without the seed), and
not its id, which is new whenever a client sends it again.  What was computed after all is
acquitted: an image when an encoder holds its rows, a request when equal content was answered to its
end.

Before a death is noticed, the instance is silent for a while, and its requests look for another
one.  So an input that one life died of, or that a silent one has at hand, is *barred* while another
has it.  At most two instances are at stake, or one and those of a cut.  Who has it at hand may have
it again, from another request: that puts nobody else at stake.

Bounds: a death is remembered for `REMEMBERED_S`, of `MAX_INPUTS` inputs, the oldest are forgotten.
A gateway that starts anew has forgotten all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from epd.records import HandsList

MAX_DEATHS = 2
REMEMBERED_S = 600.0
MAX_INPUTS = 1024

Life = tuple[str, int]  # name and epoch of an instance
_NOTHING = HandsList()


class Silence(NamedTuple):
    """Of a life that ended without another sign."""

    host_id: str
    since_s: float


class Death(NamedTuple):
    at_s: float
    silence: Silence | None


class Deaths:
    """The books of one gateway; `is_silent`: whether that life does not answer now; `together_s`:
    silences that begin within it begin together."""

    def __init__(
        self, now_s: Callable[[], float], is_silent: Callable[[Life], bool], together_s: float
    ) -> None:
        self._now_s = now_s
        self._is_silent = is_silent
        self._together_s = together_s
        self._at_hand: dict[Life, HandsList] = {}
        self._deaths: dict[str, dict[Life, Death]] = {}  # by input; the latest one last

    def __len__(self) -> int:
        """Inputs that are remembered."""
        self._forget_old()
        return len(self._deaths)

    @property
    def has_doubts(self) -> bool:
        """Whether any input may be barred."""
        busy = (life for life, hands in self._at_hand.items() if hands.images or hands.requests)
        return bool(self._deaths) or any(map(self._is_silent, busy))

    def hold(self, life: Life, hands: HandsList) -> None:
        """A life reports all that it has at hand, with a higher serial each time."""
        if hands.serial > self.held(life).serial:
            self._at_hand[life] = hands

    def held(self, life: Life) -> HandsList:
        """What it reported last."""
        return self._at_hand.get(life, _NOTHING)

    def end(self, life: Life) -> HandsList:
        """That life is over; what it had at hand."""
        return self._at_hand.pop(life, _NOTHING)

    def count(
        self, life: Life, inputs: Iterable[str], silence: Silence | None = None
    ) -> Mapping[str, tuple[Life, ...]]:
        """It died of one of these; returns those that are poison from now on, with the lives."""
        self._forget_old()
        death = Death(self._now_s(), silence)
        poison = {}
        for key in inputs:
            lives = self._deaths.pop(key, {})
            was_poison = len(lives) >= MAX_DEATHS
            if not any(self._have_one_cause(death, other) for other in lives.values()):
                lives = {**lives, life: death}
            self._deaths[key] = lives
            if len(lives) >= MAX_DEATHS and not was_poison:
                poison[key] = tuple(lives)
        while len(self._deaths) > MAX_INPUTS:
            del self._deaths[next(iter(self._deaths))]
        return poison

    def _have_one_cause(self, death: Death, other: Death) -> bool:
        its, others = death.silence, other.silence
        return (
            its is not None
            and others is not None
            and its.host_id == others.host_id
            and abs(its.since_s - others.since_s) <= self._together_s
        )

    def acquit(self, key: str) -> None:
        """It was computed."""
        self._deaths.pop(key, None)

    def forgive(self, life: Life) -> None:
        """It has sent a message again: it did not die."""
        for key, lives in list(self._deaths.items()):
            if lives.pop(life, None) is not None and not lives:
                del self._deaths[key]

    def lives(self, key: str) -> tuple[Life, ...]:
        """Those that died of it."""
        self._forget_old()
        return tuple(self._deaths.get(key, ()))

    def is_suspect(self, key: str) -> bool:
        """Whether a life died of it, or may have."""
        return bool(self.lives(key)) or any(map(self._is_silent, self.holders(key)))

    def is_poison(self, key: str) -> bool:
        return len(self.lives(key)) >= MAX_DEATHS

    def holders(self, key: str) -> tuple[Life, ...]:
        """Those that have it at hand."""
        return tuple(life for life, hands in self._at_hand.items() if key in hands)

    def is_barred(self, key: str, request_id: str = "", life: Life | None = None) -> bool:
        """Whether no further instance may take it now; `request_id`: whose content it is.  `life`:
        or not this one, which may if it has it at hand: then it is none more at stake."""
        holders = self.holders(request_id or key)
        if life in holders:
            return False
        doubtful = {*self.lives(key), *filter(self._is_silent, holders)}
        return bool(doubtful) and len(doubtful.union(holders)) >= MAX_DEATHS

    def may_hedge(self, key: str) -> bool:
        """Whether a second instance may take it besides."""
        return not self.lives(key) and len(self.holders(key)) < MAX_DEATHS

    def _forget_old(self) -> None:
        before_s = self._now_s() - REMEMBERED_S
        while self._deaths:
            key, lives = next(iter(self._deaths.items()))
            if max(one.at_s for one in lives.values()) > before_s:
                break
            del self._deaths[key]
