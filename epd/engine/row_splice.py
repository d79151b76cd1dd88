"""Embedding rows from wherever they lie to the tokens that they stand for.

Rows wider than the hidden size carry deepstack levels side by side; level d is added to the hidden
states behind decoder layer d, at the places that the chunk's rows cover.  Rows in pinned host
memory are read by the device itself; others are staged by the driver.  Either way they must stay
leased until the step's future has ended.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from epd.engine.base import Rows, RowSpan, StepSequence
from epd.engine.decoder import AddedRows
from epd.messages import RowContract


class RowSplicer:
    """Rows of one contract on one device."""

    def __init__(self, contract: RowContract, dtype: torch.dtype, device: torch.device) -> None:
        self._contract = contract
        self._dtype = dtype
        self._device = device

    def splice(self, embeds: torch.Tensor, batch: Sequence[StepSequence]) -> list[AddedRows]:
        """Put rows over placeholders of `embeds`, `[T, H]`, in place; gives what is left to add."""
        hidden = self._contract.hidden
        added: list[AddedRows] = []
        first = 0
        for sequence in batch:
            for span in sequence.spans:
                at = first + span.at
                rows = self._rows(span)
                embeds[at : at + len(rows)] = rows[:, :hidden]
                if self._contract.num_deepstack:
                    levels = rows[:, hidden:].unflatten(1, (-1, hidden)).transpose(0, 1)
                    added.append(AddedRows(at, levels))
            first += len(sequence.token_ids)
        return added

    def _rows(self, span: RowSpan) -> torch.Tensor:
        """The rows of a span, `[count, row_width]`, from one tensor or from byte views."""
        stop = span.row_start + span.count
        if isinstance(span.rows, Rows):
            return span.rows.tensor[span.row_start : stop].to(self._device, non_blocking=True)
        rows = torch.empty(
            span.count, self._contract.row_width, dtype=self._dtype, device=self._device
        )
        first = 0  # index of the first row of the view among the item's rows
        for view in span.rows:
            data = torch.frombuffer(view, dtype=torch.uint8).view(-1, self._contract.row_nbytes)
            low, high = max(first, span.row_start), min(first + len(data), stop)
            if low < high:
                piece = data[low - first : high - first].view(self._dtype)
                rows[low - span.row_start : high - span.row_start].copy_(piece, non_blocking=True)
            first += len(data)
        return rows
