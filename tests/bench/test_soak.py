"""The soak passes over every transport in small, and would notice what it looks for."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from epd.transport.backends import BACKENDS
from epd_lab.bench.transports.soak import Soak, SoakPlan, judge
from epd_lab.bench.transports.soak_process import Side, content

LONG = pytest.mark.long


@pytest.mark.parametrize(
    "backend", ["shm", *(pytest.param(b, marks=LONG) for b in ("tcp", "file", "mooncake", "nixl"))]
)
async def test_either_side_is_killed_and_every_item_arrives(backend: str, tmp_path: Path) -> None:
    if reason := BACKENDS[backend].lacks():
        pytest.skip(reason)
    found = await Soak(SoakPlan(backend, items=150, kills=4, seed=5), str(tmp_path)).run()
    assert judge(found) == []
    died = found["counts"].get("soak-owner killed", 0) + found["counts"].get(
        "soak-writer killed", 0
    )
    assert died > 0 and found["counts"]["Written"] >= 150


async def test_a_late_byte_and_a_wrong_one_are_noticed(tmp_path: Path) -> None:
    side = Side()
    side.start("tcp", f"soak-{os.getpid()}", str(tmp_path))
    await side.own(slots=2, slot_nbytes=4096)
    assert side.take(0) and side.take(1)
    region = side._region
    assert region is not None
    region.buffer[4096 + 17] ^= 1
    assert side.take(0) and not side.take(1)
    rows = content(3, 1, 4000)
    np.frombuffer(region.buffer, np.uint8)[:4000] = rows
    good = side.check(0, 4000)
    assert side.take(0), "a slot is guarded again once it was read"
    np.frombuffer(region.buffer, np.uint8)[:4000] = content(3, 2, 4000)  # an earlier attempt's
    assert side.check(0, 4000) != good
    await side.close()


def test_what_does_not_hold_is_said() -> None:
    bad = {
        "items": 10, "slots": 3, "slots_free": 2, "left": ["epd-soak-owner-1.alive"],
        "counts": {"delivered": 9, "wrong bytes": 1, "bytes in a free slot": 2},
    }  # fmt: skip
    assert len(judge(bad)) == 5
    good = {"items": 1, "slots": 1, "slots_free": 1, "left": [], "counts": {"delivered": 1}}
    assert judge(good) == []
