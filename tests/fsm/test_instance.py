"""INSTANCE: one life, never trusted again."""

from __future__ import annotations

import pytest

from epd.fsm import instance as i
from epd.observed import Wait
from epd.records import Load
from tests.fsm.paths import follow
from tests.fsm.tables import make_instance

LOSS = (i.Do.FAIL_ATTEMPTS, i.Do.PUBLISH, i.Do.DISCONNECT)
PROBES = (i.Do.SEND_SELF_TEST, i.Do.WATCH, i.Do.SHOW_ALIVE)
STUCK = (i.Do.TELL_STUCK, i.Do.WATCH, i.Do.SHOW_ALIVE)


def beat(for_s: float = 0.0, bound_s: float = 4.0) -> i.HeartbeatReceived:
    wait = Wait(what="step", for_s=for_s, bound_s=bound_s)
    return i.HeartbeatReceived(Load(waits=(wait,)), 0, 0)


@pytest.fixture
def healthy() -> i.Instance:
    made = make_instance()
    made.fire(i.JoinAccepted(0.0))
    return made


def test_joins_are_welcomed_again_and_again(healthy: i.Instance) -> None:
    """F17: JOINING -> HEALTHY -> HEALTHY."""
    follow(healthy, (i.JoinAccepted(0.0), i.S.HEALTHY, (i.Do.WELCOME,)))


def test_a_stranger_is_told_why() -> None:
    """JOINING -> LEFT."""
    made = make_instance()
    follow(made, (i.JoinRejected("models differ"), i.S.LEFT, (i.Do.REFUSE,)))
    assert made.reason == "models differ"


def test_silence_makes_suspect_then_lost_and_never_healthy_again(healthy: i.Instance) -> None:
    """F44: HEALTHY -> SUSPECT -> PROBING -> HEALTHY -> SUSPECT -> LOST."""
    follow(
        healthy,
        (i.HeartbeatMissed(), i.S.SUSPECT, (i.Do.WATCH_ON,)),
        (beat(), i.S.PROBING, PROBES),
        (i.ProbePassed(1), i.S.HEALTHY, ()),
        (i.HeartbeatMissed(), i.S.SUSPECT, (i.Do.WATCH_ON,)),
        (i.HeartbeatsEnded(), i.S.LOST, LOSS),
        (beat(), i.S.LOST, ()),
        (i.JoinAccepted(0.0), i.S.LOST, ()),
    )


def test_who_beats_without_progress_gets_work_after_a_self_test(healthy: i.Instance) -> None:
    """F87: HEALTHY -> STUCK -> PROBING -> HEALTHY; a late answer is of an earlier self-test."""
    seen = STUCK[1:]
    follow(healthy, (beat(4.0, 4.0), i.S.HEALTHY, seen), (beat(4.1), i.S.STUCK, STUCK))
    assert healthy.reason == "makes no progress: step for 4.1 s (bound 4.0 s)"
    assert healthy.is_heard and not healthy.takes_work
    follow(
        healthy,
        (beat(4.6), i.S.STUCK, seen),
        (beat(), i.S.PROBING, PROBES),
        (beat(0.5), i.S.PROBING, PROBES),
        (beat(4.2), i.S.STUCK, STUCK),
        (i.ProbePassed(1), i.S.STUCK, ()),
        (beat(), i.S.PROBING, PROBES),
        (i.ProbePassed(1), i.S.PROBING, ()),
        (i.ProbeFailed(1, "late"), i.S.PROBING, ()),
    )
    assert not healthy.takes_work
    follow(healthy, (i.ProbePassed(2), i.S.HEALTHY, ()), (i.ProbePassed(2), i.S.HEALTHY, ()))
    assert healthy.takes_work and healthy.reason == ""


def test_a_failed_self_test_is_asked_for_again(healthy: i.Instance) -> None:
    """F87: PROBING -> STUCK -> PROBING; silence goes before."""
    follow(
        healthy,
        (i.HeartbeatMissed(), i.S.SUSPECT, (i.Do.WATCH_ON,)),
        (beat(), i.S.PROBING, PROBES),
        (i.ProbeFailed(1, "no memory"), i.S.STUCK, (i.Do.TELL_STUCK,)),
    )
    assert healthy.reason == "its self-test failed: no memory"
    follow(
        healthy,
        (beat(), i.S.PROBING, PROBES),
        (i.HeartbeatMissed(), i.S.SUSPECT, (i.Do.WATCH_ON,)),
        (beat(9.0), i.S.STUCK, STUCK),
        (i.HeartbeatMissed(), i.S.SUSPECT, (i.Do.WATCH_ON,)),
        (i.HeartbeatsEnded(), i.S.LOST, LOSS),
    )


def test_a_new_epoch_ends_the_old_one(healthy: i.Instance) -> None:
    """F44: HEALTHY -> LOST."""
    follow(healthy, (i.EpochReplaced(), i.S.LOST, LOSS))
    assert healthy.reason == "replaced by its next life"


def test_draining_ends_in_left(healthy: i.Instance) -> None:
    """HEALTHY -> DRAINING -> LEFT."""
    follow(
        healthy,
        (i.DrainAnnounced(3.0), i.S.DRAINING, (i.Do.PUBLISH,)),
        (beat(9.0), i.S.DRAINING, (i.Do.WATCH,)),
        (i.HeartbeatMissed(), i.S.DRAINING, (i.Do.WATCH_ON,)),
    )
    assert healthy.load.waits, "what it still has is told until it leaves"
    follow(healthy, (i.LeftReceived(), i.S.LEFT, LOSS))


def test_who_switches_returns_with_other_roles(healthy: i.Instance) -> None:
    """HEALTHY -> SWITCHING -> LEFT; its next epoch is another machine."""
    roles = ("prefill", "decode")
    follow(
        healthy,
        (i.DrainAnnounced(3.0, roles), i.S.SWITCHING, (i.Do.PUBLISH,)),
        (i.DrainAnnounced(0.0, roles), i.S.SWITCHING, (i.Do.MOVE_ATTEMPTS,)),
        (beat(9.0), i.S.SWITCHING, (i.Do.WATCH,)),
    )
    assert healthy.is_draining and healthy.is_overdue and not healthy.takes_work
    follow(healthy, (i.LeftReceived(), i.S.LEFT, LOSS))
    assert healthy.reason == "it is to return with the roles prefill, decode"


def test_who_is_healthy_takes_work() -> None:
    instance = make_instance()
    told = [instance.takes_work]
    events = (i.JoinAccepted(0.0), i.HeartbeatMissed(), beat(), i.ProbePassed(1), beat(9.0))
    for event in (*events, i.DrainAnnounced(3.0)):
        instance.fire(event)
        told.append(instance.takes_work)
    assert told == [False, True, False, False, True, False, False]
    assert not instance.was_lost
    instance.fire(i.HeartbeatsEnded())
    assert instance.was_lost
