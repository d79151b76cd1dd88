"""Bugs of groups of ranks, put back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any
from unittest import mock

from epd.fsm import group
from epd.roles.group import Command, Encode, Follower, InOrder, Leader, Step
from epd_lab.sim import groups
from epd_lab.sim.groups import SimRanks
from epd_lab.sim.process import SimProcess
from tests.sim.planting import mutant, row, several

TAKES = (group.S.READY, group.S.STEPPING)


@mutant
def a_rank_admits_by_itself() -> Iterator[None]:
    """F29: what is computed is not in the command: a rank leaves out what it would not admit."""
    send = SimRanks.send

    def send_less(self: SimRanks, number: int, command: Command) -> None:
        less = isinstance(command, Step) and len(command.batch) > 2
        send(self, number, Step(command.batch[:-1]) if less else command)  # type: ignore[union-attr]

    with mock.patch.object(SimRanks, "send", send_less):
        yield


@mutant
def a_rank_overtakes() -> Iterator[None]:
    """F29: commands reach a rank in another order than the others."""
    send = SimRanks.send
    kept: list[tuple[int, Command]] = []

    def swapped(self: SimRanks, number: int, command: Command) -> None:
        if isinstance(command, Step) and number % 8 == 7 and not kept:
            kept.append((number, command))
            return
        send(self, number, command)
        while kept:
            send(self, *kept.pop())

    with mock.patch.object(SimRanks, "send", swapped):
        yield


@mutant
def a_rank_sorts_its_images() -> Iterator[None]:
    """F29: ranks agree on who has which image, and not on their order."""
    send = SimRanks.send

    def sorted_(self: SimRanks, number: int, command: Command) -> None:
        if isinstance(command, Encode):
            command = Encode(sorted(command.batch, key=lambda patches: patches.num_rows))
        send(self, number, command)

    with mock.patch.object(SimRanks, "send", sorted_):
        yield


@mutant
def an_answer_overtakes() -> Iterator[None]:
    """F29: what ends first is told first, though the group counts."""

    def at_once(self: InOrder, number: int, over: asyncio.Future[Any]) -> None:
        over.add_done_callback(lambda over: self._tell(number, ""))

    with mock.patch.object(InOrder, "add", at_once):
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
