"""The hardware that stands beside every figure."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Sequence


def describe() -> dict[str, str | float | int]:
    """Of this machine, as far as Linux shows it."""
    return {
        "cpu": _first("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": os.cpu_count() or 0,
        "memory_gib": round(int(_first("/proc/meminfo", "MemTotal").split()[0]) / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1min": round(os.getloadavg()[0], 2),  # what else ran when the measurement began
    }


def gpus() -> list[str]:
    """Names of the NVIDIA GPUs that are visible, with the driver's version; none without its
    tools."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    if indices := _visible():
        command += ["-i", ",".join(map(str, indices))]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [", driver ".join(line.split(", ")) for line in told.stdout.splitlines() if line]


def energy_j() -> float:
    """What the visible GPUs took since their driver was loaded; 0 where none counts it."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0.0
    total, count = 0, ctypes.c_uint()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return 0.0
    for index in _visible() or range(count.value):
        card, mj = ctypes.c_void_p(), ctypes.c_ulonglong()
        if not nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(card)):
            nvml.nvmlDeviceGetTotalEnergyConsumption(card, ctypes.byref(mj))
        total += mj.value
    return total / 1e3


def _visible() -> list[int]:
    """The indices that CUDA_VISIBLE_DEVICES leaves; empty where all are, or where it has UUIDs."""
    indices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return [int(index) for index in indices] if all(map(str.isdecimal, indices)) else []


def counted(names: Sequence[str]) -> list[str]:
    """Alike ones once, with their number: `4 x NVIDIA H200, driver 580.159.04`."""
    return [f"{n} x {name}" if n > 1 else name for name, n in Counter(names).items()]


def sentence(machine: dict[str, str | float | int]) -> str:
    return (
        "{cpu}, {cores} cores, {memory_gib} GiB, Linux {kernel}, Python {python}, "
        "load {load_1min} at the start".format(**machine)
    )


def _first(path: str, name: str) -> str:
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return ""
