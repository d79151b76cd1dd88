"""What comes late finds every machine prepared, and who waits has a clock.

Messages of peers, timers and outcomes of threads are under way while states change.  So whatever
may come in a state from elsewhere may still come in every state after it: there must be a row for
it, or a written reason to ignore it.  The exceptions are what the machine's own role says about
what it sees at that very moment, and what is answered exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from epd.fsm import adapter as a
from epd.fsm import child as c
from epd.fsm import embedding as m
from epd.fsm import encoding as e
from epd.fsm import generation as g
from epd.fsm import group as n
from epd.fsm import incoming as i
from epd.fsm import link as k
from epd.fsm import membership as p
from epd.fsm import outgoing as o
from epd.fsm import request as r
from epd.fsm.kernel import Effect, Event, IllegalEvent, State
from epd.fsm.laws import closure, edges_of
from tests.fsm.tables import KINDS, Kind, make_event, make_link
from tests.fsm.test_every_cell import cells, forced, in_cell

# By machine: events that are said of the moment, and do not come late.
OF_THE_MOMENT: dict[str, dict[str, str]] = {
    "GENERATION": {
        "Admitted": "once, first",
        "Prepared": "once, by the API",
        "TurnCame LateFound": "once, to who is in the queue",
        "Placed NoTopology TopologyUnknown": "placing ends with its outcome",
        "ImageMoved ImageHedged": "of the present attempt, whose images are wanted",
    },
    "REQUEST": {
        "EmbeddingsRequired TextOnly KvOffered KvInherited": "once, first",
        "MoveRequested": "of who is at work: who has ended is not found",
        "Scheduled StepLaunched Preempted Grown Slid PlanFailed": "of who is in queue or batch now",
        "ChunkComputed LayersComputed FirstTokenSampled LastTokenSampled PromptHeld TokenSampled"
        " StepFailed StepReturned": "how a step ends depends on whether who is in it has left",
        "EmbeddingsPromised EmbeddingReady EmbeddingFailed": "at a decode instance there are none",
        "RemoteKvArrived KvWithdrawn KvDelivered KvFailed": "once, by the one transfer",
    },
    "ENCODING": {
        "Requested": "a hash that has ended gets a new machine",
        "BatchStarted": "of who is in the queue for batches now",
        "TurnCame": "once, to who is in the queue",
        "PreprocessSucceeded PreprocessFailed PreprocessCrashed EncodeSucceeded EncodeFailed": ""
        "the one work's end",
    },
    "EMBEDDING": {
        "Wanted RivalWanted": "a hash that has ended gets a new machine",
        "LeaseGranted Loaded LoadFailed LoadTimedOut LoadLost EncoderLost": "by a load",
    },
    "OUTGOING": {
        "BytesReady SlotsLeased": "once",
        "WriteSucceeded WriteRefused WriteOutcomeUnknown": "the one write's end",
    },
    "INCOMING": {
        "BlocksLeased SlotsLeased": "once",
        "Published PublishFailed": "the one publishing's end",
    },
    "INSTANCE": {"JoinRejected": "once, first"},
    "LINK": {"PeerForgotten": "its clock rings once"},
    "CHILD": {
        "StartDue AskDue KillDue": "there is one clock, and it is the present state's",
        "Launched LaunchFailed Served Answered Waits DeclaredLost Ended Drained": "of the one"
        " process",
    },
    "GROUP": {
        "RankJoined": "once, first",
        "JoinMissed ProbeDue AnswerMissed EndMissed": "the clock of the present state",
        "CommandDone": "of the oldest command, which is under way",
    },
    "FAN_OUT": {"PartWritten PartFailed PartUnknown": "of each part, once"},
    "OFFER": {
        "Offered": "once, first",
        "RoomReplaced RivalAdded": "of a room whose rows are wanted",
    },
    "ADAPTER": {
        "LoadAsked HeldFromStart": "once, first",
        "UnloadAsked LastRequestEnded": "of one that is offered, or counted, now",
    },
    "MEMBERSHIP": {"GatewayFellSilent": "its clock rings once, and is wound by what is heard"},
}
# Of these, what may come all the same: in every state but those named.
ALL_THE_SAME: dict[str, dict[str, str]] = {
    "REQUEST": {
        "EmbeddingReady EmbeddingFailed": "ARRIVED WAITING_FOR_REMOTE_KV CALLED_OFF",
        "EmbeddingsPromised": "ARRIVED WAITING_FOR_REMOTE_KV CALLED_OFF TRANSFERRING"
        " DECODING MOVING",
        "KvFailed": "ARRIVED WAITING WAITING_FOR_EMBEDDINGS HELD",
    },
    "EMBEDDING": {"LoadFailed LoadTimedOut LoadLost EncoderLost": "ABSENT RESIDENT AWAITING_ROOM"},
    "OUTGOING": {"BytesReady": "PARKED AWAITING_SLOTS WRITING WRITTEN DELIVERED"},
}
# Or when it has ended: the outcome is late, or was called off.
AFTER_THE_END: dict[str, str] = {
    "REQUEST": "Scheduled RemoteKvArrived KvWithdrawn KvDelivered",
    "ENCODING": "TurnCame PreprocessSucceeded PreprocessFailed PreprocessCrashed EncodeSucceeded"
    " EncodeFailed",
    "EMBEDDING": "LeaseGranted",
}
# Entering a state arms the clocks that bound the wait in it.
CLOCKS: dict[State, set[Effect]] = {
    g.S.PREPARING: {g.Do.ARM_DEADLINE, g.Do.ARM_PATIENCE},
    g.S.AWAITING_TOPOLOGY: {g.Do.AWAIT_TOPOLOGY, g.Do.ARM_TOPOLOGY},
    g.S.PLACED: {g.Do.ARM_ATTEMPT},
    g.S.STREAMING: {g.Do.ARM_ATTEMPT, g.Do.ARM_PATIENCE},
    g.S.CANCELLING: {g.Do.ARM_ABORT},
    g.S.STOPPING: {g.Do.ARM_ABORT},
    r.S.ABORTING: {r.Do.ARM_GRACE},
    r.S.CALLED_OFF: {r.Do.ARM_GRACE},
    r.S.FINISHING: {r.Do.ARM_GRACE},
    r.S.HELD: {r.Do.ARM_LEASE},
    e.S.DEFERRED: {e.Do.ARM_OUTCOME},
    o.S.EXPIRE_PENDING: {o.Do.ARM_GRACE},
    i.S.EXPIRE_PENDING: {i.Do.ARM_GRACE},
    m.S.AWAITING_ROOM: {m.Do.ARM_NO_ROOM, m.Do.ARM_RETRY},
    k.S.MUTE: {k.Do.ARM_TIMEOUT},
    k.S.UNREACHABLE: {k.Do.ARM_TIMEOUT},
    c.S.PAUSED: {c.Do.ARM_PAUSE},
    c.S.STOPPING: {c.Do.ARM_KILL},
    c.S.KILLING: {c.Do.ARM_GONE},
    n.S.READY: {n.Do.ARM_PROBE},
    n.S.STEPPING: {n.Do.ARM_ANSWER},
    n.S.CLOSING: {n.Do.ARM_END},
    a.S.LOADING: {a.Do.ARM_LOADING},
    a.S.RETIRING: {a.Do.ARM_RETIRING},
    a.S.REMOVING: {a.Do.ARM_REMOVING},
    p.S.JOINING: {p.Do.ARM_JOIN},
    p.S.AWAITING_NAME: {p.Do.ARM_SILENCE},
    p.S.MEMBER: {p.Do.ARM_SILENCE},
    p.S.CUT_OFF: {p.Do.ARM_JOIN},
}
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def is_taken(kind: Kind, state: State, event: type[Event]) -> bool:
    try:
        in_cell(kind, state).fire(make_event(event))
    except IllegalEvent:
        return False
    return True


@cache
def legal(kind: Kind, state: State) -> set[str]:
    """What a machine in this state takes, tried."""
    return {event.__name__ for event in kind.table.events if is_taken(kind, state, event)}


def outcomes(kind: Kind) -> Iterator[tuple[str, type[Event], State, State, set[Effect]]]:
    """Every row, fired: what happened, from where to where, and what was ordered."""
    for state, event, outcome in cells(kind.table):
        with forced(kind.table, state, event, bool(outcome)):
            machine = in_cell(kind, state)
            effects = machine.fire(make_event(event))
        where = f"{kind.name}: {event.__name__} in {state.name}"
        yield where, event, state, machine.state, set(effects)


def of_the_moment(kind: Kind) -> set[str]:
    return {name for names in OF_THE_MOMENT[kind.name] for name in names.split()}


@each_kind
def test_what_comes_late_is_taken_in_every_state_after(kind: Kind) -> None:
    table = kind.table
    assert of_the_moment(kind) <= {event.__name__ for event in table.events}
    for state in table.states:
        for after in closure([state], edges_of(table)):
            missing = legal(kind, state) - legal(kind, after) - of_the_moment(kind)
            assert not missing, f"{table.name}: from {state.name} to {after.name}"


@each_kind
def test_who_has_ended_takes_what_is_still_to_come(kind: Kind) -> None:
    table = kind.table
    wanted = {event.__name__ for event in table.events} - of_the_moment(kind)
    wanted |= set(AFTER_THE_END.get(kind.name, "").split())
    for state in table.terminal:
        assert wanted <= legal(kind, state), f"{table.name}: {state.name}"


@each_kind
def test_what_may_come_in_most_states_is_taken_there(kind: Kind) -> None:
    for names, never in ALL_THE_SAME.get(kind.name, {}).items():
        for state in kind.table.states:
            if state.name not in never.split():
                missing = set(names.split()) - legal(kind, state)
                assert not missing, f"{kind.name}: {state.name}"


@each_kind
def test_who_waits_has_a_clock(kind: Kind) -> None:
    """F15: it is armed with the change of state, whatever led to it."""
    for where, _, state, target, effects in outcomes(kind):
        if target is not state:
            assert CLOCKS.get(target, set()) <= effects, where


def test_who_is_in_quarantine_has_asked_for_its_end() -> None:
    """F7, F8: of a fence, of the own engine, or of the writer, again and again."""
    asks = {i.Do.START_FENCE, i.Do.ARM_RETRY, o.Do.SETTLE_WRITE}
    for kind in KINDS:
        for where, _, state, target, effects in outcomes(kind):
            if target in (i.S.QUARANTINED, o.S.QUARANTINED) and state is not target:
                assert asks & effects, where


def test_a_doubt_begins_with_its_clocks() -> None:
    began = make_link().fire(k.Doubted())
    assert {k.Do.SEND_PROBE, k.Do.ARM_RETRY, k.Do.ARM_TIMEOUT} == set(began)


@each_kind
def test_a_clock_that_has_rung_in_vain_is_wound_again(kind: Kind) -> None:
    """What is said again may be lost again; fence, engine and a new transfer have clocks of their
    own, a registry begins once, a pause is shortened once, who chooses instances knows at once
    whether there are any, nobody waits for a rival, and heartbeats come by themselves."""
    for where, event, state, target, effects in outcomes(kind):
        if event.by_time and effects and target is state:
            asks = {i.Do.START_FENCE, o.Do.SETTLE_WRITE, m.Do.OPEN_TRANSFER} & effects
            asks |= {
                p.Do.FORGET_ABSENT,
                p.Do.BEAT,
                g.Do.CHOOSE,
                m.Do.ASK_RIVAL,
                a.Do.SEND_AGAIN,
            } & effects
            arms = {effect for armed in kind.table.timers.values() for effect in armed}
            assert asks or arms & effects, where
