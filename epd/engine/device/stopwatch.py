"""How long work takes where it runs."""

from __future__ import annotations

import time
from typing import Any

import torch


class Stopwatch:
    """From its making to `stop`: of work that is over when its call returns; of a GPU, of what the
    current stream is given, whatever it has to do before."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._now: Any = _event if on_gpu else time.perf_counter
        self._began = self._ended = self._now()

    def stop(self) -> None:
        self._ended = self._now()

    def elapsed_s(self) -> float:
        """To be asked when the device has passed the end."""
        if isinstance(self._began, float):
            return float(self._ended - self._began)
        return float(self._began.elapsed_time(self._ended)) / 1e3


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
