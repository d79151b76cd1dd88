"""A file in memory that can be read until its deadline.

Reading is work too: a file can be made that takes its parser for ever.  Parsers of images and
videos get all their bytes through this, and no parser here asks for none for long.
"""

from __future__ import annotations

import io
import time
from typing import Any


class TooSlow(OSError):
    """The deadline has passed."""


class DeadlineFile(io.BytesIO):
    """Raises TooSlow from `read` when its time is over."""

    def __init__(self, data: Any, timeout_s: float) -> None:
        super().__init__(data)
        self._deadline_s = time.monotonic() + timeout_s

    def read(self, size: int | None = -1, /) -> bytes:
        if time.monotonic() > self._deadline_s:
            raise TooSlow("reading the file took too long")
        return super().read(size)
