"""Which GPUs this process may use, asked of the driver: no torch is loaded, no device is touched.

`cuInit` reads CUDA_VISIBLE_DEVICES as torch does, so both count the same devices.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path
from typing import Any

LIBRARY = "libcuda.so.1"


class NoCuda(Exception):
    """There is no usable GPU; the text has the reason and the remedy."""


def device_sizes(library: Any = None) -> list[int]:
    """Bytes of memory of each GPU, by index.  Raises NoCuda."""
    if library is None:
        try:
            library = ctypes.CDLL(LIBRARY)
        except OSError:
            raise NoCuda(
                f"{LIBRARY}, a part of NVIDIA's driver, is not here: install the driver, or give "
                "the container its GPUs (docker run --gpus all)"
            ) from None
    _ask(library.cuInit(0))
    count = ctypes.c_int()
    _ask(library.cuDeviceGetCount(ctypes.byref(count)))
    return [_size(library, index) for index in range(count.value)]


def _size(library: Any, index: int) -> int:
    device, nbytes = ctypes.c_int(), ctypes.c_size_t()
    _ask(library.cuDeviceGet(ctypes.byref(device), index))
    _ask(library.cuDeviceTotalMem_v2(ctypes.byref(nbytes), device))
    return nbytes.value


def _ask(error: int) -> None:
    if error:
        raise NoCuda(f"NVIDIA's driver reports error {error}: nvidia-smi tells what is wrong")


def torch_has_cuda() -> bool:
    """Whether the installed torch was built with CUDA; True where its files do not have it."""
    spec = importlib.util.find_spec("torch")
    for directory in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(directory) / "version.py"
        if path.is_file():
            return re.search(r"^cuda.*= *None$", path.read_text(), re.MULTILINE) is None
    return True
