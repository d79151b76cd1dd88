"""Workers that die or stop in the middle of work: nothing is lost where something may take over.

Answers given during a fault, drawn in every way, are compared token for token with those to the
same questions afterwards, which other tests compare with transformers.  Images are fresh for each
fault, so that no cache answers.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import psutil
import pytest
from PIL import Image

from epd.config import Timing
from epd.tiny import SAMPLES
from tests.e2e.client import data_url, png, post_all, question
from tests.e2e.server import READY_S, SLOW, Server, serving, wait_for
from tests.e2e.streams import (
    PATIENT,
    Streamed,
    all_have_said,
    ask_during,
    check_same_afterwards,
    first_has_said,
    questions,
    wait_until_replaced,
)
from tests.engine.tiny_models import OF_GEMMA, OF_GLM, cached_model
from tests.scenarios import SCENARIOS

pytestmark = pytest.mark.timeout(400)
LONG = pytest.mark.long

TIMING = Timing()
LOST_WITHIN_S = TIMING.lost_after_s + TIMING.heartbeat_interval_s + 1.0 * SLOW
BACK_WITHIN_S = 10.0 + 5.0 * SLOW  # 15 on an idle machine
HEALTHY = question("What is the total?", data_url((SAMPLES / "receipt-cafe.png").read_bytes()))
ANSWER = "10.85"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("1e1p1d", **PATIENT) as server:
        yield server


# When what an instance does is under way: images are encoded, some are read, all are answered.
WHEN = {"e0": None, "p0": first_has_said, "d0": all_have_said}


def wait_until_lost(server: Server, name: str, epoch: int, timeout_s: float) -> float:
    """Seconds until the gateway knows that this epoch is gone."""
    began_s = time.monotonic()

    def lost() -> bool:
        entry = server.instances().get(name)
        return entry is None or entry["epoch"] != epoch or entry["state"] in {"LOST", "LEFT"}

    wait_for(lost, timeout_s, f"{name} is lost")
    return time.monotonic() - began_s


@pytest.mark.long
@pytest.mark.parametrize(
    "family",
    [
        *("kimi_k25", "qwen3_5", "internvl", "paddleocr_vl", "deepseek_ocr2", "mistral3"),
        *("mistral4", *OF_GLM, *OF_GEMMA),
    ],
)
@pytest.mark.parametrize("name", ["p0", "d0"])
async def test_kill_with_other_state(name: str, family: str) -> None:
    """Latent rows, states of sequences, tiles, windows: answers go on with the very next token
    there, too."""
    with serving("1e1p1d", model=cached_model(family), **PATIENT) as server:
        entry = server.instances()[name]
        epoch, pid = entry["epoch"], entry["pid"]
        bodies = questions(ord(name[0]), 8, 90, 200 if name == "d0" else 60)
        replies = await ask_during(server, bodies, lambda: os.kill(pid, signal.SIGKILL), WHEN[name])
        wait_until_replaced(server, name, epoch)
        assert await check_same_afterwards(server, bodies, replies) == {"answered": 8}
        assert any(reply.has_migrated for reply in replies)
        server.check_all_returned()


async def test_kill_of_the_gateway(server: Server) -> None:
    """Clients see their connection cut; a new gateway serves; the old one's work is given up."""
    (gateway,) = [p for p in server.processes() if "epd.runtime.child" in p.cmdline()]
    bodies = questions(40, 3, side=100, num_tokens=2500)
    with pytest.raises(aiohttp.ClientError):
        await ask_during(server, bodies, gateway.kill, first_has_said)
    server.wait_ready()
    assert (await post_all(server.base_url, [HEALTHY]))[0].text == ANSWER
    server.check_all_returned()


@pytest.mark.long
async def test_kill_of_the_zygote(server: Server) -> None:
    """Who forks workers is not who serves: they go on, and one that dies later is forked anew."""
    before = server.instances()
    (zygote,) = {psutil.Process(entry["pid"]).parent() for entry in before.values()}
    assert zygote is not None
    bodies = questions(50, 4, side=100, num_tokens=150)
    replies = await ask_during(server, bodies, zygote.kill, first_has_said)
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


def kill(server: Server, name: str) -> None:
    os.kill(server.pid(name), signal.SIGKILL)


def stall(server: Server, name: str) -> None:
    """Stopped for good: its supervisor kills it when it is declared lost."""
    entry = server.instances()[name]
    os.kill(entry["pid"], signal.SIGSTOP)
    wait_until_lost(server, name, entry["epoch"], LOST_WITHIN_S)


@pytest.mark.parametrize("part", [(0, 2), pytest.param((1,), marks=LONG)], ids=str)
async def test_with_a_second_instance_nothing_is_lost(part: tuple[int, ...]) -> None:
    """Faults F19, F20, F41: a stage loses one of its two in the middle of its work; all is
    answered.  F79: who is stopped for good is killed by its supervisor and comes back."""
    rounds: list[tuple[tuple[str, ...], str, Callable[[Server, str], None]]] = [
        (("e0",), "kill encode", kill_mid_transfer),
        (("e1",), "stall encode", stall),
        (("p0", "d0"), "restart prefill", kill),
    ]
    with serving("2e2p2d", **PATIENT) as server:
        wait_for(lambda: len(server.instances()) == 6, READY_S, "all have joined")
        for number in part:
            names, scenario, act = rounds[number]
            before = server.instances()
            bodies = questions(50 + number, 10, side=250, num_tokens=40)

            def act_on_all(names: tuple[str, ...] = names, act: Any = act) -> None:
                for name in names:
                    act(server, name)

            replies = await ask_during(server, bodies, act_on_all, WHEN[names[0][0] + "0"])
            for name in names:
                wait_until_replaced(server, name, before[name]["epoch"])
            outcomes = await check_same_afterwards(server, bodies, replies)
            server.check_all_returned()
            SCENARIOS[scenario].check(outcomes, server.in_use())
            assert outcomes == {"answered": 10}, (names, replies)
            if scenario == "kill encode":
                check_images_alone_moved(server, replies)
        await check_an_image_goes_to_no_third_encoder(server)


def check_images_alone_moved(server: Server, replies: list[Streamed]) -> None:
    """F59: they were encoded by the other one, and no attempt was given up."""
    assert not any(reply.has_migrated for reply in replies)
    assert server.metrics()['epd_gateway_events_total{kind="images_moved"}'] >= 1


async def check_an_image_goes_to_no_third_encoder(server: Server) -> None:
    """F68: whoever decodes it is killed; its sender is told so, and who stands beside it waits."""
    pill = question("What is this?", png(Image.new("L", (7500, 7500), 7)))
    used_s: dict[int, float] = {}
    dead: set[int] = set()

    def kill_who_takes_it() -> None:
        """Who computes for longer than all else that is asked takes it."""
        while not pills.done():
            for name in ("e0", "e1"):
                entry = server.instances().get(name)
                if entry is None or entry["pid"] in dead or not _is_alive(entry["pid"]):
                    continue
                times = psutil.Process(entry["pid"]).cpu_times()
                now_s = times.user + times.system
                if now_s - used_s.setdefault(entry["pid"], now_s) > 0.1:
                    dead.add(entry["pid"])
                    os.kill(entry["pid"], signal.SIGKILL)
            time.sleep(0.01)

    pills = asyncio.ensure_future(post_all(server.base_url, [pill]))
    killer = asyncio.ensure_future(asyncio.to_thread(kill_who_takes_it))
    text = question("What is the total?", max_tokens=8)  # no encoder computes for it
    beside = await post_all(server.base_url, [text] * 4)
    (told,), _ = await asyncio.gather(pills, killer)
    assert (told.status, told.error["code"], len(dead)) == (422, "poison", 2), told.body
    assert [reply.status for reply in beside] == [200] * 4
    again, healthy = await post_all(server.base_url, [pill, HEALTHY])
    assert (again.status, healthy.text) == (422, ANSWER), "nobody takes it any more"
    assert server.metrics()['epd_gateway_events_total{kind="poison_inputs"}'] == 1
    server.says("instances died of one input", READY_S)
    wait_for(lambda: len(server.instances()) == 6, READY_S, "all have joined")
    server.check_all_returned()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
