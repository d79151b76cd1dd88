"""Private directories, engines with devices, and no descriptor left behind by any test."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.transport.device_family import Family


@pytest.fixture
def private(tmp_path: Path) -> Path:
    os.chmod(tmp_path, 0o700)
    return tmp_path


@pytest.fixture
async def family(private: Path) -> AsyncIterator[Family]:
    made = Family(str(private))
    yield made
    await made.close()


@pytest.fixture(autouse=True)
def no_descriptor_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    if any(name in request.node.nodeid for name in ("mooncake", "nixl")):
        return  # an engine of theirs keeps its own where somebody may still write to it
    assert len(os.listdir("/proc/self/fd")) <= before + 8  # pyzmq's own collector, once
