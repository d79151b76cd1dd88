"""Drains and rollouts of real processes under load: no stream is lost, and no token is another."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator

import pytest

from tests.e2e.server import READY_S, Server, discarding, run, serving, wait_for
from tests.e2e.streams import PATIENT, all_have_said, ask_during, check_same_afterwards, questions

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("2epd", **PATIENT) as server:
        yield server


async def rolled_out(server: Server, seed: int, count: int, num_tokens: int) -> None:
    """Streams are read to their end while every instance is restarted."""
    epochs = {name: one["epoch"] for name, one in server.instances().items()}
    bodies = questions(seed, count, 84, num_tokens)

    def roll_out() -> None:
        status, text = run("rollout", "--url", server.base_url, "--within", "0s")
        assert status == 0, text
        for name in epochs:
            assert f"{name} serves again" in text

    replies = await ask_during(server, bodies, roll_out, all_have_said)
    assert any(reply.has_migrated for reply in replies), "it was not under load"
    assert await check_same_afterwards(server, bodies, replies) == {"answered": count}
    now = server.instances()
    assert all(now[name]["epoch"] > epoch for name, epoch in epochs.items())
    assert {one["state"] for one in now.values()} == {"HEALTHY"}
    server.check_all_returned()


async def test_a_rollout_under_load_loses_nothing(server: Server) -> None:
    """Each way of drawing a token, twice moved: recalled at each instance's bound."""
    await rolled_out(server, 1, 5, 700)


async def test_other_roles_under_load_lose_nothing(server: Server) -> None:
    """The same process goes on with them; streams are moved."""
    before, bodies = server.instances()["epd1"], questions(7, 4, 56, 300)

    def change() -> None:
        how = ("--url", server.base_url, "--within", "0s")
        status, text = run("role", "epd1", "encode,prefill", *how)
        assert status == 0 and "epd1 serves encode, prefill" in text, text

    replies = await ask_during(server, bodies, change, all_have_said)
    assert await check_same_afterwards(server, bodies, replies) == {"answered": 4}
    after = server.instances()["epd1"]
    assert after["roles"] == ["encode", "prefill"]
    assert after["pid"] == before["pid"] and after["epoch"] > before["epoch"]


@pytest.mark.long
async def test_three_rollouts_under_load(server: Server) -> None:
    for seed in (2, 3, 4):
        await rolled_out(server, seed, 20, 400)


@pytest.mark.long
@pytest.mark.parametrize("topology", ["2e2p2d", "1e2pd"])
async def test_planned_migration_of_many_streams(topology: str) -> None:
    """200 streams, 40 at a time, whose instance drains at once."""
    with serving(topology, **PATIENT) as server:
        name = "d0" if topology == "2e2p2d" else "pd0"
        wait_for(lambda: name in server.instances(), READY_S, f"{name} serves, too")
        steps_s: list[float] = []
        gaps_s: dict[str, list[float]] = {"moved": [], "recomputed": []}
        for seed in range(5):
            epoch = server.instances()[name]["epoch"]
            bodies, began_s = questions(10 + seed, 40, 56, 200), 0.0

            def drain() -> None:
                nonlocal began_s
                began_s = time.monotonic()
                status, text = run("rollout", name, "--url", server.base_url, "--within", "0s")
                assert status == 0, text

            replies = await ask_during(server, bodies, drain, all_have_said)
            assert any(reply.has_moved_kv for reply in replies)
            for reply in replies:
                first_s, last_s = reply.said_s[0], reply.said_s[-1]
                steps_s += reply.gaps_s(first_s + 1e-9, began_s)
                if reply.has_migrated:
                    how = "moved" if reply.has_moved_kv else "recomputed"
                    gaps_s[how].append(max(reply.gaps_s(began_s, last_s + 1.0)))
            assert await check_same_afterwards(server, bodies, replies) == {"answered": 40}
            assert server.instances()[name]["epoch"] > epoch
    shown = {"topology": topology, "step_ms": spread_ms(steps_s)}
    print(json.dumps(shown | {how: spread_ms(gaps) for how, gaps in gaps_s.items()}))


def spread_ms(times_s: list[float]) -> dict[str, float]:
    """Of gaps between tokens of a stream: between all, or the longest one of each that moved."""
    ordered = sorted(times_s) or [0.0]
    at = {"p50": len(ordered) // 2, "p99": len(ordered) * 99 // 100}
    return {"n": len(times_s)} | {name: round(1e3 * ordered[n], 1) for name, n in at.items()}


def test_who_was_taken_out_stays_out_and_the_only_one_is_not_taken(server: Server) -> None:
    """What is open has its time; a second asker, and one who asks for the last, hear why not."""
    status, text = run("drain", "epd1", "--url", server.base_url)
    assert status == 0 and "epd1 has left" in text
    wait_for(lambda: re.search(r"epd1 .* stopped", server.text), READY_S, "its process has ended")
    assert server.instances()["epd1"]["state"] == "LEFT"
    status, text = run("drain", "epd0", "--url", server.base_url)
    assert status == 1 and "without epd0 no healthy instance has the role" in text
    status, text = run("drain", "epd1", "--url", server.base_url)
    assert status == 1 and "no instance epd1 is a member; there are epd0" in text
    assert server.get("/ready")[0] == 200


@pytest.mark.long
def test_the_only_one_is_taken_by_force() -> None:
    """A command of one instance ends with it, and its gateway waits for another."""
    with discarding(Server("1e1p1d", **PATIENT).wait_ready()) as server:
        began_s = time.monotonic()
        status, text = run("drain", "e0", "--url", server.base_url, "--force")
        assert status == 0 and time.monotonic() - began_s < READY_S, text
        wait_for(lambda: server.get("/ready")[0] == 503, READY_S, "it is missed")
        assert "encode" in json.loads(server.get("/ready")[1])["reason"]
        assert server.stop() == 0
