"""REQUEST: what comes too late, or is told of what it needs no longer."""

from __future__ import annotations

from epd.failure import Failure, FailureKind
from epd.fsm.request import (
    AbortReceived,
    DeadlinePassed,
    Do,
    EmbeddingFailed,
    EmbeddingReady,
    FirstTokenSampled,
    KvDelivered,
    KvWithdrawn,
    RemoteKvArrived,
    Request,
    S,
    Scheduled,
)
from tests.fsm.paths import follow
from tests.fsm.tables import KV, launch
from tests.fsm.test_request import FREE, LAST, LOST, TOKEN


def test_its_deadline_calls_the_transfer_of_kv_off(waiting_for_kv: Request) -> None:
    """F6: WAITING_FOR_REMOTE_KV -> CALLED_OFF -> FINISHED."""
    ends = (Do.SEND_FAILURE, Do.ARM_GRACE, Do.CANCEL_TRANSFER)
    follow(waiting_for_kv, (DeadlinePassed(), S.CALLED_OFF, ends), (LOST, S.FINISHED, ()))
    assert waiting_for_kv.failure is not None
    assert waiting_for_kv.failure.kind is FailureKind.DEADLINE


def test_blocks_that_come_when_it_has_ended_are_given_back(waiting_for_kv: Request) -> None:
    waiting_for_kv.fire(AbortReceived())
    waiting_for_kv.fire(LOST)
    for event, told in (
        (RemoteKvArrived((5, 6), KV), (Do.RELEASE_BLOCKS,)),
        (Scheduled((7, 8)), FREE),
    ):
        follow(waiting_for_kv, (event, S.FINISHED, told))
        assert waiting_for_kv.block_table == event.blocks, "these, and no others"


def test_what_is_told_of_what_it_needs_no_longer_changes_nothing(
    running: Request, decoding: Request
) -> None:
    ended = Failure(FailureKind.LOST, "the encoder is gone")
    for event in (LOST, KvWithdrawn(), KvDelivered(), EmbeddingFailed(ended)):
        follow(decoding, (event, S.DECODING, ()))
    follow(decoding, (EmbeddingReady("r/1/0"), S.DECODING, ()))
    launch(decoding, 1, 1).fire(LAST)
    for event in (LOST, KvWithdrawn(), KvDelivered()):
        follow(decoding, (event, S.FINISHING, ()))
    assert decoding.failure is None
    launch(running, 3).fire(FirstTokenSampled(TOKEN))
    for event in (EmbeddingReady("r/1/0"), EmbeddingFailed(ended)):
        follow(running, (event, S.TRANSFERRING, ()))
