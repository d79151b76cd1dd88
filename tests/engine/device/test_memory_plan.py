"""What is left of a GPU's memory, and what a small pool says; no GPU is asked."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epd.config import ConfigError, EngineConfig
from epd.engine.device import memory_plan
from epd.engine.device.memory_plan import RESERVE_NBYTES, KvPlan, kv_plan, log_table
from epd.messages import KvLayout

GIB = 1 << 30
LAYOUT = KvLayout(
    num_layers=48, block_size=16, num_kv_heads=4, head_dim=128, dtype="bfloat16",
    block_nbytes=48 * 16 * 2 * 4 * 128 * 2,
)  # fmt: skip
CONFIG = EngineConfig(device="cuda", kv_nbytes=0, kv_landing_nbytes=2 * GIB)


def plan(
    free: int, later_nbytes: int = 0, config: EngineConfig = CONFIG, wide_nbytes: int = 0
) -> KvPlan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * GIB))
        return kv_plan(config, LAYOUT, later_nbytes, wide_nbytes)


@given(free=st.integers(11 * GIB, 80 * GIB), later_nbytes=st.integers(0, GIB // 2))
def test_all_that_is_planned_is_there(free: int, later_nbytes: int) -> None:
    """The pool and what else the data plane takes are what is free, less the reserve and the share
    of others; landing takes nothing of the device."""
    found = plan(free, later_nbytes)
    left = free - 8 * GIB - RESERVE_NBYTES - later_nbytes
    pool, landing = (count * LAYOUT.block_nbytes for count in found)
    assert left - LAYOUT.block_nbytes < pool <= left + 1
    assert landing == min(
        pool, CONFIG.kv_landing_nbytes // LAYOUT.block_nbytes * LAYOUT.block_nbytes
    )


def test_a_pool_that_is_asked_for_is_what_is_asked_for() -> None:
    config = EngineConfig(device="cuda", kv_nbytes=GIB, kv_landing_nbytes=GIB // 2)
    found = plan(0, GIB, config)
    assert found == KvPlan(GIB // LAYOUT.block_nbytes, GIB // 2 // LAYOUT.block_nbytes)
    config = EngineConfig(device="cuda", kv_nbytes=GIB, kv_landing_nbytes=2 * GIB)
    found = plan(0, GIB, config)
    assert found.num_landing_blocks == found.num_blocks, "no more can arrive than has a place"


def test_no_room_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="--encoder-cache-device-nbytes"):
        plan(10 * GIB)


@pytest.mark.parametrize(
    ("wide_nbytes", "told"),
    [
        (GIB, "--tensor-parallel-size$"),
        (3 * GIB, r"or take its linear layers in four bits, which leaves 2\.2 GiB more$"),
        (16 * GIB, r"in eight bits \(--quantization fp8\), which leaves 8\.0 GiB more$"),
    ],
)
def test_a_format_that_would_leave_room_is_named(wide_nbytes: int, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        plan(8 * GIB, wide_nbytes=wide_nbytes)


@pytest.mark.parametrize(
    ("tokens", "is_told", "is_torchs"), [(8 * 4096, False, True), (8 * 4096 - 16, True, False)]
)
def test_a_small_pool_is_told_of(
    tokens: int,
    is_told: bool,
    is_torchs: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 70 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    with caplog.at_level(logging.INFO, memory_plan.__name__):
        log_table("cuda", 57 * GIB, 3 * GIB, tokens, 4096, 2 * GIB, kv_is_torchs=is_torchs)
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert bool(warned) is is_told
    nbytes = {str(r.args[1]): r.args[2] for r in caplog.records if r.args and len(r.args) == 4}
    assert len(nbytes) == 6
    rest, others = (8, 9) if is_torchs else (11, 6)
    assert nbytes["vision tower, activations, graphs"] == rest
    assert nbytes["contexts, other processes"] == others
