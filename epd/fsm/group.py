"""GROUP: the ranks of one instance, as the process that leads them sees them.

Theory of operation
-------------------
With tensor parallelism an instance is one process per rank.  Rank 0 leads: it alone has roles, and
each of its steps is a numbered command to all ranks.  The others decide nothing.  They execute
commands in order and answer each number with done or failed.  So whatever was decided (admission,
preemption, abort) is in the command, and ranks cannot disagree about it (F29).

A step is over when every rank has executed it.  Several may be given before the first is over.  One
that failed on every rank alike is a failed step.  One that failed on some ranks only is the end:
these ranks have left collectives that the others are still in.

Beside commands each rank beats: its process runs, whatever its device does.  A rank without beats is
noticed before an instance without them would be, one whose device stands still when its command is
overdue.

There is never half a group.  If a rank does not join in time, is silent for too long, answers a
number that it was not given, or ends, the whole group is LOST.  Its ranks are killed, its leader
ends, and the instance starts anew as a later epoch.  Everything by which ranks find each other
belongs to one epoch, so a rank that is late does not meet the next group (F30).
"""

from __future__ import annotations

from dataclasses import dataclass

from epd.fsm.kernel import (
    NULL_JOURNAL,
    Effect,
    Event,
    Ignore,
    Journal,
    Machine,
    Owned,
    Row,
    State,
    Table,
    Timers,
    unless,
)


class Do(Effect):
    SEND = "give the command to the other ranks"
    ARM_ANSWER = "fire AnswerMissed when the oldest command should have been executed"
    SETTLE = "fire CommandDone for each command that every rank has executed"
    RESOLVE = "tell who gave the oldest command how it ended"
    SEND_PROBE = "give all ranks a command that computes nothing"
    ARM_PROBE = "fire ProbeDue later"
    ARM_BEATS = "fire BeatsMissed when each rank should have beaten again"
    TELL_READY = "say that all ranks are there"
    TELL_LOST = "end the process of the leader: the group is lost"
    END_RANKS = "ask the other ranks to end when they have executed what they were given"
    KILL_RANKS = "kill what is left of the other ranks"
    ARM_END = "fire EndMissed later"


class Own(Owned):
    RANKS = "a process for each other rank", Do.KILL_RANKS


class S(State):
    FORMING = "the ranks start and load", Own.RANKS
    READY = "every rank waits for a command", Own.RANKS
    STEPPING = "a command is given that some rank has not executed", Own.RANKS
    CLOSING = "the ranks were asked to end", Own.RANKS
    CLOSED = "ended, as it was asked to"
    LOST = "a rank is lost, and so is the group: this epoch is over"


@dataclass(slots=True)
class RankJoined(Event):
    """It is loaded, and takes commands."""

    rank: int


@dataclass(slots=True)
class JoinMissed(Event):
    by_time = True


@dataclass(slots=True)
class CommandGiven(Event):
    command: object  # what the ranks are told


@dataclass(slots=True)
class ProbeDue(Event):
    by_time = True


@dataclass(slots=True)
class CommandExecuted(Event):
    rank: int
    number: int
    failed: bool


@dataclass(slots=True)
class CommandDone(Event):
    """By every rank: the oldest one."""


@dataclass(slots=True)
class AnswerMissed(Event):
    by_time = True


@dataclass(slots=True)
class RankBeat(Event):
    """Its process runs."""

    rank: int


@dataclass(slots=True)
class BeatsMissed(Event):
    """Some rank has not beaten since all others have; `is_late`: the leader itself stood still
    meanwhile, and has read nothing."""

    by_time = True
    is_late: bool = False


@dataclass(slots=True)
class RankEnded(Event):
    """Its process is gone, or has reported that it cannot go on."""

    rank: int
    reason: str


@dataclass(slots=True)
class CloseRequested(Event):
    pass


@dataclass(slots=True)
class EndMissed(Event):
    by_time = True


def is_last_to_join(group: Group, event: RankJoined) -> bool:
    return group.present | {event.rank} == group.others


def is_last_to_end(group: Group, event: RankEnded) -> bool:
    return group.present <= {event.rank}


def is_last_to_beat(group: Group, event: RankBeat) -> bool:
    return group.beaten | {event.rank} == group.others


def is_late(group: Group, event: BeatsMissed) -> bool:
    return event.is_late


def agrees(group: Group, event: CommandExecuted) -> bool:
    """It is the rank's next command, which ended as it did on the ranks before."""
    number = event.number
    is_next = group.executed[event.rank] + 1 == number <= group.given
    return is_next and group.failed.get(number, event.failed) is event.failed


def is_last(group: Group, event: CommandDone) -> bool:
    return group.done + 1 == group.given


def add_rank(group: Group, event: RankJoined) -> None:
    group.present.add(event.rank)


def add_beat(group: Group, event: RankBeat) -> None:
    group.beaten.add(event.rank)


def end_round(group: Group, event: RankBeat) -> None:
    group.beaten.clear()


def drop_rank(group: Group, event: RankEnded) -> None:
    group.present.discard(event.rank)


def give(group: Group, event: CommandGiven | ProbeDue) -> None:
    group.given += 1


def keep_answer(group: Group, event: CommandExecuted) -> None:
    group.executed[event.rank] = event.number
    group.failed[event.number] = event.failed


def pass_command(group: Group, event: CommandDone) -> None:
    group.done += 1
    group.failed.pop(group.done, None)


def keep_ended(group: Group, event: RankEnded) -> None:
    group.reason = f"rank {event.rank}: {event.reason}"


def keep_absent(group: Group, event: JoinMissed) -> None:
    group.reason = f"{_ranks(group.others - group.present)} not joined in time"


def keep_silent(group: Group, event: AnswerMissed) -> None:
    silent = {rank for rank, number in enumerate(group.executed) if number == group.done}
    group.reason = f"{_ranks(silent)} not executed command {group.done + 1} in time"


def keep_unheard(group: Group, event: BeatsMissed) -> None:
    group.reason = f"{_ranks(group.others - group.beaten)} sent no sign of life"


def keep_disagreement(group: Group, event: CommandExecuted) -> None:
    how = "failed in" if event.failed else "executed"
    group.reason = f"rank {event.rank} {how} command {event.number}, and another rank has not"


def _ranks(ranks: set[int]) -> str:
    names = ", ".join(map(str, sorted(ranks)))
    return f"ranks {names} have" if len(ranks) > 1 else f"rank {names} has"


_TAKES = (S.READY, S.STEPPING)
_LIVES = (S.FORMING, *_TAKES)
_OVER = (S.CLOSED, S.LOST)

# One line per row, as the table that it is.
# fmt: off
ROWS = (
    Row(S.FORMING, RankJoined, S.READY, (Do.TELL_READY, Do.ARM_PROBE, Do.ARM_BEATS), add_rank, when=is_last_to_join),
    Row(S.FORMING, RankJoined, None, (), add_rank, when=unless(is_last_to_join)),
    Row(S.FORMING, JoinMissed, S.LOST, (Do.TELL_LOST,), keep_absent),
    Row(S.READY, CommandGiven, S.STEPPING, (Do.SEND, Do.ARM_ANSWER), give),
    Row(S.READY, ProbeDue, S.STEPPING, (Do.SEND_PROBE, Do.ARM_ANSWER), give, note="a rank that hangs is not first noticed by a request"),
    Row(S.STEPPING, CommandGiven, None, (Do.SEND,), give, note="it runs behind those before it"),
    Row(_TAKES, CommandExecuted, None, (Do.SETTLE,), keep_answer, when=agrees),
    Row(_TAKES, CommandExecuted, S.LOST, (Do.TELL_LOST,), keep_disagreement, when=unless(agrees), note="ranks are no longer in step (F29)"),
    Row(S.STEPPING, CommandDone, S.READY, (Do.RESOLVE, Do.ARM_PROBE), pass_command, when=is_last),
    Row(S.STEPPING, CommandDone, None, (Do.RESOLVE, Do.ARM_ANSWER), pass_command, when=unless(is_last)),
    Row(S.STEPPING, AnswerMissed, S.LOST, (Do.TELL_LOST,), keep_silent),
    Row(_TAKES, RankBeat, None, (Do.ARM_BEATS,), end_round, when=is_last_to_beat),
    Row(_TAKES, RankBeat, None, (), add_beat, when=unless(is_last_to_beat)),
    Row(_TAKES, BeatsMissed, None, (Do.ARM_BEATS,), when=is_late, note="all have their time from now"),
    Row(_TAKES, BeatsMissed, S.LOST, (Do.TELL_LOST,), keep_unheard, when=unless(is_late)),
    Row(_LIVES, RankEnded, S.LOST, (Do.TELL_LOST,), keep_ended, note="never half a group"),
    Row(_LIVES, CloseRequested, S.CLOSING, (Do.END_RANKS, Do.ARM_END)),
    Row(S.CLOSING, RankEnded, S.CLOSED, (), drop_rank, when=is_last_to_end),
    Row(S.CLOSING, RankEnded, None, (), drop_rank, when=unless(is_last_to_end)),
    Row(S.CLOSING, EndMissed, S.CLOSED),
)

IGNORES = (
    Ignore((S.FORMING, S.CLOSING, *_OVER), (RankBeat,), "silence is counted while commands are taken"),
    Ignore((S.CLOSING, *_OVER), (RankJoined, CommandGiven, CommandExecuted, CommandDone), "nobody waits for it any more"),
    Ignore((S.CLOSING,), (CloseRequested,), "asked before"),
    Ignore(_OVER, (RankEnded, CloseRequested), "it is over"),
)

_TIMERS: Timers = {JoinMissed: (), ProbeDue: (Do.ARM_PROBE,), AnswerMissed: (Do.ARM_ANSWER,), BeatsMissed: (Do.ARM_BEATS,), EndMissed: (Do.ARM_END,)}
TABLE = Table("GROUP", __doc__ or "", S, S.FORMING, _OVER, ROWS, IGNORES, timers=_TIMERS)
# fmt: on


class Group(Machine):
    """`key` is the instance's name; rank 0 is the leader itself."""

    table = TABLE
    __slots__ = ("beaten", "done", "executed", "failed", "given", "others", "present", "reason")

    def __init__(self, key: str, size: int, journal: Journal = NULL_JOURNAL) -> None:
        super().__init__(key, journal)
        self.others = set(range(1, size))
        self.present: set[int] = set()  # of the others
        self.beaten: set[int] = set()  # of the others, since all of them had
        self.given = 0  # commands so far
        self.executed = [0] * size  # by each rank
        self.done = 0  # by all of them, and told
        self.failed: dict[int, bool] = {}  # how those ended that some rank has executed
        self.reason = ""  # why it is lost

    @property
    def size(self) -> int:
        return len(self.executed)

    @property
    def takes_commands(self) -> bool:
        return self.state in _TAKES
