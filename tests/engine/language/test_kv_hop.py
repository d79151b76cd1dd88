"""KV that leaves a device's pool, and that arrives in front of one; no device is asked."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from epd.engine.device.row_memory import read_bytes
from epd.engine.device.streams import KV_IN
from epd.engine.language import kv_hop
from epd.engine.language.kv_hop import KvHop
from epd.engine.language.kv_pool import KvPool
from epd.messages import KvLayout
from epd.transport.cuda.device import is_scattered

LAYOUT = KvLayout(
    num_layers=2, block_size=4, num_kv_heads=1, head_dim=3, dtype="float32",
    block_nbytes=2 * 2 * 4 * 3 * 4,
)  # fmt: skip
SLOTS, BLOCKS = [5, 6, 2, 0, 1], [3, 7, 0, 6, 1]


def test_what_lands_in_several_runs_is_in_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_hop, "register", lambda buffer, owner: read_bytes(buffer))
    pool = KvPool(LAYOUT, 8, torch.float32, "cpu")
    streams: Any = SimpleNamespace(
        device=torch.device("cpu"), kv_in_stream=None, upload=lambda *pieces: torch.cat(pieces)
    )
    hop, size = KvHop(pool, streams), LAYOUT.block_nbytes
    arrived = np.random.default_rng(3).integers(0, 256, (7, size), dtype=np.uint8)
    memory = memoryview(arrived.reshape(-1))
    hop.attach(memory)
    pool.memory.fill_(9)
    assert hop.land(memory, SLOTS, BLOCKS).lane == KV_IN
    landed = torch.from_numpy(arrived)[SLOTS]
    assert torch.equal(pool.memory[BLOCKS], landed)
    assert bool((pool.memory[[2, 4, 5]] == 9).all())
    assert torch.equal(hop._landed(memory, SLOTS), landed), "likewise what comes head by head"
    of_device: Any = None  # the pool's memory
    assert torch.equal(hop._landed(of_device, BLOCKS), landed), "a copy of what landed in place"


def test_what_leaves_is_copied_from_the_pool_slot_by_slot() -> None:
    pool = KvPool(LAYOUT, 8, torch.float32, "cpu")
    pool.memory.random_()
    slots = [9, 2, 3, 14]
    streams: Any = None  # nothing is launched
    source = KvHop(pool, streams).source(slots)
    assert is_scattered(source)
    assert source.slot_nbytes == LAYOUT.slot_nbytes
    assert source.nbytes == 4 * LAYOUT.slot_nbytes
    found = [ctypes.string_at(at, source.slot_nbytes) for at in source.addresses.tolist()]
    assert b"".join(found) == b"".join(pool.slot_views(slots))
