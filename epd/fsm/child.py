"""CHILD: one process that a supervisor keeps, over all its lives.

Theory of operation
-------------------
A child that ends before it ever served shows a mistake in the configuration: it is FAILED, its
error is printed, and everything stops. A child that ends later is started again as a new epoch,
after a pause that doubles. After a long life the pause starts from its first value again.

A child that is asked to stop drains for a bounded time; then it is killed. The request to stop may
come while its process is still being made: the process gets it as soon as it is there.
"""

from __future__ import annotations

from dataclasses import dataclass

from epd.fsm.kernel import (
    Effect,
    Event,
    Ignore,
    Machine,
    Owned,
    Row,
    State,
    Table,
    Timers,
)


class Own(Owned):
    PROCESS = "a process, or one that is being made"


class S(State):
    PENDING = "to be started"
    STARTING = "its first process is made, and loads", Own.PROCESS
    SERVING = "its process serves", Own.PROCESS
    PAUSED = "its process has ended; another is started when the pause is over"
    RESTARTING = "another process is made, and loads", Own.PROCESS
    STOPPING = "its process was asked to drain and end, or will be when it is made", Own.PROCESS
    KILLING = "its process was killed; the kernel tells when it is gone", Own.PROCESS
    STOPPED = "ended, as it was asked to"
    FAILED = "ended before it ever served"


class Do(Effect):
    LAUNCH = "make a process, and tell it what to be"
    ARM_LIFE = "fire LivedLong later"
    FIRST_PAUSE = "let its next pause be the first one again"
    ARM_PAUSE = "fire StartDue after the pause; the next one is longer"
    SEND_TERM = "ask the process, if it is made, to drain and end"
    SEND_INT = "ask it to end at once"
    SEND_KILL = "kill it"
    ARM_KILL = "fire KillDue when it has had time to drain"
    ARM_GONE = "fire KillDue when a process that was killed should be gone"
    TELL_SERVED = "say that it has served"
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
    """It said so."""


@dataclass(slots=True)
class LivedLong(Event):
    by_time = True


@dataclass(slots=True)
class Ended(Event):
    ends = (Own.PROCESS,)
    exit_status: int


@dataclass(slots=True)
class StopRequested(Event):
    pass


@dataclass(slots=True)
class HurryRequested(Event):
    """Whoever asked it to stop does not want to wait for it."""


@dataclass(slots=True)
class KillDue(Event):
    by_time = True


_LIVES = (S.STARTING, S.SERVING, S.RESTARTING)
_WAITS = (S.PENDING, S.PAUSED)
_LEAVES = (S.STOPPING, S.KILLING)
_OVER = (S.STOPPED, S.FAILED)

# One line per row, as the table that it is.
# fmt: off
ROWS = (
    Row(S.PENDING, StartDue, S.STARTING, (Do.LAUNCH, Do.ARM_LIFE)),
    Row(S.PAUSED, StartDue, S.RESTARTING, (Do.LAUNCH, Do.ARM_LIFE)),
    Row((S.STARTING, S.RESTARTING), Served, S.SERVING, (Do.TELL_SERVED,)),
    Row(_LIVES, LivedLong, None, (Do.FIRST_PAUSE, Do.ARM_LIFE)),
    Row(S.STARTING, (Ended, LaunchFailed), S.FAILED, (Do.TELL_FAILED,), note="a mistake in the configuration"),
    Row(S.SERVING, Ended, S.PAUSED, (Do.ARM_PAUSE,), note="its next life has a new epoch (F44)"),
    Row(S.RESTARTING, (Ended, LaunchFailed), S.PAUSED, (Do.ARM_PAUSE,), note="the next one is longer"),
    Row(_WAITS, StopRequested, S.STOPPED, (Do.TELL_STOPPED,)),
    Row(_LIVES, StopRequested, S.STOPPING, (Do.SEND_TERM, Do.ARM_KILL)),
    Row(_LEAVES, Launched, None, (Do.SEND_TERM,), note="asked while it was being made"),
    Row(S.STOPPING, HurryRequested, None, (Do.SEND_INT,)),
    Row(_LEAVES, KillDue, S.KILLING, (Do.SEND_KILL, Do.ARM_GONE)),
    Row(_LEAVES, (Ended, LaunchFailed), S.STOPPED, (Do.TELL_STOPPED,)),
)

IGNORES = (
    Ignore(_LIVES, (Launched,), "it was told what to be, and says how far it is"),
    Ignore((S.SERVING, *_LEAVES), (Served,), "said before, or nobody waits for it"),
    Ignore((*_WAITS, *_LIVES), (HurryRequested,), "it was not asked to stop"),
    Ignore((S.KILLING,), (HurryRequested,), "nothing is faster"),
    Ignore(_LEAVES, (StopRequested,), "asked before"),
    Ignore(_OVER, (StopRequested, HurryRequested), "it is over"),
)

_HELD: dict[State, str] = {
    S.STARTING: "reading weights may take long; who waits for the whole cluster bounds it",
    S.RESTARTING: "reading weights may take long; the others serve meanwhile",
    S.SERVING: "it serves until it ends or is asked to",
    S.KILLING: "only the kernel ends it",
}
_TIMERS: Timers = {
    StartDue: (Do.ARM_PAUSE,),
    LivedLong: (Do.ARM_LIFE,),
    KillDue: (Do.ARM_KILL, Do.ARM_GONE),
}
TABLE = Table("CHILD", __doc__ or "", S, S.PENDING, _OVER, ROWS, IGNORES, _HELD, _TIMERS)
# fmt: on


class Child(Machine):
    """`key` is the child's name."""

    table = TABLE
    __slots__ = ()
