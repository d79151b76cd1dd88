"""What the engines of an instance have at hand, reported to its gateway before they begin.

Theory of operation
-------------------
A gateway cannot ask a dead process what it died of, and what was sent there is no answer: most of
it waited.  So the instance reports in advance.  `Hands` lists the inputs that its engines compute
now and have yielded nothing of.  An image is on a thread that decodes it, or in a batch of the
tower.  A request is in a step, until a token of it was computed here.  `AtHand` carries the whole
list.  It leaves ahead of the work whenever something enters.  Each heartbeat brings the list, too
(`Load.hands`).  So of the inputs that have left, a death counts at most against those since the
last beat without a token at the gateway.  So there is about one message per step or batch that
begins with something new, and none while the same requests decode.  It needs no file on the host of
the dead, holds for a process that hangs, too, and is the same in simulation.  The bus's own thread
sends it, so it outlives a process that dies a moment later.

An input at which an instance died (`scheduling/deaths.py`) arrives as a *suspect*.  Suspects are
computed one at a time, by all engines of an instance together.  The next death then has one
suspect, and no input dies twice beside a poison pill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar


class Suspect(Protocol):
    """A request that an instance died of, or may have."""

    @property
    def request_id(self) -> str: ...

    @property
    def has_yielded(self) -> bool: ...

    @property
    def is_due(self) -> bool: ...


T = TypeVar("T", bound=Suspect)


class Hands:
    """Of one instance."""

    def __init__(self) -> None:
        self._images: dict[str, None] = {}
        self._requests: tuple[str, ...] = ()
        self._suspects = ("", "")  # an image, and a request: one of them at most
        self.on_taken: Callable[[], None] = lambda: None
        self.on_free: list[Callable[[], None]] = []

    @property
    def images(self) -> tuple[str, ...]:
        return tuple(self._images)

    @property
    def requests(self) -> tuple[str, ...]:
        return self._requests

    def take(self, images: Sequence[str]) -> None:
        """The tower, or a thread, begins with them when this returns."""
        self._images.update(dict.fromkeys(images))
        self.on_taken()

    def leave(self, images: Sequence[str]) -> None:
        for image in images:
            self._images.pop(image, None)

    def hold(self, requests: tuple[str, ...], suspect: str = "") -> None:
        """These are in the steps under way, and one of them may be a suspect."""
        if requests == self._requests:
            return
        has_new = not set(requests).issubset(self._requests)
        self._requests = requests
        self._replace(self._suspects[0], suspect)
        if has_new:
            self.on_taken()

    def may_take(self, suspect: str) -> bool:
        """Whether no other suspect is at hand."""
        return not any(self._suspects) or suspect in self._suspects

    def passed_over(self, suspects: dict[str, T]) -> list[str]:
        """All but the one whose turn it is to be computed; who has yielded is none any more."""
        if not suspects:
            return []
        for key in [key for key, one in suspects.items() if one.has_yielded]:
            del suspects[key]
        due = (one for one in suspects.values() if one.is_due and self.may_take(one.request_id))
        turn = next(due, None)
        return [key for key, one in suspects.items() if one is not turn]

    def claim(self, image: str) -> bool:
        """The one place of suspects, for an image, until `release`; False: it is taken."""
        if self.may_take(image):
            self._replace(image, "")
        return image in self._suspects

    def release(self, image: str) -> None:
        if image in self._suspects:
            self._replace("", self._suspects[1])

    def _replace(self, image: str, request: str) -> None:
        before, self._suspects = self._suspects, (image, request)
        if any(before) and not any(self._suspects):
            for look in self.on_free:
                look()
