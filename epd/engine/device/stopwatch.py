"""How long work takes where it runs, from the making of a stopwatch to its `stop`."""

from __future__ import annotations

import time

import torch


class HostStopwatch:
    """Of work that is over when its call returns."""

    def __init__(self) -> None:
        self._began_s = time.perf_counter()
        self._elapsed_s = 0.0

    def stop(self) -> None:
        self._elapsed_s = time.perf_counter() - self._began_s

    def elapsed_s(self) -> float:
        return self._elapsed_s


class DeviceStopwatch:
    """Of what the current CUDA stream is given, whatever it has to do before."""

    def __init__(self) -> None:
        self._began, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._began.record()

    def stop(self) -> None:
        self._ended.record()

    def elapsed_s(self) -> float:
        """To be asked when the device has passed the end."""
        return self._began.elapsed_time(self._ended) / 1e3


def stopwatch_of(*, on_gpu: bool) -> HostStopwatch | DeviceStopwatch:
    return DeviceStopwatch() if on_gpu else HostStopwatch()
