"""Bugs of groups of ranks, put back."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

from epd.fsm import group
from epd.roles.group import Batch, Follower, Leader
from epd_lab.sim import groups
from epd_lab.sim.groups import SimRanks
from epd_lab.sim.process import SimProcess
from tests.sim.planting import mutant, row, several

TAKES = (group.S.READY, group.S.STEPPING)


@mutant
def a_rank_admits_by_itself() -> Iterator[None]:
    """F29: what is computed is not in the command: a rank leaves out what it would not admit."""
    send = SimRanks.send

    def send_less(self: SimRanks, number: int, batch: Batch) -> None:
        send(self, number, batch[:-1] if len(batch) > 2 else batch)

    with mock.patch.object(SimRanks, "send", send_less):
        yield


@mutant
def a_rank_overtakes() -> Iterator[None]:
    """F29: commands reach a rank in another order than the others."""
    send = SimRanks.send
    kept: list[tuple[int, Batch]] = []

    def swapped(self: SimRanks, number: int, batch: Batch) -> None:
        if batch and number % 8 == 7 and not kept:
            kept.append((number, batch))
            return
        send(self, number, batch)
        while kept:
            send(self, *kept.pop())

    with mock.patch.object(SimRanks, "send", swapped):
        yield


@mutant
def half_a_group_goes_on() -> Iterator[None]:
    """F29: a rank ends, and the others compute without it."""
    settle = Leader._settle

    def alone(self: Leader) -> None:
        machine = self.machine
        lives = {0, *machine.present}
        for rank in range(machine.size):
            if rank not in lives:
                machine.executed[rank] = machine.executed[0]
        settle(self)

    goes_on = (row(group.TABLE, s, group.RankEnded, None, (), group.drop_rank) for s in TAKES)
    with several(mock.patch.object(Leader, "_settle", alone), *goes_on):
        yield


@mutant
def a_silent_rank_is_waited_for() -> Iterator[None]:
    """F15, F29: no clock ends the wait in a collective for a rank that does not come."""
    with row(group.TABLE, group.S.STEPPING, group.AnswerMissed, None):
        yield


@mutant
def a_number_is_not_looked_at() -> Iterator[None]:
    """F29: a rank that has missed a command executes the next one."""
    with mock.patch.object(Follower, "_is_next", lambda self, number: True):
        yield


@mutant
def ranks_of_all_lives_meet() -> Iterator[None]:
    """F30: where ranks find each other is the same for each life of an instance."""

    def of_the_name(leader: SimProcess) -> str:
        return leader.instance_id

    with mock.patch.object(groups, "meeting_place", of_the_name):
        yield
