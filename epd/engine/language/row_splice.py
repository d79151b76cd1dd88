"""Embedding rows from wherever they lie to the tokens that they stand for.

Rows wider than the hidden size have deepstack levels side by side.  Level d is added to the hidden
states behind decoder layer d, at the places of the chunk's rows.  Rows that are on the device are
read there, or where they went when they arrived (`row_lift`).  Others go up beside the step that
still runs: from pinned host memory, which the device reads itself, or staged by the driver.  All
stay leased until the step's future has ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from epd.engine.base import Buffer, Rows, RowSpan, StepSequence
from epd.engine.device.row_memory import read_bytes, tensor_of
from epd.messages import RowContract

if TYPE_CHECKING:
    from epd.engine.device.streams import DeviceStreams


@dataclass(frozen=True, slots=True)
class AddedRows:
    """Deepstack: `rows[level]` are added behind layer `level` at tokens `[at, at + len)`."""

    at: int
    rows: torch.Tensor  # [levels, count, H]


class LiftedRows(list[Buffer]):
    """Views of an item's rows in host memory, and where they go when they arrive (`row_lift`)."""

    tensor: torch.Tensor  # [num_rows, row_width], on the device
    passed: torch.cuda.Event | None = None  # behind the copy; None behind its turn: it failed

    def on_device(self) -> torch.Tensor | None:
        """For kernels that the current stream gets from now on; None: read the views."""
        if self.passed is None:
            return None
        self.passed.wait()
        return self.tensor


class RowSplicer:
    def __init__(
        self, contract: RowContract, dtype: torch.dtype, streams: DeviceStreams | None = None
    ) -> None:
        """`streams`: of the device that the rows go to; None: they are where they are read."""
        self._contract = contract
        self._dtype = dtype
        self._streams = streams

    @property
    def num_deepstack(self) -> int:
        return self._contract.num_deepstack

    def splice(self, embeds: torch.Tensor, batch: Sequence[StepSequence]) -> list[AddedRows]:
        """Put rows over placeholders of `embeds`, `[T, H]`, in place; gives what is left to add."""
        hidden = self._contract.hidden
        added: list[AddedRows] = []
        first = 0
        for sequence in batch:
            for span in sequence.spans:
                at = first + span.at
                rows = self.rows(span)
                embeds[at : at + len(rows)] = rows[:, :hidden]
                if self._contract.num_deepstack:
                    levels = rows[:, hidden:].unflatten(1, (-1, hidden)).transpose(0, 1)
                    added.append(AddedRows(at, levels))
            first += len(sequence.token_ids)
        return added

    def empty(self, count: int, device: torch.device) -> torch.Tensor:
        return torch.empty(count, self._contract.row_width, dtype=self._dtype, device=device)

    def rows(self, span: RowSpan) -> torch.Tensor:
        """The rows of a span, `[count, row_width]`, where the model is."""
        pieces = list(self._pieces(span))
        if self._streams is not None and pieces[0].device.type == "cpu":
            return self._streams.upload(*pieces)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _pieces(self, span: RowSpan) -> Iterator[torch.Tensor]:
        """They, where they lie: one tensor, or byte views in host memory."""
        stop = span.row_start + span.count
        if isinstance(span.rows, Rows):
            yield tensor_of(span.rows, self._dtype)[span.row_start : stop]
            return
        if isinstance(span.rows, LiftedRows) and (lifted := span.rows.on_device()) is not None:
            yield lifted[span.row_start : stop]
            return
        first = 0  # index of the first row of the view among the item's rows
        for view in span.rows:
            data = read_bytes(view).view(-1, self._contract.row_nbytes)
            low, high = max(first, span.row_start), min(first + len(data), stop)
            if low < high:
                yield data[low - first : high - first].view(self._dtype)
            first += len(data)


def pictures_of(sequence: StepSequence) -> list[tuple[int, int]]:
    """The chunk's runs of embedding rows, by their places in the sequence; neighbours are one."""
    places = ((sequence.start + s.at, sequence.start + s.at + s.count) for s in sequence.spans)
    found: list[tuple[int, int]] = []
    for first, stop in sorted(places):
        if found and found[-1][1] == first:
            first, _ = found.pop()
        found.append((first, stop))
    return found
