"""ADAPTER: one LoRA adapter under its name, at the gateway, from its load to the end of its unload.

Theory of operation
-------------------
The gateway owns the list of adapters, as it owns the registry.  It sends the list whole to each
instance that computes, after each change and to whoever has not applied it; heartbeats
have what an instance holds.  So a lost message is made up for, and an instance that joins late or
was restarted holds the adapter before a request is placed there.  Instances bring their last list
when they join, so a gateway that was restarted loads what the former one listed.

An adapter is offered as a model when every such instance holds it.  If one of them cannot, the
others drop it, too.  An unloaded adapter takes no new request; the open ones go on, for a while.
Then it is not listed any more: instances end what is left of its requests, and its memory comes
back.  Its name and its place among `max_loras` are free after that.

An instance that does not answer is no reason to keep a name for ever: it has the list when it
speaks again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from epd.frontend import Adapter, Refused
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
from epd.records import Address


class Do(Effect):
    SEND_LIST = "send the list to every instance"
    SEND_AGAIN = "send it to an instance that has not applied it"
    OFFER = "offer it as a model"
    WITHDRAW = "offer it no more"
    COUNT_REQUESTS = "look whether requests of it are open"
    ANSWER = "answer who asked for the load or the unload"
    FREE_NAME = "another adapter may have its name and its place"
    ARM_LOADING = "fire TimedOut later"
    ARM_RETIRING = "fire TimedOut when open requests have had their time"
    ARM_REMOVING = "fire TimedOut when whoever lives has answered"


class Own(Owned):
    MODEL = "a place among the models", Do.WITHDRAW
    MEMORY = "memory at instances: a place in the list", Do.SEND_LIST
    ASKER = "who asked, and waits for the answer", Do.ANSWER
    NAME = "its name", Do.FREE_NAME


class S(State):
    NAMED = "its name is taken", Own.NAME
    LOADING = "instances read it; nobody may name it yet", Own.MEMORY, Own.ASKER, Own.NAME
    SERVING = "a model that requests may name", Own.MODEL, Own.MEMORY, Own.NAME
    RETIRING = "no model any more; its open requests go on", Own.MEMORY, Own.ASKER, Own.NAME
    REMOVING = "not listed; instances give its memory back", Own.ASKER, Own.NAME
    GONE = "its name is free"


@dataclass(slots=True)
class LoadAsked(Event):
    """A client wants it, whose files were read at the gateway; or a former gateway listed it."""

    asker: Callable[[], None]


@dataclass(slots=True)
class HeldFromStart(Event):
    """Instances have it by their settings."""


@dataclass(slots=True)
class ListApplied(Event):
    """By every instance, each of which holds all of it but what is refused."""

    num_instances: int


@dataclass(slots=True)
class InstanceBehind(Event):
    """A heartbeat came of one that has not applied the list."""

    by_time = True  # INSTANCE has the clock
    instance: Address


@dataclass(slots=True)
class LoadRefused(Event):
    """Some instance cannot hold it."""

    reason: str


@dataclass(slots=True)
class UnloadAsked(Event):
    asker: Callable[[], None]


@dataclass(slots=True)
class RequestEnded(Event):
    """A request that names it."""


@dataclass(slots=True)
class LastRequestEnded(Event):
    """None that names it is open."""


@dataclass(slots=True)
class TimedOut(Event):
    by_time = True


def nobody() -> None:
    """Waits for an answer."""


def is_held(adapter: LoadedAdapter, event: ListApplied) -> bool:
    """By somebody."""
    return event.num_instances > 0


def keep_asker(adapter: LoadedAdapter, event: LoadAsked | UnloadAsked) -> None:
    adapter.asker = event.asker


def keep_reason(adapter: LoadedAdapter, event: LoadRefused) -> None:
    adapter.refusal = Refused(400, event.reason)


def note_late(adapter: LoadedAdapter, event: TimedOut) -> None:
    reason = "not every instance has loaded the adapter in time; try again when all are healthy"
    adapter.refusal = Refused(503, reason)


_OPEN = (S.LOADING, S.SERVING, S.RETIRING, S.REMOVING)

# One line per row, as the table that it is.
# fmt: off
ROWS = (
    Row(S.NAMED, LoadAsked, S.LOADING, (Do.SEND_LIST, Do.ARM_LOADING), keep_asker),
    Row(S.NAMED, HeldFromStart, S.SERVING, (Do.OFFER,)),
    Row(_OPEN, InstanceBehind, None, (Do.SEND_AGAIN,), note="it joined late, was restarted, or missed it"),
    Row(S.LOADING, ListApplied, S.SERVING, (Do.OFFER,), when=is_held),
    Row(S.LOADING, ListApplied, None, when=unless(is_held), note="there is no instance yet"),
    Row(S.LOADING, LoadRefused, S.REMOVING, (Do.ARM_REMOVING,), keep_reason, note="the others give it back"),
    Row((S.NAMED, S.LOADING), TimedOut, S.REMOVING, (Do.ARM_REMOVING,), note_late),
    Row(S.SERVING, UnloadAsked, S.RETIRING, (Do.ARM_RETIRING, Do.COUNT_REQUESTS), keep_asker),
    Row(S.RETIRING, RequestEnded, None, (Do.COUNT_REQUESTS,)),
    Row(S.RETIRING, (LastRequestEnded, TimedOut), S.REMOVING, (Do.ARM_REMOVING,), note="by time, instances end what is open"),
    Row(S.REMOVING, (ListApplied, TimedOut), S.GONE, note="who is silent has the list when it speaks"),
)

IGNORES = (
    Ignore((S.SERVING, S.RETIRING), (ListApplied,), "another adapter has come or gone"),
    Ignore((S.SERVING, S.RETIRING, S.REMOVING), (LoadRefused,), "nothing is placed where it is not held"),
    Ignore((S.NAMED, S.LOADING, S.SERVING, S.REMOVING, S.GONE), (RequestEnded,), "nobody waits for its end"),
    Ignore((S.REMOVING, S.GONE), (LastRequestEnded,), "it was counted twice"),
    Ignore((S.NAMED, S.GONE), (InstanceBehind, ListApplied, LoadRefused), "it is not listed"),
)

_HELD: dict[State, str] = {S.SERVING: "it serves until a client unloads it"}
_TIMERS: Timers = {TimedOut: (Do.ARM_LOADING, Do.ARM_RETIRING, Do.ARM_REMOVING)}
TABLE = Table("ADAPTER", __doc__ or "", S, S.NAMED, (S.GONE,), ROWS, IGNORES, _HELD, _TIMERS)
# fmt: on


class LoadedAdapter(Machine):
    """`key` is its name; `path`: below the operator's directory, empty if it is of the start."""

    table = TABLE
    __slots__ = ("asker", "named", "path", "refusal")

    def __init__(self, named: Adapter, path: str, journal: Journal = NULL_JOURNAL) -> None:
        super().__init__(named.name, journal)
        self.named = named
        self.path = path
        self.asker: Callable[[], None] = nobody
        self.refusal: Refused | None = None  # why it could not be loaded

    @property
    def is_listed(self) -> bool:
        """Whether instances are to hold it."""
        return Own.MEMORY in self.state.owns

    @property
    def may_run(self) -> bool:
        """Whether requests that name it are placed."""
        return self.state in (S.SERVING, S.RETIRING)

    @property
    def is_at_work(self) -> bool:
        """Whether somebody waits for it."""
        return Own.ASKER in self.state.owns
