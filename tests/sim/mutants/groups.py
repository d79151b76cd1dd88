"""Bugs of groups of ranks, put back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import msgspec

from epd.engine.base import Rows, RowSpan, StepSequence
from epd.fsm import fan_out, group, request
from epd.fsm.incoming import Incoming, Published
from epd.fsm.kernel import Effect, Event, State
from epd.fsm.request import Request
from epd.fsm.room import Room
from epd.groups import asks as rank_asks
from epd.groups import kv as kv_ranks
from epd.groups.leader import Command, Encode, Follower, InOrder, Leader, Step
from epd.groups.meeting import Meeting, PlaceAsked, Refused
from epd.messages import Grant
from epd.roles import incoming
from epd.roles.encode.row_producer import RowProducer
from epd.roles.incoming import IncomingRooms
from epd.roles.prefill.role import PrefillRole
from epd.roles.rooms import AskOfRank, Rooms
from epd.scheduling import vision_batching
from epd.transport.base import Buffer, WriteFailed
from epd_lab.sim.core.process import SimProcess
from epd_lab.sim.ranks import groups
from epd_lab.sim.ranks.groups import SimRanks
from epd_lab.sim.ranks.hosts import Cable
from tests.sim.mutants.planting import Planted, mutant, patched, row, several

TAKES = (group.S.READY, group.S.STEPPING)


@mutant
def a_rank_admits_by_itself() -> Planted:
    """F29: what is computed is not in the command: a rank leaves out what it would not admit."""
    send = SimRanks.send

    def send_less(self: SimRanks, number: int, command: Command) -> None:
        less = isinstance(command, Step) and len(command.batch) > 2
        send(self, number, Step(command.batch[:-1]) if less else command)  # type: ignore[union-attr]

    return patched(SimRanks, "send", send_less)


@mutant
def a_rank_overtakes() -> Planted:
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

    return patched(SimRanks, "send", swapped)


@mutant
def a_rank_sorts_its_images() -> Planted:
    """F29: ranks agree on who has which image, and not on their order."""
    send = SimRanks.send

    def sorted_(self: SimRanks, number: int, command: Command) -> None:
        if isinstance(command, Encode):
            by_size = sorted(command.batch, key=lambda patches: patches.num_rows)
            command = Encode(by_size, command.num_turns)
        send(self, number, command)

    return patched(SimRanks, "send", sorted_)


@mutant
def a_rank_counts_its_own_turns() -> Planted:
    """F29: a rank joins its rows when its own share is done, and others launch steps before."""
    send = SimRanks.send

    def fewer(self: SimRanks, number: int, command: Command) -> None:
        if isinstance(command, Encode) and command.num_turns > 1:
            command = Encode(command.batch, command.num_turns - 1)
        send(self, number, command)

    return patched(SimRanks, "send", fewer)


@mutant
def a_batch_is_bounded_as_a_whole() -> Planted:
    """F29: a batch is within the bounds of all ranks together, and not of each."""
    return patched(vision_batching, "most", lambda sizes, num_ranks: 0)


@mutant
def a_lost_device_is_one_failure() -> Planted:
    """F29, F49: a rank whose device is lost has failed in a command, as at an error of the batch;
    the others wait for it in a collective."""
    return patched(InOrder, "_ended", lambda self, over: self._look())


@mutant
def an_answer_overtakes() -> Planted:
    """F29: what ends first is told first, though the group counts."""

    def at_once(self: InOrder, number: int, over: asyncio.Future[Any]) -> None:
        over.add_done_callback(lambda over: self._tell(number, ""))

    return patched(InOrder, "add", at_once)


@mutant
def half_a_group_goes_on() -> Planted:
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
    return several(patched(Leader, "_settle", alone), *goes_on)


@mutant
def a_silent_rank_is_waited_for() -> Planted:
    """F15, F29: no clock ends the wait in a collective for a rank that does not come."""
    return row(group.TABLE, group.S.STEPPING, group.AnswerMissed, None)


@mutant
def beats_are_not_looked_at() -> Planted:
    """F29: a rank that stands still is found by its command alone."""
    return patched(Leader, "_missed", lambda self, late_s: group.BeatsMissed(is_late=True))


@mutant
def a_number_is_not_looked_at() -> Planted:
    """F29: a rank that has missed a command executes the next one."""
    return patched(Follower, "_is_next", lambda self, number: True)


@mutant
def ranks_of_all_lives_meet() -> Planted:
    """F30: where ranks find each other is the same for each life of an instance."""

    def of_the_name(leader: SimProcess) -> str:
        return leader.instance_id

    return patched(groups, "meeting_place", of_the_name)


@mutant
def a_silent_host_is_waited_for() -> Planted:
    """F29: no kernel probes a connection between hosts, and no beat is missed."""
    ends = Cable._ends
    waits = lambda self, now_s: self.cut_since_s is None and ends(self, now_s)  # noqa: E731
    return several(patched(Cable, "_ends", waits), beats_are_not_looked_at())


@mutant
def a_place_is_taken_for_good() -> Planted:
    """F29: a rank that goes before all are there keeps its place."""
    return patched(Meeting, "free", lambda self, place: None)


@mutant
def a_place_is_of_any_life() -> Planted:
    """F30: a rank that means an earlier life of its leader gets a place."""
    object_to = Meeting._objection

    def without_epoch(self: Meeting, asked: PlaceAsked) -> Refused | None:
        return object_to(self, msgspec.structs.replace(asked, epoch=self.epoch))

    return patched(Meeting, "_objection", without_epoch)


# --- parts of a write -----------------------------------------------------------------------------


@mutant
def a_part_is_taken_for_all() -> Planted:
    """F29: a write to a group is over when the first of its ranks has what is its own."""
    return _ends_at_once(fan_out.PartWritten, fan_out.S.WRITTEN, fan_out.Do.TELL_WRITTEN)


@mutant
def a_failed_part_is_told_at_once() -> Planted:
    """F8: that a part has failed is told while others are still read and still land."""
    return _ends_at_once(fan_out.PartFailed, fan_out.S.FAILED, fan_out.Do.TELL_FAILED)


def _ends_at_once(
    event: type[Event], state: State, tell: Effect
) -> contextlib.AbstractContextManager[None]:
    """What comes later is dropped by who waits no more."""
    later = dict.fromkeys(fan_out.TABLE.events, ())
    return several(
        mock.patch.dict(fan_out.TABLE.dispatch[state], later),
        row(fan_out.TABLE, fan_out.S.WRITING, event, state, (tell,), fan_out.keep_end),
    )


@mutant
def a_part_in_doubt_has_failed() -> Planted:
    """F8: a part that may still land counts as one that does not."""
    return several(
        *(
            mock.patch.dict(edges, {fan_out.PartUnknown: edges[fan_out.PartFailed]})
            for edges in map(fan_out.TABLE.dispatch.__getitem__, fan_out.S)
            if fan_out.PartFailed in edges
        )
    )


@mutant
def a_leader_is_fenced_alone() -> Planted:
    """F7: of a group that was lost, only what its leader writes is waited for."""

    async def of_the_leader(self: Rooms[Any, Any], room: Room, asked: AskOfRank) -> bool:
        return await self._holds(room, asked(room.peer, "sim", 0))

    return patched(Rooms, "_all_hold", of_the_leader)


@mutant
def rows_of_the_preempted_are_given_up() -> Planted:
    """F24: who gives its blocks up gives up its images, too, and reads the same slots later."""
    release = PrefillRole.release_embeddings

    def but_remember(self: PrefillRole, machine: Request, event: Event) -> None:
        record = self._requests.record(machine)
        rows = dict(record.rows)
        release(self, machine, event)
        if isinstance(event, request.Preempted):
            record.rows.update(rows)

    do = request.Do
    effects = (do.DEQUEUE, do.RELEASE_BLOCKS, do.RELEASE_EMBEDDINGS, do.ENQUEUE)
    gives_way = request.TABLE, request.S.RUNNING, request.Preempted, request.S.PREEMPTED
    remembers = patched(PrefillRole, "release_embeddings", but_remember)
    return several(row(*gives_way, effects), remembers)


@mutant
def a_rank_is_told_of_rows_once() -> Planted:
    """F29: a rank is not told of rows that a sequence has read before, and was preempted since."""
    send = SimRanks.send
    known: WeakKeyDictionary[SimRanks, set[tuple[str, int]]] = WeakKeyDictionary()

    def is_new(self: SimRanks, sequence: StepSequence, span: RowSpan) -> bool:
        key = sequence.request_id, sequence.start + span.at
        told = known.setdefault(self, set())
        told_before = key in told
        told.add(key)
        return not told_before

    def send_new(self: SimRanks, number: int, command: Command) -> None:
        if isinstance(command, Step):
            batch = [
                replace(each, spans=[span for span in each.spans if is_new(self, each, span)])
                for each in command.batch
            ]
            command = replace(command, batch=batch)
        send(self, number, command)

    return patched(SimRanks, "send", send_new)


@mutant
def parts_go_to_the_wrong_ranks() -> Planted:
    """F29: an encoder and the ranks count the parts of an image from different ends."""
    parts = RowProducer._parts

    def turned(self: RowProducer, rows: Rows, views: Sequence[Buffer], grant: Grant) -> Any:
        regions = grant.parts[::-1]
        turned = msgspec.structs.replace(
            grant, region=regions[0], parts=(*regions[1:], grant.region)
        )
        return parts(self, rows, views, turned)

    return patched(RowProducer, "_parts", turned)


@mutant
def rows_at_ranks_are_believed() -> Planted:
    """F8: what other ranks have is not looked at."""

    check = IncomingRooms.check_bytes

    async def own_alone(self: IncomingRooms, incoming: Incoming, *rest: Any) -> Event:
        return await check(self, incoming, *rest) if incoming.key.endswith("/kv") else Published()

    return patched(IncomingRooms, "check_bytes", own_alone)


# --- noticed by the swarm -------------------------------------------------------------------------


class _Another(Exception):
    """Is raised nowhere."""


@mutant
def a_rank_that_ends_is_a_fault() -> Planted:
    """F13, F29: a rank ends while its group takes KV in, and the others are not waited for: that is
    called a slip of the leader (swarm 57004534)."""

    async def at_once(answers: Sequence[Any]) -> list[Any]:
        return list(await asyncio.gather(*answers))

    return several(patched(incoming, "RankLost", _Another), patched(rank_asks, "of_all", at_once))


@mutant
def a_rank_that_ends_has_failed() -> Planted:
    """F8: what a rank was writing when it ended counts as failed, and some of it lands later."""
    return patched(kv_ranks, "WriteUnknown", WriteFailed)
