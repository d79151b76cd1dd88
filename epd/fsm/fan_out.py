"""FAN_OUT: a write to or from a group of ranks, as the parts that it consists of.

Theory of operation
-------------------
A group has a part of each of its regions at every rank.  What one rank writes to another is a part
of a write, with an outcome of its own.  A room sees one outcome (OUTGOING): done when every part
is, failed when one failed, unknown when one is unknown.  It comes when all parts have theirs, not
before, since it gives back the room's memory: until then a part may still be read and may still
land.

Time does not end it.  Who waits for it has a clock (OUTGOING), and so have the writers: a rank that
hangs is lost with its group (GROUP), and what it was writing is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass

from epd.fsm.kernel import (
    NULL_JOURNAL,
    Effect,
    Event,
    Journal,
    Machine,
    Owned,
    Row,
    State,
    Table,
    unless,
)


class Do(Effect):
    TELL_WRITTEN = "say that every part has landed"
    TELL_FAILED = "say that it failed: nothing of any part lands any more"
    TELL_UNKNOWN = "say that parts may still land"


class Own(Owned):
    PARTS = "parts that may move bytes", None, Do.TELL_WRITTEN, Do.TELL_FAILED, Do.TELL_UNKNOWN


class S(State):
    WRITING = "parts are under way, and those that have ended have landed", Own.PARTS
    FAILING = "a part has failed; the ends of the others are awaited", Own.PARTS
    DOUBTED = "the end of a part is unknown; those of the others are awaited", Own.PARTS
    WRITTEN = "every part has landed"
    FAILED = "a part has failed, and no other moves any more"
    UNKNOWN = "parts may still move"


@dataclass(slots=True)
class PartEnded(Event):
    part: int


@dataclass(slots=True)
class PartWritten(PartEnded):
    nbytes: int
    checksum: int


@dataclass(slots=True)
class PartFailed(PartEnded):
    """Definite: nothing of this part lands any more."""

    reason: str


@dataclass(slots=True)
class PartUnknown(PartEnded):
    """Its writer has no outcome, has given up, or is lost: by a clock of its own, or its
    group's."""

    by_time = True
    reason: str


def is_last(fan_out: FanOut, event: PartEnded) -> bool:
    return fan_out.awaited == {event.part}


def keep_end(fan_out: FanOut, event: PartEnded) -> None:
    fan_out.awaited.discard(event.part)


def keep_sum(fan_out: FanOut, event: PartWritten) -> None:
    keep_end(fan_out, event)
    fan_out.nbytes += event.nbytes
    fan_out.checksum = (fan_out.checksum + event.checksum) & 0xFFFFFFFF


def keep_reason(fan_out: FanOut, event: PartFailed | PartUnknown) -> None:
    keep_end(fan_out, event)
    fan_out.reason = event.reason


_OPEN = (S.WRITING, S.FAILING, S.DOUBTED)

# One line per row, as the table that it is.
# fmt: off
ROWS = (
    Row(S.WRITING, PartWritten, S.WRITTEN, (Do.TELL_WRITTEN,), keep_sum, is_last),
    Row(S.WRITING, PartWritten, None, (), keep_sum, unless(is_last)),
    Row((S.WRITING, S.FAILING), PartFailed, S.FAILED, (Do.TELL_FAILED,), keep_reason, is_last),
    Row((S.WRITING, S.FAILING), PartFailed, S.FAILING, (), keep_reason, unless(is_last), "the source is still read for others"),
    Row(_OPEN, PartUnknown, S.UNKNOWN, (Do.TELL_UNKNOWN,), keep_reason, is_last),
    Row(_OPEN, PartUnknown, S.DOUBTED, (), keep_reason, unless(is_last), "who asks whether it has settled must not be told of parts that have not begun"),
    Row(S.FAILING, PartWritten, S.FAILED, (Do.TELL_FAILED,), keep_end, is_last),
    Row(S.FAILING, PartWritten, None, (), keep_end, unless(is_last)),
    Row(S.DOUBTED, (PartWritten, PartFailed), S.UNKNOWN, (Do.TELL_UNKNOWN,), keep_end, is_last),
    Row(S.DOUBTED, (PartWritten, PartFailed), None, (), keep_end, unless(is_last)),
)

TABLE = Table("FAN_OUT", __doc__ or "", S, S.WRITING, (S.WRITTEN, S.FAILED, S.UNKNOWN), ROWS)
# fmt: on


class FanOut(Machine):
    """`key` names the room's write."""

    table = TABLE
    __slots__ = ("awaited", "checksum", "nbytes", "reason")

    def __init__(self, key: str, num_parts: int, journal: Journal = NULL_JOURNAL) -> None:
        super().__init__(key, journal)
        self.awaited = set(range(num_parts))  # parts whose end is not known
        self.nbytes = 0  # that have landed
        self.checksum = 0  # of these: the parts' own, added up
        self.reason = ""  # why it failed, or is unknown
