"""The device of these tests.

Without CUDA they are skipped, but for the kernels themselves: where Triton is installed,
`TRITON_INTERPRET=1` runs them on the CPU, in minutes.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from epd.engine.kernels import Kernels, fast

PRETENDED = False  # of `compiled.py`: kernels are compiled and not run
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and bool(importlib.util.find_spec("triton"))


@pytest.fixture(scope="session")
def cuda() -> str:
    if not (torch.cuda.is_available() or PRETENDED):
        pytest.skip("no CUDA device")
    return "cuda"


@pytest.fixture(scope="session")
def two_gpus(cuda: str) -> None:
    """For tests that are marked so."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device; two are needed")


@pytest.fixture(scope="session")
def kernel_device() -> str:
    """Where kernels run: a GPU, or the interpreter."""
    if torch.cuda.is_available() or PRETENDED:
        return "cuda"
    if not INTERPRETED:
        pytest.skip("no CUDA device, and Triton is not interpreted (TRITON_INTERPRET=1)")
    return "cpu"


@pytest.fixture(params=["triton", "library"])
def attention(request: pytest.FixtureRequest) -> Kernels:
    """The kernels, with attention of prompts and towers by each that can be had."""
    if request.param == "triton":
        return Kernels(on_cuda=True)
    library = fast.library()
    if not library:
        pytest.skip("no library of attention for this device (epd[fast])")
    return Kernels(on_cuda=True, library=library)
