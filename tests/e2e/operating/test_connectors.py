"""Connectors as their users write them, between real processes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from epd.tiny import SAMPLES
from tests.e2e.client import data_url, post_all, question
from tests.e2e.server import serving

pytestmark = pytest.mark.timeout(300)

CAFE = question("What is the total?", data_url((SAMPLES / "receipt-cafe.png").read_bytes()))
ANSWER = "10.85"
MODULE = "tests.contract.example_backend"


def by_module(hop: str, directory: Path) -> tuple[str, str]:
    """A flag that names a connector of somebody else's module."""
    given = {
        "connector": "MappedFiles",
        "connector_module_path": MODULE,
        "role": f"{hop}_both",
        "connector_extra_config": {"directory": str(directory)},
    }
    return f"--{hop}-transfer-config", json.dumps({f"{hop}_{k}": v for k, v in given.items()})


async def test_a_connector_of_others_moves_rows_and_kv(tmp_path: Path) -> None:
    flags = (*by_module("ec", tmp_path), *by_module("kv", tmp_path))
    with serving("1e1p1d", *flags) as server:
        (reply,) = await post_all(server.base_url, [CAFE])
        assert reply.text == ANSWER
        name = f"{MODULE}:MappedFiles"
        assert server.instances()["p0"]["transports"] == {"d0": name, "e0": name}
        owners = {path.name.partition("-")[0] for path in tmp_path.glob("*.mem")}
        assert owners == {"p0", "d0"}, "the receive pool and the KV pools are its memory"
    assert list(tmp_path.iterdir()) == [], "and it is gone with its owners"


@pytest.mark.long
async def test_rows_and_kv_go_between_the_memories_of_devices(tmp_path: Path) -> None:
    """Where host memory stands for a device's; `tests/gpu` has the real ones."""
    os.chmod(tmp_path, 0o700)
    options = json.dumps({"directory": str(tmp_path)})
    name = "tests.transport.fake_device:make"
    with serving("1e1p1d", transport=name, transport_options=options) as server:
        (reply,) = await post_all(server.base_url, [CAFE])
        assert reply.text == ANSWER
        assert server.instances()["p0"]["transports"] == {"d0": name, "e0": name}
    assert list(tmp_path.iterdir()) == []
