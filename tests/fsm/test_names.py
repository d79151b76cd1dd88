"""INSTANCE: a name has one instance, whoever else asks for it (F78)."""

from __future__ import annotations

import pytest

from epd.fsm import instance as i
from epd.messages import Address, InstanceInfo, Load
from tests.fsm.paths import follow
from tests.fsm.tables import make_instance

LOSS = (i.Do.FAIL_ATTEMPTS, i.Do.PUBLISH, i.Do.DISCONNECT)


def life(epoch: int, lineage: str) -> InstanceInfo:
    address = Address("e0", epoch, "tcp://there:1")
    return InstanceInfo(address=address, roles=(), host_id="", pid=7, lineage=lineage)


@pytest.mark.parametrize(
    ("epoch", "lineage", "replaces"),
    [(3, "a", True), (1, "a", False), (3, "b", False), (3, "", False)],
)
def test_only_a_later_life_of_the_same_parent_replaces(
    epoch: int, lineage: str, *, replaces: bool
) -> None:
    """F78: whoever else has the name has to be lost first."""
    for own in ("a", ""):
        member = i.Instance(life(2, own), Load(), 0.0)
        member.fire(i.JoinAccepted(0.0))
        event = member.asked_for(life(epoch, lineage))
        is_next = replaces and own == "a"
        assert isinstance(event, i.EpochReplaced if is_next else i.NameContested)
        wanted = (event, i.S.LOST, LOSS) if is_next else (event, i.S.HEALTHY, (i.Do.HOLD_OFF,))
        follow(member, wanted)


def test_a_stranger_waits_until_the_other_has_answered() -> None:
    """F78: JOINING -> AWAITING_NAME -> LEFT; a heartbeat of before it asked proves nothing."""
    made, holder = make_instance(), life(1, "a")
    clock = (i.Do.TELL_HELD, i.Do.WATCH_JOINS)
    follow(
        made,
        (i.NameHeld(4, holder, 0.0), i.S.AWAITING_NAME, (i.Do.PUBLISH, *clock)),
        (i.HolderBeat(4, holder), i.S.AWAITING_NAME, ()),
        (i.NameHeld(5, holder, 0.0), i.S.AWAITING_NAME, clock),
        (i.HolderBeat(5, holder), i.S.LEFT, (i.Do.REFUSE,)),
    )
    assert "e0 (pid 7, tcp://there:1)" in made.reason and "--id-prefix" in made.reason


def test_a_stranger_has_the_name_of_who_is_lost_and_is_forgotten_if_it_asks_no_more() -> None:
    """F78: AWAITING_NAME -> HEALTHY, or LOST."""
    welcome = (i.Do.WELCOME, i.Do.PUBLISH, i.Do.WATCH)
    for event, target, effects in (
        (i.JoinAccepted(0.0), i.S.HEALTHY, welcome),
        (i.HeartbeatsEnded(), i.S.LOST, (i.Do.DISCONNECT,)),
    ):
        made = make_instance()
        made.fire(i.NameHeld(1, life(1, ""), 0.0))
        follow(made, (event, target, effects))


def test_who_drains_defends_no_name() -> None:
    healthy = make_instance()
    healthy.fire(i.JoinAccepted(0.0))
    healthy.fire(i.DrainAnnounced(3.0))
    follow(healthy, (i.HeartbeatReceived("less", 0, 0.0), i.S.DRAINING, (i.Do.WATCH,)))
