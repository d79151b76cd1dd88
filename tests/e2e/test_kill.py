"""Workers that die or stop in the middle of work: every request has one end, and memory returns.

Answers given during a fault are compared with those to the same questions afterwards, which other
tests compare with transformers.  Pictures are fresh for each fault, so that no cache answers.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import psutil
import pytest

from epd.config import Timing
from epd.tiny import SAMPLES
from tests.e2e.client import Body, data_url, in_session, png, post_all, question
from tests.e2e.server import READY_S, SLOW, Server, serving, wait_for
from tests.engine.conftest import picture
from tests.scenarios import SCENARIOS

pytestmark = pytest.mark.timeout(400)
LONG = pytest.mark.long

DEADLINE_S = 60.0
TIMING = Timing()
LOST_WITHIN_S = TIMING.lost_after_s + TIMING.heartbeat_interval_s + 1.0 * SLOW
HEALTHY = question("What is the total?", data_url((SAMPLES / "receipt-cafe.png").read_bytes()))
ANSWER = "10.85"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("1e1p1d", timing__request_timeout_s=DEADLINE_S) as server:
        yield server


@dataclass(slots=True)
class Streamed:
    """How one streamed request went."""

    status: int = 0
    text: str = ""
    error: dict[str, Any] = field(default_factory=dict)
    is_done: bool = False
    lasted_s: float = 0.0

    def check_has_one_end(self) -> None:
        """A whole answer, or one clear error, in time; after the headers in-band (fault F34)."""
        assert self.lasted_s < DEADLINE_S + 5.0
        assert self.is_done != bool(self.error), self
        if self.error:
            assert self.error["message"] and self.error["code"], self
            assert self.status in {200, 503, 504}, self


def questions(seed: int, count: int, side: int, num_tokens: int) -> list[Body]:
    """About two fresh pictures each; answers of a known length."""
    return [
        question(
            f"question {i}",
            png(picture(1000 * seed + 2 * i, side, side - 10)),
            png(picture(1000 * seed + 2 * i + 1, side - 30, side)),
            max_tokens=num_tokens,
            ignore_eos=True,
        )
        for i in range(count)
    ]


async def stream(
    session: aiohttp.ClientSession, base_url: str, body: Body, on_text: Callable[[], None]
) -> Streamed:
    began_s, found = time.monotonic(), Streamed()
    url = f"{base_url}/v1/chat/completions"
    async with session.post(url, json=body | {"stream": True}) as response:
        found.status = response.status
        if response.status != 200:
            found.error = (await response.json())["error"]
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            assert not found.is_done and not found.error
            if line.strip() == b"data: [DONE]":
                found.is_done = True
                continue
            event = json.loads(line[6:])
            found.error = event.get("error", {})
            for choice in event.get("choices", ()):
                found.text += choice["delta"].get("content") or ""
                if found.text:
                    on_text()
    found.lasted_s = time.monotonic() - began_s
    return found


async def ask_during(
    server: Server, bodies: list[Body], act: Callable[[], None], *, wait_for_text: bool
) -> list[Streamed]:
    """Ask all; when the work is under way, act; read every stream to its end."""
    under_way = asyncio.Event()

    async def work(session: aiohttp.ClientSession) -> list[Streamed]:
        asked = [
            asyncio.create_task(stream(session, server.base_url, body, under_way.set))
            for body in bodies
        ]
        if wait_for_text:
            await asyncio.wait_for(under_way.wait(), DEADLINE_S)
        else:
            await asyncio.sleep(0.4)
        await asyncio.to_thread(act)
        return await asyncio.gather(*asked)

    return await in_session(work)


async def check_same_afterwards(
    server: Server, bodies: list[Body], replies: list[Streamed]
) -> Counter[str]:
    """What was answered during the fault is what is answered without one."""
    afterwards = await post_all(server.base_url, bodies)
    for during, after in zip(replies, afterwards, strict=True):
        during.check_has_one_end()
        if during.is_done:
            assert during.text == after.text
    return Counter("answered" if r.is_done else r.error["code"] for r in replies)


def wait_until_lost(server: Server, name: str, epoch: int, timeout_s: float) -> float:
    """Seconds until the gateway knows that this epoch is gone."""
    began_s = time.monotonic()

    def lost() -> bool:
        entry = server.instances().get(name)
        return entry is None or entry["epoch"] != epoch or entry["state"] in {"LOST", "LEFT"}

    wait_for(lost, timeout_s, f"{name} is lost")
    return time.monotonic() - began_s


def wait_until_replaced(server: Server, name: str, epoch: int) -> None:
    def healthy() -> bool:
        entry = server.instances().get(name)
        return entry is not None and entry["epoch"] > epoch and entry["state"] == "HEALTHY"

    wait_for(healthy, READY_S, f"{name} serves again")


@pytest.mark.parametrize("name", [pytest.param("e0", marks=LONG), "p0", "d0"])
async def test_kill_of_the_only_one(server: Server, name: str) -> None:
    """Fault F19, F20 without a second instance: one end each, then a new epoch serves."""
    entry = server.instances()[name]
    epoch, pid = entry["epoch"], entry["pid"]
    lost_after: list[float] = []

    def kill() -> None:
        os.kill(pid, signal.SIGKILL)
        lost_after.append(wait_until_lost(server, name, epoch, LOST_WITHIN_S))

    bodies = questions(ord(name[0]), 12, side=250, num_tokens=150)
    replies = await ask_during(server, bodies, kill, wait_for_text=name != "e0")
    wait_until_replaced(server, name, epoch)
    outcomes = await check_same_afterwards(server, bodies, replies)
    slowest_s = max(reply.lasted_s for reply in replies)
    print(f"{name} lost after {lost_after[0]:.1f} s; {dict(outcomes)}, last {slowest_s:.1f} s")
    assert (await post_all(server.base_url, [HEALTHY]))[0].text == ANSWER
    server.check_all_returned()


@pytest.mark.parametrize("name", ["p0", *(pytest.param(n, marks=LONG) for n in ("e0", "d0"))])
async def test_stopped_for_too_long(server: Server, name: str) -> None:
    """A worker that is silent for longer than allowed is expelled when it wakes, and replaced."""
    entry = server.instances()[name]
    epoch, pid = entry["epoch"], entry["pid"]

    def stall() -> None:
        os.kill(pid, signal.SIGSTOP)
        try:
            wait_until_lost(server, name, epoch, LOST_WITHIN_S)
        finally:
            os.kill(pid, signal.SIGCONT)

    bodies = questions(10 + ord(name[0]), 6, side=200, num_tokens=100)
    replies = await ask_during(server, bodies, stall, wait_for_text=name != "e0")
    wait_until_replaced(server, name, epoch)
    outcomes = await check_same_afterwards(server, bodies, replies)
    print(f"{name} was expelled; {dict(outcomes)}")
    assert not _is_alive(pid)
    assert (await post_all(server.base_url, [HEALTHY]))[0].text == ANSWER
    server.check_all_returned()


async def test_a_short_stall_harms_nothing(server: Server) -> None:
    """Shorter than the limit: nobody is expelled, every answer is whole."""
    entry = server.instances()["d0"]

    def stall() -> None:
        os.kill(entry["pid"], signal.SIGSTOP)
        time.sleep(TIMING.suspect_after_s / 2)
        os.kill(entry["pid"], signal.SIGCONT)

    bodies = questions(30, 4, side=120, num_tokens=100)
    replies = await ask_during(server, bodies, stall, wait_for_text=True)
    outcomes = await check_same_afterwards(server, bodies, replies)
    assert outcomes == {"answered": 4}
    assert server.instances()["d0"]["epoch"] == entry["epoch"]


async def test_kill_of_the_gateway(server: Server) -> None:
    """Clients see their connection cut; a new gateway serves; the old one's work is given up."""
    (gateway,) = [p for p in server.processes() if "epd.runtime.child" in p.cmdline()]
    bodies = questions(40, 3, side=100, num_tokens=2500)
    with pytest.raises(aiohttp.ClientError):
        await ask_during(server, bodies, gateway.kill, wait_for_text=True)
    server.wait_ready()
    assert (await post_all(server.base_url, [HEALTHY]))[0].text == ANSWER
    server.check_all_returned()


async def test_kill_of_the_zygote(server: Server) -> None:
    """Who forks workers is not who serves: they go on, and one that dies later is forked anew."""
    before = server.instances()
    (zygote,) = zygotes(server)
    bodies = questions(50, 4, side=100, num_tokens=150)
    replies = await ask_during(server, bodies, zygote.kill, wait_for_text=True)
    assert await check_same_afterwards(server, bodies, replies) == {"answered": 4}
    assert {n: e["epoch"] for n, e in server.instances().items()} == {
        n: e["epoch"] for n, e in before.items()
    }
    wait_for(lambda: zygotes(server), READY_S, "another zygote")
    os.kill(before["d0"]["pid"], signal.SIGKILL)
    wait_until_replaced(server, "d0", before["d0"]["epoch"])
    assert (await post_all(server.base_url, [HEALTHY]))[0].text == ANSWER
    server.check_all_returned()


def zygotes(server: Server) -> list[psutil.Process]:
    return [
        process
        for process in server.processes()
        if "epd.runtime.zygote" in process.cmdline() and process.ppid() == server.process.pid
    ]


def kill_mid_transfer(server: Server, name: str) -> None:
    """kill -9 of an encoder that has not delivered what prefill has granted it slots for.

    It is stopped first: what the others transfer is over soon, so the slots that stay leased are
    for its own rooms, which are then in flight for certain.
    """
    pid = server.pid(name)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(1.5 * TIMING.heartbeat_interval_s)
    leased = {k: n for k, n in server.in_use().items() if 'kind="slots"' in k}
    os.kill(pid, signal.SIGKILL)
    assert leased, "no transfer was in flight: nothing was shown"


def stall(server: Server, name: str) -> None:
    """Stopped until it is declared lost: when it wakes it is expelled."""
    entry = server.instances()[name]
    os.kill(entry["pid"], signal.SIGSTOP)
    try:
        wait_until_lost(server, name, entry["epoch"], LOST_WITHIN_S)
    finally:
        os.kill(entry["pid"], signal.SIGCONT)


def send(number: int) -> Callable[[Server, str], None]:
    return lambda server, name: os.kill(server.pid(name), number)


@pytest.mark.parametrize("part", [slice(2), pytest.param(slice(2, 6), marks=LONG)], ids=repr)
async def test_with_a_second_instance_nothing_is_lost(part: slice) -> None:
    """Faults F19, F20, F41, F43: each stage loses one of its two under load; all is answered."""
    rounds: list[tuple[str, str, Callable[[Server, str], None]]] = [
        ("e0", "kill encode", kill_mid_transfer),
        ("e1", "stall encode", stall),
        ("p0", "restart prefill", send(signal.SIGKILL)),
        ("d0", "", send(signal.SIGKILL)),
        ("p1", "", send(signal.SIGTERM)),
        ("d1", "", send(signal.SIGTERM)),
    ]
    with serving("2e2p2d", timing__request_timeout_s=DEADLINE_S) as server:
        for number, (name, scenario, act) in enumerate(rounds[part]):
            epoch = server.instances()[name]["epoch"]
            bodies = questions(50 + number, 12, side=250, num_tokens=120)
            replies = await ask_during(
                server,
                bodies,
                functools.partial(act, server, name),
                wait_for_text=not name.startswith("e"),
            )
            wait_until_replaced(server, name, epoch)
            outcomes = await check_same_afterwards(server, bodies, replies)
            server.check_all_returned()
            if scenario:
                SCENARIOS[scenario].check(outcomes, server.in_use())
            assert outcomes == {"answered": 12}, (name, replies)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
