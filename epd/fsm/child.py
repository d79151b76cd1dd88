"""CHILD: one process that a supervisor keeps, over all its lives.

Theory of operation
-------------------
A child that ends before it ever served shows a mistake in the configuration: it is FAILED, its
error is printed, and everything stops. A child that ends after it has served is started again at
once, as a new epoch. What fails to start is tried again after a pause that doubles. A child whose
lives were short several times in a row has a pause, too, which stays short: it did serve.

A process is asked now and then, and whatever it writes is an answer. One that loads has long to
answer, as it has no loop yet. One that serves falls SILENT soon; that alone proves little, as it
may be the machine that is slow. If the gateway has declared it lost as well, nothing it does counts
any more: it is killed, which frees what its peers keep in quarantine for it. One that answers is
CUT_OFF from its gateway, is left alone, and joins again by itself. Questions are counted, not
seconds: a supervisor that stood still, or whose machine slept, has not asked meanwhile.

A child that an operator had drained has ended for good, and the others go on.

A child that is asked to stop drains for a bounded time; then it is killed. The request to stop may
come while its process is still being made: the process gets it as soon as it is there.
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


class Own(Owned):
    PROCESS = "a process, or one that is being made"


class S(State):
    PENDING = "to be started"
    STARTING = "its first process is made, and loads", Own.PROCESS
    SERVING = "its process serves", Own.PROCESS
    SILENT = "its process served, and does not answer", Own.PROCESS
    CUT_OFF = "the gateway has declared it lost, and its process answers", Own.PROCESS
    PAUSED = "its process has ended; another is started when the pause is over"
    RESTARTING = "its process is made, and loads; another follows it", Own.PROCESS
    REPLACING = "its process hung and was killed; another follows when it is gone", Own.PROCESS
    STOPPING = "its process was asked to drain and end, or will be when it is made", Own.PROCESS
    KILLING = "its process was killed; the kernel tells when it is gone", Own.PROCESS
    STOPPED = "ended, as it was asked to"
    FAILED = "ended before it ever served"


class Do(Effect):
    LAUNCH = "make a process, and tell it what to be"
    ASK = "ask the process, if it is made, for an answer; fire AskDue later"
    ARM_PAUSE = "fire StartDue after the pause; each in a row is longer"
    SEND_TERM = "ask the process, if it is made, to drain and end"
    SEND_INT = "ask it to end at once"
    SEND_KILL = "kill it"
    ARM_KILL = "fire KillDue when it has had time to drain"
    ARM_GONE = "fire KillDue when a process that was killed should be gone"
    TELL_SERVED = "say that it has served"
    TELL_SILENT = "say that it does not answer"
    TELL_HUNG = "say that it is killed, as it hangs"
    TELL_FAILED = "say that it is not worth another try"
    TELL_STOPPED = "say that it is over"


@dataclass(slots=True)
class StartDue(Event):
    by_time = True


@dataclass(slots=True)
class Launched(Event):
    pass


@dataclass(slots=True)
class LaunchFailed(Event):
    ends = (Own.PROCESS,)
    reason: str


@dataclass(slots=True)
class Served(Event):
    """The child has reported that it serves."""


@dataclass(slots=True)
class Waits(Event):
    """The child waits for processes of other hosts: its own configuration is right."""


@dataclass(slots=True)
class AskDue(Event):
    by_time = True


@dataclass(slots=True)
class Answered(Event):
    """It wrote something."""


@dataclass(slots=True)
class DeclaredLost(Event):
    """By the gateway: this process's epoch is over."""


@dataclass(slots=True)
class Ended(Event):
    ends = (Own.PROCESS,)
    exit_status: int


@dataclass(slots=True)
class Drained(Event):
    """It has ended, as an operator took it out."""

    ends = (Own.PROCESS,)


@dataclass(slots=True)
class StopRequested(Event):
    pass


@dataclass(slots=True)
class HurryRequested(Event):
    """Its stop is not waited for any more."""


@dataclass(slots=True)
class KillDue(Event):
    by_time = True


@dataclass(frozen=True, slots=True)
class Patience:
    """In questions that were asked in a row, and how many lives may be short."""

    silent: int = 4  # unanswered by who serves: it is SILENT
    hung: int = 40  # unanswered by who serves: no gateway has to say so, too
    stuck: int = 1200  # unanswered by who loads
    long_life: int = 20  # answered by who serves: what went before is forgotten
    short_lives: int = 5  # so many in a row are followed at once


def is_silent(child: Child, event: AskDue) -> bool:
    return child.num_unanswered >= child.patience.silent


def is_hung(child: Child, event: AskDue) -> bool:
    return child.num_unanswered >= child.patience.hung


def is_stuck(child: Child, event: AskDue) -> bool:
    return child.num_unanswered >= child.patience.stuck


def may_follow(child: Child, event: Ended) -> bool:
    return child.num_short_lives < child.patience.short_lives


def count_ask(child: Child, event: AskDue) -> None:
    child.num_unanswered += 1


def hear(child: Child, event: Answered | Waits) -> None:
    child.num_unanswered = 0


def note_answer(child: Child, event: Answered) -> None:
    child.num_unanswered = 0
    child.num_answers += 1
    if child.num_answers >= child.patience.long_life:
        child.num_short_lives = child.num_pauses = 0


def begin_life(child: Child, event: StartDue) -> None:
    child.num_unanswered = 0


def begin_service(child: Child, event: Served) -> None:
    child.num_unanswered = child.num_answers = 0


def count_life(child: Child, event: Ended) -> None:
    child.num_short_lives += 1
    child.num_unanswered = 0


def count_pause(child: Child, event: Ended | LaunchFailed) -> None:
    child.num_pauses += 1


def rest(child: Child, event: Ended) -> None:
    child.num_pauses = 3  # as long as the third of those that double, however often


_LOADS = (S.STARTING, S.RESTARTING)
_SERVES = (S.SERVING, S.SILENT, S.CUT_OFF)
_LIVES = (*_LOADS, *_SERVES)
_WAITS = (S.PENDING, S.PAUSED)
_LEAVES = (S.STOPPING, S.KILLING)
_OVER = (S.STOPPED, S.FAILED)
_KILL = (Do.SEND_KILL, Do.ARM_GONE)
_REPLACE = (Do.TELL_HUNG, *_KILL)

# One line per row, as the table that it is.
# fmt: off
ROWS = (
    Row(S.PENDING, StartDue, S.STARTING, (Do.LAUNCH, Do.ASK), begin_life),
    Row(S.PAUSED, StartDue, S.RESTARTING, (Do.LAUNCH, Do.ASK), begin_life),
    Row((*_LOADS, S.SILENT, S.CUT_OFF), Served, S.SERVING, (Do.TELL_SERVED, Do.ASK), begin_service, note="of SILENT and CUT_OFF: welcomed anew"),
    Row(S.STARTING, Waits, S.RESTARTING, (), hear, note="who is waited for may end the wait, as often as it likes"),
    Row(S.RESTARTING, Waits, None, (), hear),
    Row(_LOADS, Answered, None, (), hear),
    Row((S.SERVING, S.CUT_OFF), Answered, None, (), note_answer),
    Row(S.SILENT, Answered, S.SERVING, (Do.TELL_SERVED,), note_answer),
    Row(_LOADS, AskDue, S.REPLACING, _REPLACE, when=is_stuck),
    Row(_LOADS, AskDue, None, (Do.ASK,), count_ask, when=unless(is_stuck)),
    Row(S.SERVING, AskDue, S.SILENT, (Do.TELL_SILENT, Do.ASK), count_ask, when=is_silent),
    Row(S.SERVING, AskDue, None, (Do.ASK,), count_ask, when=unless(is_silent)),
    Row(S.SILENT, AskDue, S.REPLACING, _REPLACE, when=is_hung, note="as the gateway itself, or where none of its own says so"),
    Row(S.SILENT, AskDue, None, (Do.ASK,), count_ask, when=unless(is_hung)),
    Row(S.CUT_OFF, AskDue, S.REPLACING, _REPLACE, when=is_silent),
    Row(S.CUT_OFF, AskDue, None, (Do.ASK,), count_ask, when=unless(is_silent)),
    Row((*_LOADS, S.SERVING), DeclaredLost, S.CUT_OFF, note="it answers: it joins again by itself"),
    Row(S.SILENT, DeclaredLost, S.REPLACING, _REPLACE, note="neither answers its gateway nor its supervisor (F79)"),
    Row(S.STARTING, (Ended, LaunchFailed), S.FAILED, (Do.TELL_FAILED,), note="a mistake in the configuration"),
    Row((*_SERVES, S.REPLACING), Ended, S.RESTARTING, (Do.LAUNCH, Do.ASK), count_life, when=may_follow, note="at once, with a new epoch (F44)"),
    Row((*_SERVES, S.REPLACING), Ended, S.PAUSED, (Do.ARM_PAUSE,), rest, when=unless(may_follow), note="its last lives were short"),
    Row((*_SERVES, S.REPLACING, *_LEAVES), Drained, S.STOPPED, (Do.TELL_STOPPED,)),
    Row((S.RESTARTING, S.REPLACING), LaunchFailed, S.PAUSED, (Do.ARM_PAUSE,), count_pause),
    Row(S.RESTARTING, Ended, S.PAUSED, (Do.ARM_PAUSE,), count_pause, note="it fails to start"),
    Row(S.REPLACING, Launched, None, (Do.SEND_KILL,), note="killed while it was being made"),
    Row(S.REPLACING, KillDue, None, _KILL),
    Row(_WAITS, StopRequested, S.STOPPED, (Do.TELL_STOPPED,)),
    Row(_LIVES, StopRequested, S.STOPPING, (Do.SEND_TERM, Do.ARM_KILL)),
    Row(S.REPLACING, StopRequested, S.KILLING, _KILL),
    Row(_LEAVES, Launched, None, (Do.SEND_TERM,), note="asked while it was being made"),
    Row(S.STOPPING, HurryRequested, None, (Do.SEND_INT,)),
    Row(_LEAVES, KillDue, S.KILLING, _KILL),
    Row(_LEAVES, (Ended, LaunchFailed), S.STOPPED, (Do.TELL_STOPPED,)),
)

IGNORES = (
    Ignore(_LIVES, (Launched,), "it was told what to be, and says how far it is"),
    Ignore((S.SERVING, S.REPLACING, *_LEAVES), (Served,), "said before, or nobody waits for it"),
    Ignore(_SERVES, (Waits,), "it did not, when it began to serve"),
    Ignore((S.REPLACING, *_LEAVES), (Answered, Waits, DeclaredLost), "it is to end"),
    Ignore((S.CUT_OFF,), (DeclaredLost,), "said before"),
    Ignore((*_WAITS, *_LIVES, S.REPLACING), (HurryRequested,), "it was not asked to stop"),
    Ignore((S.KILLING,), (HurryRequested,), "nothing is faster"),
    Ignore(_LEAVES, (StopRequested,), "asked before"),
    Ignore(_OVER, (StopRequested, HurryRequested), "it is over"),
)

_HELD: dict[State, str] = {
    S.KILLING: "only the kernel ends it",
    S.REPLACING: "only the kernel ends it",
}
_TIMERS: Timers = {
    StartDue: (Do.ARM_PAUSE,),
    AskDue: (Do.ASK,),
    KillDue: (Do.ARM_KILL, Do.ARM_GONE),
}
TABLE = Table("CHILD", __doc__ or "", S, S.PENDING, _OVER, ROWS, IGNORES, _HELD, _TIMERS)
# fmt: on


class Child(Machine):
    """`key` is the child's name."""

    table = TABLE
    __slots__ = ("num_answers", "num_pauses", "num_short_lives", "num_unanswered", "patience")

    def __init__(
        self, key: str, journal: Journal = NULL_JOURNAL, patience: Patience | None = None
    ) -> None:
        super().__init__(key, journal)
        self.patience = patience or Patience()
        self.num_unanswered = 0  # questions in a row
        self.num_answers = 0  # of a process that serves
        self.num_short_lives = 0  # in a row, that were followed at once
        self.num_pauses = 0  # in a row
