"""A rank of a group computes on its own device."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from epd.config import InstanceConfig
from epd.engine import factory
from epd.groups import following
from epd.model_files.checkpoint import ModelError
from epd.tiny import CHECKPOINT


class Told:
    """The leader's end of a rank's socket."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.write = self.frames.append

    def is_closing(self) -> bool:
        return False

    async def drain(self) -> None: ...


async def test_a_rank_loads_on_the_thread_whose_device_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which device is current is a thread's own: weights of the second rank lay on the second card,
    and its kernels went to the first."""
    on: list[int] = []

    def builds(*_: Any) -> None:
        on.append(threading.get_ident())

    def loads(*_: Any) -> None:
        on.append(threading.get_ident())
        raise ModelError("no weights")

    monkeypatch.setattr(factory, "build_executor", builds)
    monkeypatch.setattr(following, "load_rank", loads)
    monkeypatch.setattr(following, "open_shard", lambda *_: None)
    config = InstanceConfig(
        instance_id="pd0", roles=("prefill", "decode"), endpoint="tcp://127.0.0.1:*",
        model_dir=str(CHECKPOINT), rank_devices=("cpu",),
    )  # fmt: skip
    told: Any = Told()
    reader = asyncio.StreamReader()
    assert await following.follow(config, 1, following.Rendezvous(1), reader, told) == 1
    assert on[0] == on[1] != threading.get_ident()
    assert told.frames
