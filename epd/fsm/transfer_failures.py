"""Why a TRANSFER failed: the actions that note it, for its owner and for the other end."""

from __future__ import annotations

from epd.fsm.kernel import Event
from epd.fsm.transfer import (
    AbortReceived,
    BytesReady,
    CancelReceived,
    CommitReceived,
    DoubtReceived,
    GrantReceived,
    PublishFailed,
    SourceFailed,
    Transfer,
    WriteOutcomeUnknown,
    WriteRefused,
    keep_grant,
    keep_source,
)


def keep_failure(transfer: Transfer, event: SourceFailed | AbortReceived | DoubtReceived) -> None:
    transfer.failure = (event.kind, event.reason, event.retryable)


def keep_refusal(transfer: Transfer, event: WriteRefused | WriteOutcomeUnknown) -> None:
    transfer.failure = ("transfer", event.reason, True)


def keep_broken_bytes(transfer: Transfer, event: BytesReady) -> None:
    keep_source(transfer, event)
    _note_broken_contract(transfer)


def keep_broken_grant(transfer: Transfer, event: GrantReceived) -> None:
    keep_grant(transfer, event)
    _note_broken_contract(transfer)


def _note_broken_contract(transfer: Transfer) -> None:
    reason = (
        f"contract check failed: producer has {transfer.meta} of {transfer.nbytes} bytes, "
        f"consumer granted {transfer.grant}"
    )
    transfer.failure = ("contract", reason, False)


def note_short_commit(transfer: Transfer, event: CommitReceived) -> None:
    transfer.failure = (
        "contract",
        f"committed {event.nbytes} bytes where {transfer.nbytes} were granted",
        False,
    )


def note_bad_bytes(transfer: Transfer, event: PublishFailed) -> None:
    transfer.failure = ("transfer", event.reason, True)


def note_called_off(transfer: Transfer, event: CancelReceived) -> None:
    reason = f"instance {transfer.peer.instance_id} does not want it any more"
    transfer.failure = event.failure or ("transfer", reason, True)


def note_lost(transfer: Transfer, event: Event) -> None:
    transfer.failure = ("lost", f"instance {transfer.peer.instance_id} was lost", True)


def note_silent(transfer: Transfer, event: Event) -> None:
    transfer.failure = ("transfer", f"instance {transfer.peer.instance_id} does not answer", True)


def note_late(transfer: Transfer, event: Event) -> None:
    transfer.failure = ("deadline", "the transfer did not end before its deadline", False)
