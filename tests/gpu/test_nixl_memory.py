"""NIXL between GPUs: device memory of two processes, written from where it lies."""

from __future__ import annotations

import pytest
import torch

from epd.tiny import CHECKPOINT
from epd.transport.cuda.driver import missing as cuda_lacks
from epd.transport.nixl.library import missing
from epd_lab.bench.transports.hop_device import measure
from tests.e2e.client import post_all
from tests.e2e.server import serving
from tests.gpu.test_cuda_transport import bodies

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def able(two_gpus: None) -> None:
    if reason := cuda_lacks() or missing():
        pytest.skip(reason)


async def test_rows_and_scattered_kv_arrive_byte_by_byte() -> None:
    figures = await measure(5, "nixl")  # raises where a byte differs
    assert {"rows", "KV/1", "KV/4", "last/36"} <= {figure.what for figure in figures}


async def test_answers_are_those_of_shared_memory() -> None:
    """Three processes on the GPUs in turn, in single precision."""
    said = {}
    for transport in ("shm", "nixl"):
        settings = {
            "transport": transport, "engine__dtype": "float32", "engine__kv_nbytes": "512MiB",
            "engine__device": ",".join(f"cuda:{n}" for n in range(torch.cuda.device_count())),
        }  # fmt: skip
        with serving("1e1p1d", model=CHECKPOINT, **settings) as server:
            assert server.instances()["p0"]["transports"] == {"d0": transport, "e0": transport}
            said[transport] = [r.text for r in await post_all(server.base_url, bodies(60))]
    assert said["nixl"] == said["shm"]
