"""Where the rows of images stand in a chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from epd.engine.base import Rows, RowSpan, StepSequence
from epd_lab.sim.engine.golden import IMAGE_TOKEN, ROW_NBYTES


def placeholders(sequence: StepSequence) -> Iterator[int]:
    return (at for at, token in enumerate(sequence.token_ids) if token == IMAGE_TOKEN)


def rows_by_position(spans: Sequence[RowSpan]) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for span in spans:
        rows = span.rows.buffer() if isinstance(span.rows, Rows) else b"".join(span.rows)
        for offset in range(span.count):
            at = (span.row_start + offset) * ROW_NBYTES
            found[span.at + offset] = bytes(rows[at : at + ROW_NBYTES])
    return found


def cuts_one(sequence: StepSequence) -> bool:
    """Whether the chunk ends among the rows of an image."""
    return any(span.row_start + span.count < _num_rows(span) for span in sequence.spans)


def _num_rows(span: RowSpan) -> int:
    """Of its whole item."""
    if isinstance(span.rows, Rows):
        return span.rows.num_rows
    nbytes: int = sum(view.nbytes for view in span.rows)
    return nbytes // ROW_NBYTES
