"""Traces of what an instance's threads and its device do, for as long as somebody asks.

torch's profiler, started and stopped on the launch thread, where device work is queued; it sees
the operations of all threads.  A trace is a Chrome trace, written by a pool thread while work goes
on; https://ui.perfetto.dev opens it.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from epd.engine.base import EngineError
from epd.engine.executor import DeviceExecutor


class TorchProfiler:
    """Implements `epd.engine.base.Profiler`; one trace at a time."""

    def __init__(self, executor: DeviceExecutor, directory: str, name: str) -> None:
        self._executor = executor
        self._directory = Path(directory)
        self._name = name
        self._running: profile | None = None
        self._num_traces = 0

    async def start(self) -> None:
        await self._executor.launch(self._start)

    async def stop(self) -> str:
        recorded = await self._executor.launch(self._stop)
        return await self._executor.compute(self._write, recorded)

    def _start(self) -> None:
        if self._running is not None:
            raise EngineError("it is being profiled already; stop that first")
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its own lines say nothing to an operator
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        self._running = profile(activities=activities, experimental_config=everywhere)
        self._running.start()

    def _stop(self) -> profile:
        running, self._running = self._running, None
        if running is None:
            raise EngineError("it is not being profiled; start that first")
        running.stop()
        return running

    def _write(self, recorded: profile) -> str:
        self._num_traces += 1
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"{self._name}-{os.getpid()}-{self._num_traces}.trace.json.gz"
        recorded.export_chrome_trace(str(path))
        return str(path)
