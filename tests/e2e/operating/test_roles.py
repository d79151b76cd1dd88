"""Roles that change under load, by real processes: no stream is lost, and no token is another.

One switch in the short form is in `test_drains.py`, over a cluster that is there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from epd.tiny import CHECKPOINT
from tests.e2e.server import READY_S, Server, run, serving, wait_for
from tests.e2e.streams import (
    PATIENT,
    all_have_said,
    ask_during,
    check_same_afterwards,
    questions,
    wait_until_replaced,
)

pytestmark = pytest.mark.timeout(900)
ROLES = ("encode", "prefill", "decode")


def switch(server: Server, name: str, roles: Sequence[str]) -> dict[str, Any]:
    """When its next life serves; what the gateway shows of that."""
    began_s = time.monotonic()
    epoch = server.instances()[name]["epoch"]
    body = {"instance": name, "roles": [*roles], "within_s": 0}
    asked = urllib.request.Request(
        f"{server.base_url}/role",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=READY_S) as answer:
        assert answer.status == 200

    wait_until_replaced(server, name, epoch)
    print(f"{name} {'+'.join(roles)} {time.monotonic() - began_s:.2f} s")
    return server.instances()[name]


@pytest.mark.long
async def test_sixty_switches_under_load() -> None:
    """Each instance in turn, of six, has other roles, while streams are read."""
    chosen = [("decode",), ("encode",), ("prefill",), ("prefill", "decode"), ROLES]
    names = ("e1", "p1", "d1")
    with serving("2e2p2d", **PATIENT) as server:
        wait_for(lambda: len(server.instances()) == 6, READY_S, "all are there")
        pids = {name: one["pid"] for name, one in server.instances().items()}
        number = 0

        def change() -> None:
            nonlocal number
            for _ in range(6):
                name, had = names[number % 3], server.instances()[names[number % 3]]["roles"]
                roles = next(r for r in chosen[number % 5 :] + chosen if [*r] != had)
                now = switch(server, name, roles)
                assert now["roles"] == [*roles], now
                number += 1

        for seed in range(10):
            bodies = questions(20 + seed, 12, 56, 400)
            replies = await ask_during(server, bodies, change, all_have_said)
            assert await check_same_afterwards(server, bodies, replies) == {"answered": 12}
        assert number == 60
        assert {name: one["pid"] for name, one in server.instances().items()} == pids


@pytest.mark.long
def test_what_cannot_be_loaded_leaves_the_former_roles(tmp_path: Path) -> None:
    """And the reason is told; the process of a later kill has them, too."""
    model = shutil.copytree(CHECKPOINT, tmp_path / "model")
    with serving("2epd", "--model", str(model), **PATIENT) as server:
        assert switch(server, "epd1", ("decode",))["roles"] == ["decode"]
        for path in model.glob("*.safetensors"):
            path.rename(path.with_suffix(".away"))
        status, text = run("role", "epd1", "encode", "--url", server.base_url)
        assert status == 1 and "epd1 serves decode as before: it cannot have the roles" in text
        assert "safetensors" in server.instances()["epd1"]["reason"]
        for path in model.glob("*.away"):
            path.rename(path.with_suffix(".safetensors"))
        epoch = server.instances()["epd1"]["epoch"]
        os.kill(server.pid("epd1"), signal.SIGKILL)
        wait_until_replaced(server, "epd1", epoch)
        assert server.instances()["epd1"]["roles"] == ["decode"]
