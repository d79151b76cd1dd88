"""Invariant 6: the ranks of a group execute the same commands, in the same order, or none.

Every rank's steps are compared with the other ranks' commands of the same number.  Results that
roles have must have been computed by every rank of this very life, with the same tokens.  No rank
waits in a collective longer than the bound for one that does not come.  Nor does one wait that long
for a leader whose device was reported lost, or for a rank that stands still.  Slots that a rank
reads rows from have an image whose rows are here and in use, also where they are read again.
"""

from __future__ import annotations

from collections import Counter

from epd.engine.base import Outcome, Patches, RowSpan, SlotRows, StepSequence
from epd.fsm import embedding, group
from epd.fsm.kernel import Event, Machine, State
from epd.groups.leader import Command, Encode, Step, silence_s
from epd.messages import TokenLogprobs
from epd_lab.sim.checkers.base import Checker, Context
from epd_lab.sim.core.process import SimProcess
from epd_lab.sim.ranks.groups import SimRanks, Watch
from epd_lab.sim.ranks.hosts import Cable, Led

CLOSING = group.S.CLOSING
SLACK_S = 0.1
BEATS = 1.5  # the last one before a silence, and the way of the one before

Told = tuple[tuple[object, ...], ...]


class Groups(Checker, Watch):
    name = "groups"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._timing = context.cluster.settings.timing
        self._beat_s = self._timing.heartbeat_interval_s
        self._told: dict[tuple[SimRanks, int], Told] = {}
        self._last: Counter[tuple[SimRanks, int]] = Counter()
        self._images: dict[tuple[SimProcess, int], embedding.Embedding] = {}  # by slot
        self._read: dict[tuple[SimRanks, str], int] = {}  # of a request: its last row, by token
        context.cluster.groups.watch = self
        context.cluster.groups.hosts.on_begin.append(self._begun)
        context.cluster.groups.hosts.on_cut.append(self._cut)
        context.world.watch(self._loaded, embedding.Loaded)
        context.world.watch(self._missed, group.AnswerMissed)

    def _loaded(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        if isinstance(machine, embedding.Embedding):
            self._images |= {(process, slot): machine for slot in machine.slots}

    def _missed(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        assert isinstance(machine, group.Group)
        device = self.context.cluster.nodes[process.name].devices[0]
        if any(machine.failed.values()) and (device.lost or device.dead):
            self.violate(f"{process.name}: others waited for a rank whose device is lost")
        for member in self.context.cluster.groups.at[process.name].members.values():
            still_s = self.world.loop.now_s - max(member.process.stalled_s, process.resumed_s)
            if member.process.stalled and still_s > silence_s(self._timing) + BEATS * self._beat_s:
                self.violate(f"{process.name} waited for {member.process.name}, which stood still")

    def _begun(self, group: Led, epochs: dict[int, int]) -> None:
        """Ranks of other hosts have their places in this life."""
        missing = group.leader.machine.size - 1 - len(epochs)
        others = set(epochs.values()) - {group.process.epoch}
        if missing or others:
            lives = f", and others of lives {sorted(others)}" if others else ""
            self.violate(f"{group.process.name} begins without {missing} of its ranks{lives}")

    def _cut(self, cable: Cable) -> None:
        loop, bound_s = self.world.loop, self._timing.lost_after_s + SLACK_S
        loop.call_outside(loop.now_s + bound_s, self._look_at_cut, cable, cable.cut_since_s)

    def _look_at_cut(self, cable: Cable, since_s: float) -> None:
        process, group = cable.leader, cable.group
        stood_still = process.stalled or process.resumed_s > since_s
        if cable.cut_since_s != since_s or group is None or stood_still or not process.alive:
            return
        if not group.leader.machine.terminal:
            self.violate(f"{process.name} is not lost, though a rank is out of reach for too long")

    def entered(self, group: SimRanks, rank: int, number: int, command: Command) -> None:
        """A rank begins its command."""
        who = f"rank {rank} of {group.process.name}"
        if rank and group.members[rank].leader is not group.process:
            self.violate(f"{who} is one of {group.members[rank].leader.name}")
        self._last[group, rank] += 1
        if self._last[group, rank] != number:
            self.violate(f"{who} executes {number} where {self._last[group, rank]} is next")
        for sequence in command.batch if isinstance(command, Step) else ():
            self._look_at_rows(group, rank, sequence)
        told = _told(command)
        if (group, number) not in self._told:
            self._told[group, number] = told
            loop = self.world.loop
            bound_s = self._timing.group_step_timeout_s + SLACK_S
            loop.call_outside(loop.now_s + bound_s, self._look, group, number, loop.now_s)
        elif self._told[group, number] != told:
            self.violate(f"{who} was told another command {number} than the others")

    def _look_at_rows(self, group: SimRanks, rank: int, sequence: StepSequence) -> None:
        spans = [span for span in sequence.spans if isinstance(span.rows, SlotRows)]
        for span in spans:
            for slot in span.rows.slots:
                image = self._images.get((group.process, slot))
                is_here = image is not None and image.state is embedding.S.RESIDENT
                if image is None or not is_here or not image.waiters:
                    who = f"rank {rank} of {group.process.name}"
                    self.violate(f"{who} reads slot {slot}, whose rows nobody keeps")
        if spans and not rank:
            first, last = (sequence.start + at for at in (spans[0].at, _end(spans[-1]) - 1))
            if first <= self._read.get((group, sequence.request_id), -1):
                self.world.fired["rows_read_again"] += 1
            self._read[group, sequence.request_id] = last

    def resolved(self, group: SimRanks, number: int) -> None:
        """Roles have a step's result."""
        executed = group.executed.pop(number, {})
        if missing := set(range(group.size)) - executed.keys():
            self.violate(f"{group.process.name}: step {number} ends without rank {min(missing)}")
        elif any(_tokens(found) != _tokens(executed[0]) for found in executed.values()):
            self.violate(f"{group.process.name}: ranks find other tokens in step {number}")

    def _look(self, group: SimRanks, number: int, since_s: float) -> None:
        """A step that some rank entered long ago; who stood still since has not been asked."""
        process = group.process
        rests = process.stalled or process.resumed_s > since_s or not process.alive
        rests = rests or group.leader.machine.state is CLOSING  # nobody waits for its steps
        inside, executed = group.inside[number], group.executed.get(number, ())
        if any(0 < len(ranks) < group.size for ranks in (inside, executed)) and not rests:
            self.violate(f"{process.name}: ranks {sorted(inside)} wait in step {number} for others")

    def at_end(self) -> None:
        for follower in self.context.cluster.groups.followers.values():
            if follower.process.alive and not follower.leader.alive:
                self.violate(f"{follower.process.name} outlives its leader")


def _end(span: RowSpan) -> int:
    return span.at + span.count


def _told(command: Command) -> Told:
    """What a rank computes."""
    if isinstance(command, Step):
        return tuple(map(_sequence, command.batch))
    if isinstance(command, Encode):
        return ((command.num_turns,), *map(_image, command.batch))
    return ((type(command).__name__,),)


def _image(patches: Patches) -> tuple[object, ...]:
    return patches.grid_thw, patches.num_patches, patches.num_rows


def _sequence(sequence: StepSequence) -> tuple[object, ...]:
    return (
        sequence.request_id,
        tuple(sequence.token_ids),
        sequence.start,
        tuple(sequence.block_table),
        sequence.num_drafts,
        [tuple(pair) for pair in sequence.copies],
        [(span.at, span.row_start, span.count) for span in sequence.spans],
    )


def _tokens(outcomes: list[Outcome]) -> list[object]:
    return [one.token_id if isinstance(one, TokenLogprobs) else one for one in outcomes]
