"""What a vision tower takes and gives, as far as a machine keeps it."""

from __future__ import annotations

from typing import Protocol

Image = bytes | bytearray | memoryview  # compressed


class Patches(Protocol):
    """What it takes."""

    @property
    def num_patches(self) -> int: ...


class Rows(Protocol):
    """What it gives."""

    @property
    def nbytes(self) -> int: ...
