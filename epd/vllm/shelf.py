"""Rows that have arrived, where the instance's thread and the engine's scheduler both see them.

The instance's loop puts rows here and takes them away; the scheduler only looks, and counts its
steps.  A tensor is a copy of its slots: whoever has found it may keep it, whatever becomes of the
slots.  Each call is one operation of a dict or a set, so neither thread waits for the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from epd.records import RowContract


class Shelf:
    """Of one engine."""

    def __init__(self, contract: RowContract) -> None:
        self.contract = contract
        self.num_steps = 0  # of the engine
        self._rows: dict[str, torch.Tensor] = {}
        self._coming: set[str] = set()

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, identifier: str, views: Sequence[memoryview]) -> None:
        """`views`: the bytes of its rows, one after the other."""
        flat = torch.empty(sum(view.nbytes for view in views), dtype=torch.uint8)
        memory, at = memoryview(flat.numpy()), 0
        for view in views:
            memory[at : at + view.nbytes] = view.cast("B")
            at += view.nbytes
        rows = flat.view(getattr(torch, self.contract.dtype))
        self._rows[identifier] = rows.view(-1, self.contract.row_width)

    def drop(self, identifier: str) -> None:
        self._rows.pop(identifier, None)

    def find(self, identifier: str) -> torch.Tensor | None:
        """`[rows, row_width]` in host memory, of the contract's dtype."""
        return self._rows.get(identifier)

    def expect(self, identifier: str) -> None:
        """They are on their way."""
        self._coming.add(identifier)

    def settle(self, identifier: str) -> None:
        """They are here, or do not come."""
        self._coming.discard(identifier)

    def is_coming(self, identifier: str) -> bool:
        return identifier in self._coming

    def clear(self) -> None:
        """A life of the instance is over."""
        self._rows.clear()
        self._coming.clear()
