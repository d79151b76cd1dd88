"""Why something failed: one record for messages, events and machines."""

from __future__ import annotations

from enum import StrEnum

from epd.ranges import Name
from epd.wire import Record


class FailureKind(StrEnum):
    """What went wrong; the remedy and the client's answer follow from the kind alone."""

    ABSENT = "absent"  # the rows were to be found in a storage, and are not there
    AWAY = "away"  # who was asked takes no work: it drains, or has not heard its welcome yet
    BUSY = "busy"
    CANCELLED = "cancelled"
    CAPACITY = "capacity"  # it can never fit
    CONTRACT = "contract"  # instances do not agree on what they exchange
    DEADLINE = "deadline"
    ENGINE = "engine"
    INTERNAL = "internal"
    LOST = "lost"
    MEDIA = "media"  # the image or video cannot be used
    OVERLOADED = "overloaded"  # its first token would come too late, by all that waits before it
    POISON = "poison"  # instances died of it
    RULES = "rules"  # what was asked for leaves no token that may follow
    TRANSFER = "transfer"
    UNAVAILABLE = "unavailable"  # no instance is there for it
    WITHDRAWN = "withdrawn"  # its own producer ended it: nobody's fault

    @property
    def retryable(self) -> bool:
        """Whether another attempt, elsewhere, may do better."""
        return self in _RETRYABLE

    @property
    def is_counted(self) -> bool:
        """Whether attempts that end so are bounded by their number, not by time alone: nobody has
        touched what was sent to who is away."""
        return self is not _K.AWAY

    @property
    def status(self) -> int:
        """Of the HTTP answer, if it is all that the client gets."""
        return _STATUS.get(self, 500)


_K = FailureKind
_RETRYABLE = frozenset((_K.ABSENT, _K.AWAY, _K.BUSY, _K.CANCELLED, _K.ENGINE, _K.LOST, _K.TRANSFER))
_STATUS = {
    _K.MEDIA: 400,
    _K.CAPACITY: 400,
    _K.RULES: 400,
    _K.ABSENT: 503,
    _K.AWAY: 503,
    _K.BUSY: 503,
    _K.OVERLOADED: 429,
    _K.LOST: 503,
    _K.TRANSFER: 503,
    _K.UNAVAILABLE: 503,
    _K.DEADLINE: 504,
    _K.POISON: 422,  # as nobody tries again: SDKs and proxies do that with 5xx
}


class Failure(Record, kw_only=False):
    kind: FailureKind
    reason: str
    culprit: Name = ""  # the instance that failed, if it is not the one that says so

    @property
    def retryable(self) -> bool:
        return self.kind.retryable

    def of(self, culprit: str) -> Failure:
        """The same, and whose it was."""
        return Failure(self.kind, self.reason, culprit)
