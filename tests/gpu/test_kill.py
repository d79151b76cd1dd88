"""Processes that are killed while they compute on GPUs: nothing is lost, and the memory comes back.

Two of each role, over the transport between GPUs, in turn on the GPUs that are here.
"""

from __future__ import annotations

import os
import signal

import pytest
import torch

from epd.transport.cuda.driver import missing
from tests.e2e.faults.test_kill import WHEN
from tests.e2e.server import READY_S, serving, wait_for
from tests.e2e.streams import (
    PATIENT,
    ask_during,
    check_same_afterwards,
    questions,
    wait_until_replaced,
)

pytestmark = [pytest.mark.gpu, pytest.mark.more_gpus, pytest.mark.timeout(400)]
SETTINGS = {"transport": "cuda", "engine__dtype": "float32", "engine__kv_nbytes": "512MiB"}
FREED_WITHIN_S = 10.0
DRIVER_NBYTES = 256 << 20  # that contexts differ by


def in_use() -> list[int]:
    """Bytes of each device, whoever has them."""
    devices = range(torch.cuda.device_count())
    return [total - free for free, total in map(torch.cuda.mem_get_info, devices)]


async def test_each_role_loses_one_of_two(cuda: str) -> None:
    if reason := missing():
        pytest.skip(reason)
    devices = ",".join(f"cuda:{n}" for n in range(torch.cuda.device_count()))
    with serving("2e2p2d", engine__device=devices, **SETTINGS, **PATIENT) as server:
        wait_for(lambda: len(server.instances()) == 6, READY_S, "all have joined")
        first = questions(90, 4, side=200, num_tokens=20)
        await ask_during(server, first, lambda: None, None)
        before = in_use()
        for number, name in enumerate(("e0", "p0", "d0")):
            entry = server.instances()[name]
            bodies = questions(91 + number, 10, side=250, num_tokens=200)

            def kill(pid: int = entry["pid"]) -> None:
                os.kill(pid, signal.SIGKILL)

            replies = await ask_during(server, bodies, kill, WHEN[name])
            wait_until_replaced(server, name, entry["epoch"])
            assert await check_same_afterwards(server, bodies, replies) == {"answered": 10}
            server.check_all_returned()
            wait_for(
                lambda: all(
                    now < then + DRIVER_NBYTES for now, then in zip(in_use(), before, strict=True)
                ),
                FREED_WITHIN_S,
                f"the GPUs' memory is as before {name} died ({before}; now {in_use()})",
            )
