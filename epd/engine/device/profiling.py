"""Traces of what an instance's threads and its device do, for as long as somebody asks.

torch's profiler sees the operations of all threads.  A pool thread starts and stops it and writes
what it has seen as a Chrome trace, which https://ui.perfetto.dev opens, while work goes on.

torch's own binding collects and writes a trace under the interpreter's lock, tens of microseconds
for each operation.  Streams would stand still for seconds, and heartbeats with them.  So both are
called here as C++ calls them (torch/csrc/autograd/profiler_kineto.h), which leaves the lock to the
others.
"""

from __future__ import annotations

import asyncio
import ctypes
import gzip
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch.autograd import profiler

from epd.engine.base import EngineError
from epd.engine.device.executor import DeviceExecutor

CHUNK_NBYTES = 1 << 20
COMPRESSION = 6
_SCOPE = "_ZN5torch8autograd8profiler"
_STRING = "RKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"


class _Owner(ctypes.Structure):
    """`std::unique_ptr<ProfilerResult>`.  It comes back in the caller's memory, as no class of C
    does that is as small; hence the rest."""

    _fields_ = (("result", ctypes.c_void_p), ("rest", ctypes.c_void_p * 3))


class _String(ctypes.Structure):
    """`const std::string`, where nobody reads how much room it has."""

    _fields_ = (
        ("chars", ctypes.c_char_p),
        ("length", ctypes.c_size_t),
        ("room", ctypes.c_size_t * 2),
    )


class _Library:
    """What is called in torch's library; ctypes gives up the interpreter's lock meanwhile."""

    def __init__(self) -> None:
        """Raises AttributeError where this torch has it no more."""
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        self.disable = library[f"{_SCOPE}15disableProfilerEv"]
        self.disable.restype = _Owner
        self._save = library[f"{_SCOPE}14ProfilerResult4saveE{_STRING}"]
        self._end = library[f"{_SCOPE}14ProfilerResultD1Ev"]
        self._free = library["_ZdlPv"]
        for function in (self._save, self._end, self._free):
            function.restype = None

    def save(self, result: int, path: str) -> None:
        text = os.fsencode(path)
        self._save(ctypes.c_void_p(result), ctypes.byref(_String(text, len(text))))

    def delete(self, result: int) -> None:
        self._end(ctypes.c_void_p(result))
        self._free(ctypes.c_void_p(result))


_library = cache(_Library)


class TorchProfiler:
    """Implements `epd.engine.base.Profiler`; one trace at a time."""

    def __init__(self, executor: DeviceExecutor, directory: str, name: str) -> None:
        self._executor = executor
        self._directory = Path(directory)
        self._name = name
        self._turn = asyncio.Lock()
        self._is_running = False
        self._num_traces = 0

    async def start(self) -> None:
        async with self._turn:
            if self._is_running:
                raise EngineError("it is being profiled already; stop that first")
            await self._executor.compute(_start, await self._device())
            self._is_running = True

    async def stop(self) -> str:
        async with self._turn:
            if not self._is_running:
                raise EngineError("it is not being profiled; start that first")
            self._is_running = False
            self._num_traces += 1
            name = f"{self._name}-{os.getpid()}-{self._num_traces}.trace.json.gz"
            path = self._directory / name
            return await self._executor.compute(_stop, path, await self._device())

    async def _device(self) -> int:
        """Of the launch thread, since a thread has its own; -1: a CPU."""
        if not torch.cuda.is_available():
            return -1
        return await self._executor.launch(torch.cuda.current_device)


def _start(device: int) -> None:
    """Not by torch.profiler, which imports a compiler for it."""
    try:
        _library()
    except (AttributeError, OSError) as error:
        raise EngineError(f"torch {torch.__version__} cannot be profiled: {error}") from error
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its own lines say nothing to an operator
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    kind = None if device < 0 else "cuda"
    with torch.cuda.device(device):
        profiler.profile(
            use_device=kind, use_kineto=True, experimental_config=everywhere
        ).__enter__()


def _stop(path: Path, device: int) -> str:
    library = _library()
    with torch.cuda.device(device):
        if device >= 0:
            torch.cuda.synchronize()
        result = library.disable().result
    profiler._run_on_profiler_stop()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            library.save(result, plain := f"{folder}/trace.json")
            with open(plain, "rb") as text, gzip.open(path, "wb", COMPRESSION) as packed:
                shutil.copyfileobj(text, packed, CHUNK_NBYTES)
    finally:
        library.delete(result)
    return str(path)
