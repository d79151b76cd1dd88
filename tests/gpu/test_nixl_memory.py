"""NIXL between GPUs: device memory of two processes, written from where it lies."""

from __future__ import annotations

import pytest

from epd.transport.cuda.driver import missing as cuda_lacks
from epd.transport.nixl.library import missing
from epd_lab.bench.transports.hop_device import measure
from tests.gpu.test_cuda_transport import answers_over

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def able(two_gpus: None) -> None:
    if reason := cuda_lacks() or missing():
        pytest.skip(reason)


async def test_rows_and_scattered_kv_arrive_byte_by_byte() -> None:
    figures = await measure(5, "nixl")  # raises where a byte differs
    assert {"rows", "KV/1", "KV/4", "last/36"} <= {figure.what for figure in figures}


async def test_answers_are_those_of_shared_memory() -> None:
    assert await answers_over("nixl", 60) == await answers_over("shm", 60)
