"""Rows of images that an encoder has written to the ranks of a simulated group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from epd.engine.base import SlotRows, StepSequence
from epd_lab.sim.engine.engines import SimLanguageEngine
from epd_lab.sim.engine.golden import ROW_NBYTES


class RowsAtRanks:
    """What each rank finds in its slots, or all of them together."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.engines: dict[int, SimLanguageEngine] = {}  # by rank

    def given(self, rank: int, batch: Sequence[StepSequence]) -> list[StepSequence]:
        """As the engine of a rank is given them."""
        return [self._given(rank, sequence) for sequence in batch]

    def found(self, rows: SlotRows) -> list[bytes]:
        """What each rank would read."""
        return [b"".join(Gathered(self, rank, rows)) for rank in range(self.size)]

    def _given(self, rank: int, sequence: StepSequence) -> StepSequence:
        spans = [
            replace(span, rows=Gathered(self, rank, span.rows))
            if isinstance(span.rows, SlotRows)
            else span
            for span in sequence.spans
        ]
        return replace(sequence, spans=spans) if spans else sequence


@dataclass(frozen=True, slots=True)
class Gathered:
    """Rows as they are when the step of a rank reads them."""

    at: RowsAtRanks
    rank: int
    rows: SlotRows

    def __iter__(self) -> Iterator[bytes]:
        size = self.at.size
        for rank in range(size) if self.rows.is_sharded else (self.rank,):
            nbytes = len(self.rows.held(rank, size)) * ROW_NBYTES
            yield from map(bytes, self.at.engines[rank].row_memory.views(self.rows, nbytes))
