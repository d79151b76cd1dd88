"""What a process has of the gateways that it joins: their times, and whether it is a member there.

Each gateway has a time of its own: its wall clock's when it started, and steady since. Deadlines
are in the time of the gateway whose request it is, so whoever reads one needs that gateway's name.
A gateway's process joins none. It has its own time.
"""

from __future__ import annotations

from collections import Counter

from epd.failure import Failure, FailureKind
from epd.fsm.membership import Membership
from epd.transport.base import Clock, Received


class BehindGateways:
    """Part of an actor; `roles/member.py` keeps it."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.counters: Counter[str] = Counter()
        self.memberships: dict[str, Membership] = {}  # by name of the gateway
        # A time against the own monotonic clock, so that setting a wall clock changes nothing.
        self.offsets: dict[str, float] = {}  # likewise
        self.cluster_offset_s = clock.wall_s() - clock.now_s()  # its own, or of whom it heard last

    def cluster_s(self) -> float:
        """The gateway's time, in which messages hold deadlines."""
        return self.clock.now_s() + self.cluster_offset_s

    def offset_s(self, gateway: str) -> float:
        """Of the time of that gateway; of the own one, where no gateway is joined."""
        return self.offsets.get(gateway, self.cluster_offset_s)

    def told_offset_s(self, gateway: str = "") -> float:
        """Of times in reports on the past: they are by the wall clock.  If that is further from
        the gateway's time than a message to a busy host is late, they are by the latter."""
        own_s, its_s = self.clock.wall_s() - self.clock.now_s(), self.offset_s(gateway)
        return own_s if abs(own_s - its_s) < 10.0 else its_s

    def until(self, deadline_s: float, gateway: str) -> float:
        """Seconds from now to a deadline in the time of that gateway."""
        return deadline_s - self.clock.now_s() - self.offset_s(gateway)

    def known_by(self) -> dict[str, Membership]:
        """By name of the gateway, where an instance is a member."""
        return {n: m for n, m in self.memberships.items() if m.was_welcomed and not m.terminal}

    def knows_time_of(self, gateway: str) -> bool:
        """Whether its time is here: an instance has it from its first welcome."""
        own = self.memberships.get(gateway)
        return own.was_welcomed if own is not None else not self.memberships

    def is_former(self, received: Received) -> bool:
        """Whether it is of a life of a gateway that another has followed (MEMBERSHIP)."""
        own = self.memberships.get(received.source)
        if own is None or not own.is_former(received.epoch):
            return False
        self.counters["message_of_other_epoch"] += 1
        return True

    def refusal(
        self, gateway: str, role: str, count: int, most: int, of: str = "requests"
    ) -> Failure | None:
        """Why it takes no new work of this gateway now; None if it does."""
        own = self.memberships.get(gateway)
        why = own.objection if own is not None else "has not joined the request's gateway"
        if why and self.memberships:
            return Failure(FailureKind.AWAY, f"the {role} instance {why}")
        if count >= most:
            return Failure(FailureKind.BUSY, f"the {role} instance has {most} {of} open")
        return None
