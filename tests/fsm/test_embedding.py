"""EMBEDDING: one load per hash, whoever waits; rows stay while anybody refers to them."""

from __future__ import annotations

import pytest

from epd.failure import Failure, FailureKind
from epd.fsm.embedding import (
    Do,
    Embedding,
    EncoderLost,
    EvictionRequested,
    IdleTimePassed,
    LeaseGranted,
    Loaded,
    LoadFailed,
    LoadLate,
    LoadLost,
    LoadTimedOut,
    NoRoomCame,
    RetryDue,
    RivalWanted,
    S,
    SlotsReturned,
    Unwanted,
    Wanted,
)
from tests.fsm.paths import follow
from tests.fsm.tables import make_embedding

ROWS = Loaded("rows", (1, 2))
FAILURE = Failure(FailureKind.LOST, "the encoder is gone")
ASKED = (Do.ARM_NO_ROOM, Do.ASK_ROOM, Do.ARM_RETRY)
ARRIVE = (Do.KEEP_ROWS, Do.CANCEL_FOLLOWERS, Do.NOTIFY_READY)


@pytest.fixture
def loading() -> Embedding:
    made = make_embedding()
    made.fire(Wanted("a", "item a"))
    made.fire(LeaseGranted())
    return made


def test_a_second_waiter_follows_the_same_load(loading: Embedding) -> None:
    """F37: ABSENT -> REQUESTED -> LOADING -> RESIDENT, with two waiters and one transfer."""
    follow(loading, (Wanted("b", "item b"), S.LOADING, ()), (ROWS, S.RESIDENT, ARRIVE))
    assert loading.waiters == {"a": "item a", "b": "item b"}
    assert loading.slots == (1, 2)


@pytest.mark.parametrize("outcome", [LoadFailed, LoadTimedOut, LoadLost, EncoderLost])
def test_another_room_takes_over_when_the_load_fails(
    loading: Embedding, outcome: type[LoadFailed]
) -> None:
    """F19: LOADING -> REQUESTED -> LOADING -> RESIDENT through the follower's encoder."""
    loading.fire(Wanted("b", "item b"))
    follow(
        loading,
        (outcome(FAILURE), S.REQUESTED, (Do.OPEN_TRANSFER,)),
        (LeaseGranted(), S.LOADING, (Do.ARM_LATE,)),
        (ROWS, S.RESIDENT, ARRIVE),
    )
    assert loading.room == "b"


@pytest.mark.parametrize(
    ("outcome", "state"),
    [(LoadFailed, S.FAILED), (LoadTimedOut, S.FAILED), (LoadLost, S.QUARANTINED)],
)
def test_without_another_room_every_waiter_is_told(
    loading: Embedding, outcome: type[LoadFailed], state: S
) -> None:
    """LOADING -> FAILED, or QUARANTINED while the transfer still owns the slots."""
    follow(loading, (outcome(FAILURE), state, (Do.NOTIFY_FAILED,)))
    assert loading.failure == FAILURE


def test_images_of_a_lost_encoder_come_in_another_room(loading: Embedding) -> None:
    """F59: LOADING -> AWAITING_ROOM -> REQUESTED -> LOADING -> RESIDENT."""
    follow(
        loading,
        (EncoderLost(FAILURE), S.AWAITING_ROOM, ASKED),
        (SlotsReturned(), S.AWAITING_ROOM, ()),
        (RetryDue(), S.AWAITING_ROOM, (Do.ASK_ROOM, Do.ARM_RETRY)),
        (Wanted("a.1", "item a"), S.REQUESTED, (Do.OPEN_TRANSFER,)),
        (LeaseGranted(), S.LOADING, (Do.ARM_LATE,)),
        (ROWS, S.RESIDENT, ARRIVE),
    )


def test_a_room_that_does_not_come_is_not_waited_for(loading: Embedding) -> None:
    """F59, F15: AWAITING_ROOM -> FAILED, with the loss as the reason."""
    follow(
        loading,
        (EncoderLost(FAILURE), S.AWAITING_ROOM, ASKED),
        (NoRoomCame(), S.FAILED, (Do.NOTIFY_FAILED,)),
    )
    assert loading.failure == FAILURE


def test_who_leaves_waits_for_no_other_room(loading: Embedding) -> None:
    """AWAITING_ROOM -> EVICTED with the last waiter."""
    loading.fire(Wanted("b", "item b"))
    loading.fire(EncoderLost(FAILURE))
    follow(
        loading,
        (EncoderLost(FAILURE), S.AWAITING_ROOM, ASKED),
        (Unwanted("a"), S.AWAITING_ROOM, ()),
        (Unwanted("b"), S.EVICTED, ()),
    )


def test_an_abandoned_load_finishes_and_stays_as_cache(loading: Embedding) -> None:
    """F21: LOADING -> ABANDONED -> RESIDENT -> EVICTED; the slots return."""
    follow(
        loading,
        (Unwanted("a"), S.ABANDONED, (Do.CANCEL_TRANSFER, Do.CANCEL_ROOM)),
        (ROWS, S.RESIDENT, (Do.KEEP_ROWS, Do.CANCEL_FOLLOWERS)),
        (EvictionRequested(), S.EVICTED, (Do.RELEASE_ROWS,)),
    )


def test_a_new_waiter_of_an_abandoned_load_joins_it(loading: Embedding) -> None:
    """F22: LOADING -> ABANDONED -> LOADING -> RESIDENT: exactly one load."""
    follow(
        loading,
        (Unwanted("a"), S.ABANDONED, (Do.CANCEL_TRANSFER, Do.CANCEL_ROOM)),
        (Wanted("b", "item b"), S.LOADING, ()),
        (ROWS, S.RESIDENT, ARRIVE),
    )


def test_a_resurrected_load_that_was_cancelled_starts_anew(loading: Embedding) -> None:
    """F22: ABANDONED -> LOADING -> REQUESTED: the cancel was faster, the new room loads."""
    loading.fire(Unwanted("a"))
    loading.fire(Wanted("b", "item b"))
    follow(loading, (LoadFailed(FAILURE), S.REQUESTED, (Do.OPEN_TRANSFER,)))
    assert loading.room == "b"


def test_rows_are_not_evicted_while_somebody_waits_or_reads(loading: Embedding) -> None:
    """F23, F24: RESIDENT stays until the last reference is gone."""
    loading.fire(ROWS)
    follow(
        loading,
        (EvictionRequested(), S.RESIDENT, ()),
        (Wanted("b", "item b"), S.RESIDENT, (Do.NOTIFY_ONE,)),
        (Unwanted("a"), S.RESIDENT, ()),
        (IdleTimePassed(), S.RESIDENT, ()),
        (Unwanted("b"), S.RESIDENT, ()),
        (EvictionRequested(), S.EVICTED, (Do.RELEASE_ROWS,)),
    )


def test_a_quarantined_load_does_not_block_its_hash(loading: Embedding) -> None:
    """QUARANTINED -> REQUESTED with new slots; the old ones return to the transfer's pool."""
    follow(
        loading,
        (LoadLost(FAILURE), S.QUARANTINED, (Do.NOTIFY_FAILED,)),
        (Unwanted("a"), S.QUARANTINED, ()),
        (Wanted("b", "item b"), S.REQUESTED, (Do.OPEN_TRANSFER,)),
        (SlotsReturned(), S.REQUESTED, ()),
        (LeaseGranted(), S.LOADING, (Do.ARM_LATE,)),
        (ROWS, S.RESIDENT, ARRIVE),
    )


def test_leaving_before_slots_are_there_leaves_the_queue() -> None:
    """REQUESTED -> EVICTED; the failure of what was cancelled changes nothing."""
    made = make_embedding()
    follow(
        made,
        (Wanted("a", "item a"), S.REQUESTED, (Do.OPEN_TRANSFER,)),
        (Unwanted("a"), S.EVICTED, (Do.CANCEL_TRANSFER, Do.CANCEL_ROOM)),
        (LoadFailed(FAILURE), S.EVICTED, ()),
    )


# --- two loads: one is late -----------------------------------------------------------------------

RIVAL = RivalWanted("a.1", "item a")
OUTCOMES = [LoadFailed, LoadTimedOut, LoadLost, EncoderLost]


@pytest.fixture
def hedged(loading: Embedding) -> Embedding:
    follow(
        loading,
        (LoadLate(), S.LOADING, (Do.ASK_RIVAL,)),
        (RIVAL, S.HEDGED, (Do.OPEN_RIVAL,)),
    )
    return loading


@pytest.mark.parametrize(("first", "second"), [("a", "a.1"), ("a.1", "a")])
def test_the_first_of_two_loads_wins(hedged: Embedding, first: str, second: str) -> None:
    """F62: LOADING -> HEDGED -> RESIDENT; the other one is cancelled, whichever it is."""
    assert hedged.loads == ("a", "a.1")
    rows = Loaded(f"rows of {first}", (3,), first)
    follow(
        hedged,
        (LeaseGranted(), S.HEDGED, ()),
        (rows, S.RESIDENT, (Do.CANCEL_RIVAL, *ARRIVE)),
    )
    assert (hedged.room, hedged.rival) == (first, second)
    assert (hedged.rows, hedged.slots, hedged.loads) == (f"rows of {first}", (3,), (first,))


@pytest.mark.parametrize("outcome", OUTCOMES)
@pytest.mark.parametrize(("fails", "stays"), [("a", "a.1"), ("a.1", "a")])
def test_of_two_loads_the_other_goes_on(
    hedged: Embedding, outcome: type[LoadFailed], fails: str, stays: str
) -> None:
    """F62: HEDGED -> LOADING -> RESIDENT, or FAILED with the second one."""
    follow(
        hedged,
        (LeaseGranted(), S.HEDGED, ()),
        (outcome(FAILURE, fails), S.LOADING, (Do.END_RACE,)),
    )
    assert hedged.loads == (stays,)
    follow(hedged, (LoadFailed(FAILURE, stays), S.FAILED, (Do.NOTIFY_FAILED,)))


def test_a_rival_that_is_left_alone_may_still_wait_for_slots(hedged: Embedding) -> None:
    """F62: HEDGED -> REQUESTED -> LOADING."""
    follow(
        hedged,
        (EncoderLost(FAILURE, "a"), S.REQUESTED, (Do.END_RACE,)),
        (LeaseGranted(), S.LOADING, (Do.ARM_LATE,)),
    )
    assert hedged.room == "a.1"


def test_a_second_race_knows_nothing_of_the_first(hedged: Embedding) -> None:
    """F62: the rival of the first had slots, that of the second waits for them."""
    follow(
        hedged,
        (Wanted("b", "item b"), S.HEDGED, ()),
        (LeaseGranted(), S.HEDGED, ()),
        (LoadFailed(FAILURE, "a"), S.LOADING, (Do.END_RACE,)),
        (LoadFailed(FAILURE, "a.1"), S.REQUESTED, (Do.OPEN_TRANSFER,)),
        (LeaseGranted(), S.LOADING, (Do.ARM_LATE,)),
        (LoadLate(), S.LOADING, (Do.ASK_RIVAL,)),
        (RivalWanted("b.1", "item b"), S.HEDGED, (Do.OPEN_RIVAL,)),
        (LoadFailed(FAILURE, "b"), S.REQUESTED, (Do.END_RACE,)),
    )


def test_who_leaves_two_loads_leaves_one_to_end(hedged: Embedding) -> None:
    """F62, F21: HEDGED -> ABANDONED -> RESIDENT."""
    follow(
        hedged,
        (Wanted("b", "item b"), S.HEDGED, ()),
        (Unwanted("b"), S.HEDGED, (Do.CANCEL_ROOM,)),
        (Unwanted("a"), S.HEDGED, (Do.CANCEL_ROOM,)),
        (
            Unwanted("a.1"),
            S.ABANDONED,
            (Do.CANCEL_RIVAL, Do.CANCEL_TRANSFER, Do.CANCEL_ROOM),
        ),
        (Loaded("rows", (1,), "a"), S.RESIDENT, (Do.KEEP_ROWS, Do.CANCEL_FOLLOWERS)),
    )


def test_a_rival_that_comes_late_is_one_more_room(loading: Embedding) -> None:
    """F62: the load has failed, or has ended, before the gateway's answer came."""
    loading.fire(EncoderLost(FAILURE, "a"))
    follow(loading, (RIVAL, S.REQUESTED, (Do.OPEN_TRANSFER,)))
