"""Faults of one sequence, found before the step: it fails alone (fault F13)."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from epd.engine.base import Rows, RowSpan, StepSequence
from epd.layouts import PASSED, RowBlocks
from epd.messages import RowContract

if TYPE_CHECKING:
    from epd.engine.language.lora import Bank

MAX_SOUND = 4096  # tables that are remembered


@dataclass(frozen=True, slots=True)
class StepCheck:
    max_context: int
    rows: RowBlocks
    num_state_blocks: int
    num_blocks: int
    vocabulary: int
    row_contract: RowContract | None
    bank: Bank | None = None
    _sound: dict[int, Sequence[int]] = field(default_factory=dict)

    def fault(self, sequence: StepSequence, sampled: Container[str]) -> str:
        """What is wrong, or nothing; `sampled`: whose next token the previous step has."""
        count = len(sequence.token_ids)
        total = sequence.start + count
        blocks = self.num_state_blocks + self.rows.count(total)
        table = sequence.block_table
        if count == 0:
            return "the chunk has no tokens"
        if total > self.max_context:
            return f"{total} tokens where the model takes {self.max_context}"
        if len(table) < blocks:
            return f"{len(table)} KV blocks where {total} tokens need {blocks}"
        if sequence.adapter and (self.bank is None or sequence.adapter not in self.bank.held):
            return "its adapter is not held here"
        copied = all(0 <= b < self.num_blocks for pair in sequence.copies for b in pair)
        if not (copied and self._in_pool(table, sequence.start)):
            return f"a KV block outside the pool of {self.num_blocks}"
        if sequence.is_pending:
            if sequence.request_id not in sampled:
                return "it waits for a token that the previous step did not sample"
        elif min(sequence.token_ids) < 0 or max(sequence.token_ids) >= self.vocabulary:
            return f"a token outside the vocabulary of {self.vocabulary}"
        if sequence.positions is not None and (
            len(sequence.positions) != 3 or any(len(axis) != count for axis in sequence.positions)
        ):
            return f"positions must be 3 x {count}"
        return next(filter(None, (self._span_fault(span, count) for span in sequence.spans)), "")

    def _in_pool(self, table: Sequence[int], start: int) -> bool:
        """All but those that no token from `start` on sees.  Checked once for each tuple: a request
        shows the same one step after step."""
        if self._sound.get(id(table)) is table:
            return True
        least = min(table)
        if least < PASSED or max(table) >= self.num_blocks:
            return False
        if least == PASSED:
            behind = {self.num_state_blocks + place for place in self.rows.behind(start)}
            if any(b == PASSED and at not in behind for at, b in enumerate(table)):
                return False
        if isinstance(table, tuple):
            if len(self._sound) >= MAX_SOUND:
                self._sound.clear()
            self._sound[id(table)] = table
        return True

    def _span_fault(self, span: RowSpan, count: int) -> str:
        if self.row_contract is None:
            return "this model takes no images"
        if span.at < 0 or span.count < 1 or span.at + span.count > count:
            return f"rows [{span.at}, {span.at + span.count}) outside the chunk of {count} tokens"
        if isinstance(span.rows, Rows):
            held, rest = span.rows.num_rows, 0
        else:
            nbytes = [view.nbytes for view in span.rows]
            held = sum(nbytes) // self.row_contract.row_nbytes
            rest = sum(n % self.row_contract.row_nbytes for n in nbytes)
        if rest or span.row_start < 0 or span.row_start + span.count > held:
            return (
                f"rows [{span.row_start}, {span.row_start + span.count}) of an item that holds "
                f"{held} whole rows"
            )
        if self.row_contract.max_uncut and span.left:
            return f"a chunk that ends in a picture, behind {span.count} of its rows"
        return ""
