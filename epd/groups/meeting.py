"""Which processes of other hosts become ranks of a group: the present life of a leader decides.

Theory of operation
-------------------
A rank of another host has a supervisor there, so no parent ends it together with its leader.  It
asks the leader for a place, and names the life that it means.  A leader takes those that mean its
present life, as many as it lacks.  When all are there it numbers them, host by host.  A rank
belongs to one life only: when that is over, it ends, and its successor asks the leader's (F30).
"""

from __future__ import annotations

from epd.groups.asks import RankPlace
from epd.ranges import Count, Name, Total, Where
from epd.wire import Record


class PlaceAsked(Record, tag=True):
    """For a place, by a process that proves to hold the cluster key."""

    version: Name  # of epd: ranks are one program
    leader: Name
    epoch: Total  # of the leader's life that is meant
    host_id: Where
    pid: Count
    nonce: bytes
    proof: bytes

    @property
    def place(self) -> RankPlace:
        return self.host_id, self.pid


class Refused(Record, tag=True):
    """`is_final`: a later try would be refused as well."""

    reason: Where
    is_final: bool


class Meeting:
    """The places of one life of a leader; each is free again when its process is gone."""

    def __init__(self, leader: str, epoch: int, version: str, num_places: int) -> None:
        self.epoch = epoch
        self._leader = leader
        self._version = version
        self._num_places = num_places
        self._taken: set[RankPlace] = set()

    @property
    def num_absent(self) -> int:
        return self._num_places - len(self._taken)

    def take(self, asked: PlaceAsked) -> Refused | None:
        """None: it has a place."""
        if refused := self._objection(asked):
            return refused
        self._taken.add(asked.place)
        return None

    def free(self, place: RankPlace) -> None:
        self._taken.discard(place)

    def _objection(self, asked: PlaceAsked) -> Refused | None:
        leader = self._leader
        if asked.leader != leader:
            reason = f"{leader} leads here, and not {asked.leader}: correct --rank-of or --join"
            return Refused(reason=reason, is_final=True)
        if asked.version != self._version:
            reason = f"{leader} is of epd {self._version}, and this is {asked.version}"
            return Refused(reason=reason, is_final=True)
        if asked.epoch != self.epoch:
            reason = f"the life {asked.epoch} of {leader} is over; {self.epoch} has followed"
            return Refused(reason=reason, is_final=False)
        if not self.num_absent:
            return Refused(reason=f"{leader} has all of its ranks", is_final=False)
        return None
