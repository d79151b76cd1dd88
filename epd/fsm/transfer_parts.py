"""TRANSFER's guards and actions for a source that comes in parts; theory in `epd.fsm.transfer`."""

from __future__ import annotations

from epd.fsm.transfer import (
    BytesReady,
    GrantReceived,
    PartReady,
    Transfer,
    WriteSucceeded,
    keep_grant,
    keep_source,
)


def is_news(transfer: Transfer, event: PartReady) -> bool:
    return event.nbytes > transfer.written_nbytes


def more_is_ready(transfer: Transfer, event: WriteSucceeded) -> bool:
    return transfer.ready_nbytes > transfer.written_nbytes + transfer.part_nbytes


def keep_last_part(transfer: Transfer, event: BytesReady) -> None:
    """All is ready, while a part is being written."""
    keep_source(transfer, event)
    transfer.ready_nbytes = transfer.sent_nbytes


def write_source(transfer: Transfer, event: BytesReady) -> None:
    keep_last_part(transfer, event)
    _write_ready(transfer)


def write_granted(transfer: Transfer, event: GrantReceived) -> None:
    keep_grant(transfer, event)
    transfer.ready_nbytes = transfer.sent_nbytes
    _write_ready(transfer)


def keep_part(transfer: Transfer, event: PartReady) -> None:
    transfer.ready_nbytes = max(transfer.ready_nbytes, event.nbytes)


def write_part(transfer: Transfer, event: PartReady) -> None:
    keep_part(transfer, event)
    _write_ready(transfer)


def _write_ready(transfer: Transfer) -> None:
    transfer.part_nbytes = transfer.ready_nbytes - transfer.written_nbytes


def keep_written(transfer: Transfer, event: WriteSucceeded) -> None:
    transfer.parts += ((transfer.part_nbytes, event.checksum),)
    transfer.written_nbytes += transfer.part_nbytes
    transfer.part_nbytes = 0


def write_next(transfer: Transfer, event: WriteSucceeded) -> None:
    keep_written(transfer, event)
    _write_ready(transfer)
