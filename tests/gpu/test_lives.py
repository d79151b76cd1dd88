"""Lives of an instance on a GPU: other roles under load, and a cut from the gateway.

Weights stay where they are: the process is the same, and how long it took is printed.  But a life
whose KV other GPUs may write to (decode, over `cuda`) ends with its process.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from typing import Any

import psutil
import pytest

from epd.transport.cuda.driver import missing
from tests.e2e.operating.test_lifecycle import (
    ANSWER,
    LOST_SOON,
    RECEIPT,
    DiscardingAll,
    all_joined,
    ask,
    content,
)
from tests.e2e.operating.test_roles import ROLES, switch
from tests.e2e.server import READY_S, SLOW, Command, Server, serving, wait_for
from tests.e2e.streams import PATIENT, all_have_said, ask_during, check_same_afterwards, questions
from tests.gpu.test_kill import in_use

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
SETTINGS: dict[str, Any] = {
    "engine__device": "cuda:0", "engine__dtype": "float32", "engine__kv_nbytes": "256MiB",
    "engine__kv_landing_nbytes": "64MiB", "engine__max_captured_tokens": 512,
    "encode__cache_device_nbytes": "256MiB", "encode__cache_host_nbytes": "256MiB",
    "decode__max_running": 16,
}  # fmt: skip
BACK_WITHIN_S = 15.0  # with steps that are captured anew
LEFT_NBYTES = 1 << 30  # of what a life before had, at most: torch's, and contexts differ


@pytest.fixture(params=["shm", "cuda"])
def transport(request: pytest.FixtureRequest, cuda: str) -> str:
    if request.param == "cuda" and (reason := missing()):
        pytest.skip(reason)
    return str(request.param)


async def test_roles_change_under_load(transport: str) -> None:
    """To fewer, to the others and back, while streams are read; what the process held of the GPU
    for its former roles is free then."""
    with serving("2epd", transport=transport, **SETTINGS, **PATIENT) as server:
        wait_for(lambda: len(server.instances()) == 2, READY_S, "both are there")
        held = 0
        for number, roles in enumerate((("prefill", "decode"), ("encode",), ROLES, ROLES[1:])):
            before = server.instances()["epd1"]
            bodies = questions(60 + number, 6, 56, 300)
            took_s: list[float] = []

            def change(roles: Sequence[str] = roles, took_s: list[float] = took_s) -> None:
                began_s = time.monotonic()
                assert switch(server, "epd1", roles)["roles"] == [*roles]
                took_s.append(time.monotonic() - began_s)

            replies = await ask_during(server, bodies, change, all_have_said)
            assert await check_same_afterwards(server, bodies, replies) == {"answered": 6}
            is_kept = transport != "cuda" or "decode" not in before["roles"]
            assert (server.instances()["epd1"]["pid"] == before["pid"]) == is_kept
            assert took_s[0] < BACK_WITHIN_S * SLOW or not is_kept
            shown = f"{transport} {'+'.join(roles)}: {took_s[0]:.2f} s, weights kept: {is_kept}"
            print(f"{shown}, {in_use()[0] >> 20} MiB in use")
            if number == 0:
                held = in_use()[0]
        assert in_use()[0] < held + LEFT_NBYTES
        server.check_all_returned()


def worker(server: Server, role: str, name: str, transport: str) -> Command:
    """`epd run --role` by hand, on the GPU."""
    flags = [f"{key.replace('__', '.')}={value}" for key, value in SETTINGS.items()]
    settings = [part for flag in flags for part in ("--set", flag)]
    arguments = ["run", "--role", role, "--id", name, *server.placing(), *settings]
    arguments += ["--transport", transport]
    return Command(*arguments, run_dir=server.run_dir)


def test_a_cut_costs_no_weights(transport: str) -> None:
    """An instance that stood still until it was expelled: a new life, of the same process."""
    with DiscardingAll() as started:
        server = started(Server("gateway", "--transport", transport, *LOST_SOON))
        began_s = time.monotonic()
        commands = [started(worker(server, "prefill+decode", "alone", transport))]
        commands.append(started(worker(server, "encode", "eye", transport)))
        wait_for(lambda: all_joined(server), READY_S, "everybody has joined")
        print(f"they joined after {time.monotonic() - began_s:.2f} s")
        assert content(ask(server, RECEIPT)) == ANSWER
        for name in ("alone", "eye"):
            before = server.instances()[name]
            stopped = psutil.Process(int(before["pid"]))
            stopped.suspend()
            lost = lambda name=name: server.instances()[name]["state"] == "LOST"  # noqa: E731
            wait_for(lost, READY_S, f"{name} is lost")
            stopped.resume()
            resumed_s = time.monotonic()
            wait_for(lambda: server.get("/ready")[0] == 200, READY_S, "it has joined again")
            took_s = time.monotonic() - resumed_s
            after = server.instances()[name]
            is_kept = transport != "cuda" or "decode" not in before["roles"]
            print(f"{transport} {name} served again after {took_s:.2f} s, weights kept: {is_kept}")
            assert took_s < BACK_WITHIN_S * SLOW or not is_kept
            assert after["epoch"] > before["epoch"]
            assert (after["pid"] == before["pid"]) == is_kept
            assert content(ask(server, RECEIPT)) == ANSWER
        for command in (*commands, server):
            command.send(signal.SIGTERM)
            assert command.wait() == 0, command.text
        server.check_nothing_left()
