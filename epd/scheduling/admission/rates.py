"""What one key may have per minute: buckets that refill evenly, and when they will have enough.

Theory of operation
-------------------
A bucket holds a minute's worth at most and refills evenly (token buckets; Turner 1986).  Of the
tokens of a request an estimate is taken when it comes, and what that was wrong by at its end.  So a
bucket may be in debt, and no answer is cut for it.  What is more than a minute's worth is admitted
by a full bucket, so a request of any permitted size fits.

Who is refused is promised a time behind those who were refused before, so that not all come back
together.  Who asks again and again pushes its own times away, by a minute at most.
"""

from __future__ import annotations

MINUTE_S = 60.0
NOTHING = 1e-6  # less than this is missing for want of digits


class Bucket:
    """Of one key; times are those of one clock, in seconds."""

    __slots__ = ("_at_s", "_level", "_promised_s", "per_minute")

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at_s = self._promised_s = now_s  # until when all that comes in is promised

    def level(self, now_s: float) -> float:
        """What may be taken now; below zero: debt."""
        gained = (now_s - self._at_s) * self.per_minute / MINUTE_S
        self._level = min(float(self.per_minute), self._level + gained)
        self._at_s = now_s
        return self._level

    def take(self, amount: float, now_s: float) -> None:
        """Also what is not there, or (below zero) give back."""
        self._level = self.level(now_s) - amount

    def wait_s(self, amount: float, now_s: float) -> float:
        """Until so much may be taken, if nobody takes anything meanwhile; 0: now."""
        lacking = min(amount, self.per_minute) - self.level(now_s)
        return lacking * MINUTE_S / self.per_minute if lacking > NOTHING else 0.0

    def promise_s(self, amount: float, now_s: float) -> float:
        """In how many seconds one that is refused now may take so much."""
        needed_s = min(amount, self.per_minute) * MINUTE_S / self.per_minute
        soonest_s = now_s + self.wait_s(amount, now_s)
        due_s = max(soonest_s, min(self._promised_s, soonest_s + MINUTE_S) + needed_s)
        self._promised_s = due_s + amount * MINUTE_S / self.per_minute - needed_s
        return due_s - now_s
