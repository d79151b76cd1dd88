"""ENCODING: single flight per hash; what a thread or the device owns is waited for."""

from __future__ import annotations

import pytest

from epd.failure import Failure, FailureKind
from epd.fsm.encoding import (
    BatchStarted,
    CopyTimedOut,
    DemotionRequested,
    DemotionSucceeded,
    Do,
    EncodeFailed,
    EncodeSucceeded,
    EncodeTimedOut,
    Encoding,
    EvictionRequested,
    LoadMissed,
    LoadSucceeded,
    LoadTimedOut,
    PreprocessCrashed,
    PreprocessFailed,
    PreprocessSucceeded,
    PromotionSucceeded,
    Requested,
    RoomClosed,
    S,
    TurnCame,
)
from tests.fsm.paths import follow
from tests.fsm.tables import make_encoding

PREPARED = PreprocessSucceeded("patches")
ENCODED = EncodeSucceeded("rows")


@pytest.fixture
def queued() -> Encoding:
    made = make_encoding()
    made.fire(Requested("a"))
    made.fire(TurnCame())
    return made


@pytest.fixture
def encoding(queued: Encoding) -> Encoding:
    queued.fire(PREPARED)
    queued.fire(BatchStarted())
    return queued


def test_work_that_would_run_too_far_ahead_waits_for_its_turn() -> None:
    """F4: DEFERRED -> QUEUED; who leaves before gives the place up, and a late turn the share."""
    made = make_encoding()
    follow(
        made,
        (Requested("a"), S.DEFERRED, (Do.AWAIT_TURN, Do.ARM_OUTCOME)),
        (Requested("b"), S.DEFERRED, ()),
        (RoomClosed("a"), S.DEFERRED, ()),
        (RoomClosed("b"), S.EVICTED, (Do.LEAVE_AHEAD,)),
        (TurnCame(), S.EVICTED, (Do.LEAVE_AHEAD, Do.FREE_PIXELS)),
    )
    late = make_encoding()
    late.fire(Requested("a"))
    follow(late, (EncodeTimedOut(), S.FAILED, (Do.LEAVE_AHEAD, Do.FAIL_ROOMS)))


def test_two_rooms_and_one_encode(queued: Encoding) -> None:
    """F37: QUEUED -> PREPARED -> ENCODING -> RESIDENT; a third room comes later."""
    follow(
        queued,
        (Requested("b"), S.QUEUED, ()),
        (PREPARED, S.PREPARED, (Do.ENQUEUE,)),
        (BatchStarted(), S.ENCODING, ()),
        (ENCODED, S.RESIDENT, (Do.FREE_PIXELS, Do.KEEP_ROWS, Do.STORE_ROWS, Do.FILL_ROOMS)),
        (Requested("c"), S.RESIDENT, (Do.COUNT_AHEAD, Do.FILL_ONE)),
    )
    assert list(queued.rooms) == ["a", "b", "c"]
    assert (queued.image, queued.patches) == (None, None), "what was used up is let go"


def test_a_bad_image_fails_alone(queued: Encoding) -> None:
    """F13: QUEUED -> FAILED, not to be retried elsewhere."""
    follow(
        queued,
        (PreprocessFailed("truncated"), S.FAILED, (Do.LEAVE_AHEAD, Do.FREE_PIXELS, Do.FAIL_ROOMS)),
    )
    assert queued.failure == Failure(FailureKind.MEDIA, "truncated")


def test_a_fault_of_ours_is_not_the_images(queued: Encoding) -> None:
    """F40: QUEUED -> FAILED; the client is not told that its image is bad."""
    follow(
        queued,
        (PreprocessCrashed("a bug"), S.FAILED, (Do.LEAVE_AHEAD, Do.FREE_PIXELS, Do.FAIL_ROOMS)),
    )
    assert queued.failure == Failure(FailureKind.ENGINE, "a bug")


def test_a_failed_batch_may_be_retried_elsewhere(encoding: Encoding) -> None:
    """F40: ENCODING -> FAILED."""
    follow(
        encoding,
        (EncodeFailed("out of memory"), S.FAILED, (Do.LEAVE_AHEAD, Do.FREE_PIXELS, Do.FAIL_ROOMS)),
    )
    assert encoding.failure == Failure(FailureKind.ENGINE, "out of memory")


def test_an_abandoned_batch_finishes_and_is_kept(encoding: Encoding) -> None:
    """F21: ENCODING -> ABANDONED -> RESIDENT -> EVICTED."""
    follow(
        encoding,
        (RoomClosed("a"), S.ABANDONED, ()),
        (ENCODED, S.RESIDENT, (Do.LEAVE_AHEAD, Do.FREE_PIXELS, Do.KEEP_ROWS, Do.STORE_ROWS)),
        (EvictionRequested(), S.EVICTED, (Do.RELEASE_ROWS,)),
    )


def test_an_abandoned_batch_is_joined_again(encoding: Encoding) -> None:
    """F22: ENCODING -> ABANDONED -> ENCODING -> RESIDENT."""
    follow(
        encoding,
        (RoomClosed("a"), S.ABANDONED, ()),
        (Requested("b"), S.ENCODING, ()),
        (ENCODED, S.RESIDENT, (Do.FREE_PIXELS, Do.KEEP_ROWS, Do.STORE_ROWS, Do.FILL_ROOMS)),
    )


def test_an_abandoned_preprocessing_is_joined_again(queued: Encoding) -> None:
    """F22: QUEUED -> ABANDONED -> QUEUED -> PREPARED."""
    follow(
        queued,
        (RoomClosed("a"), S.ABANDONED, ()),
        (Requested("b"), S.QUEUED, ()),
        (PREPARED, S.PREPARED, (Do.ENQUEUE,)),
    )


def test_patches_that_no_batch_has_taken_are_simply_dropped(queued: Encoding) -> None:
    """PREPARED -> EVICTED."""
    queued.fire(PREPARED)
    follow(queued, (RoomClosed("a"), S.EVICTED, (Do.LEAVE_AHEAD, Do.FREE_PIXELS, Do.DEQUEUE)))
    assert queued.patches is None


def test_a_device_that_does_not_answer_is_reported(encoding: Encoding) -> None:
    """ENCODING -> ABANDONED -> FAILED; a late outcome is dropped."""
    follow(
        encoding,
        (EncodeTimedOut(), S.ABANDONED, (Do.FAIL_ROOMS, Do.ARM_OUTCOME)),
        (RoomClosed("a"), S.ABANDONED, ()),
        (EncodeTimedOut(), S.FAILED, (Do.LEAVE_AHEAD, Do.FREE_PIXELS, Do.REPORT_HANG)),
        (ENCODED, S.FAILED, ()),
    )


def test_rows_that_are_still_to_be_sent_are_not_evicted(encoding: Encoding) -> None:
    """F31: RESIDENT stays until its last room is closed."""
    encoding.fire(ENCODED)
    follow(
        encoding,
        (EvictionRequested(), S.RESIDENT, ()),
        (RoomClosed("a"), S.RESIDENT, (Do.LEAVE_AHEAD,)),
        (EvictionRequested(), S.EVICTED, (Do.RELEASE_ROWS,)),
    )


def test_what_is_to_be_encoded_is_known_as_it_was_asked_for() -> None:
    made = make_encoding()
    assert (made.image, made.expected, made.num_rows) == (b"image", (1, 4, 4), 4)
    assert (made.clip, made.bounds, made.stored, made.encodes) == (None, None, False, True)


# --- tiers ----------------------------------------------------------------------------------------


@pytest.fixture
def loading() -> Encoding:
    made = make_encoding(stored=True)
    made.fire(Requested("a"))
    follow(made, (TurnCame(), S.LOADING, (Do.START_LOAD,)))
    return made


def test_a_stored_value_is_loaded_once_for_all_who_wait(loading: Encoding) -> None:
    """F37: LOADING -> DEMOTED; when its last reader has gone it moves up."""
    follow(
        loading,
        (Requested("b"), S.LOADING, ()),
        (LoadSucceeded("rows"), S.DEMOTED, (Do.FREE_PIXELS, Do.KEEP_HOST_ROWS, Do.FILL_ROOMS)),
        (RoomClosed("a"), S.DEMOTED, ()),
        (RoomClosed("b"), S.PROMOTING, (Do.START_PROMOTION, Do.LEAVE_AHEAD)),
        (PromotionSucceeded("device rows"), S.RESIDENT, (Do.KEEP_ROWS,)),
    )
    assert loading.rows == "device rows"


@pytest.mark.parametrize("outcome", [LoadMissed(), LoadTimedOut()])
def test_what_storage_does_not_have_is_encoded(loading: Encoding, outcome: object) -> None:
    """F32: LOADING -> QUEUED; a late answer changes nothing."""
    follow(
        loading,
        (outcome, S.QUEUED, (Do.START_PREPROCESS, Do.ARM_OUTCOME)),
        (LoadSucceeded("late"), S.QUEUED, ()),
    )
    assert (loading.image, loading.rows) == (b"image", None)


@pytest.mark.parametrize("outcome", [LoadMissed(), LoadTimedOut()])
def test_without_a_tower_what_is_not_found_is_absent(outcome: LoadMissed) -> None:
    """F32, F40: for whoever can encode, not for the client; and nothing is preprocessed."""
    finder = make_encoding(stored=True, encodes=False)
    follow(
        finder,
        (Requested("a"), S.DEFERRED, (Do.AWAIT_TURN, Do.ARM_OUTCOME)),
        (TurnCame(), S.LOADING, (Do.START_LOAD,)),
        (outcome, S.FAILED, (Do.LEAVE_AHEAD, Do.FREE_PIXELS, Do.FAIL_ROOMS)),
    )
    failure = finder.failure
    assert failure is not None and failure.kind is FailureKind.ABSENT and failure.retryable
    assert "not in the shared storage" in failure.reason


def test_a_load_that_nobody_waits_for_is_kept_or_forgotten(loading: Encoding) -> None:
    """F21: the read cannot be called back."""
    follow(
        loading,
        (RoomClosed("a"), S.LOADING, ()),
        (LoadMissed(), S.FAILED, (Do.LEAVE_AHEAD, Do.FREE_PIXELS, Do.FAIL_ROOMS)),
    )
    other = make_encoding(stored=True)
    for event in (Requested("a"), TurnCame(), RoomClosed("a")):
        other.fire(event)
    effects = (Do.LEAVE_AHEAD, Do.FREE_PIXELS, Do.KEEP_HOST_ROWS)
    follow(other, (LoadSucceeded("rows"), S.DEMOTED, effects))


def test_rows_go_down_when_nobody_reads_them(encoding: Encoding) -> None:
    """F31: RESIDENT -> DEMOTING -> DEMOTED -> EVICTED."""
    encoding.fire(ENCODED)
    follow(
        encoding,
        (DemotionRequested(), S.RESIDENT, ()),
        (RoomClosed("a"), S.RESIDENT, (Do.LEAVE_AHEAD,)),
        (DemotionRequested(), S.DEMOTING, (Do.START_DEMOTION,)),
        (EvictionRequested(), S.DEMOTING, ()),
        (DemotionSucceeded("host rows"), S.DEMOTED, (Do.KEEP_HOST_ROWS,)),
        (EvictionRequested(), S.EVICTED, (Do.RELEASE_ROWS,)),
    )


@pytest.mark.parametrize("end", [DemotionSucceeded("host rows"), CopyTimedOut()])
def test_rows_that_are_wanted_while_they_go_down_stay(encoding: Encoding, end: object) -> None:
    """DEMOTING -> RESIDENT: the readers keep what they read."""
    encoding.fire(ENCODED)
    encoding.fire(RoomClosed("a"))
    encoding.fire(DemotionRequested())
    follow(
        encoding,
        (Requested("b"), S.DEMOTING, (Do.COUNT_AHEAD, Do.FILL_ONE)),
        (end, S.RESIDENT, (Do.KEEP_ROWS,)),
    )
    assert encoding.rows == "rows"
