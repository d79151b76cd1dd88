"""Two gateways over the same workers, and a kill -9 of one of them under load."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import pytest

from epd.cli.start.ports import any_free
from epd_lab.bench.chaos.process import SLOW, ServingCommand
from tests.e2e.client import Body, post_all
from tests.e2e.operating.test_lifecycle import LOST_SOON, DiscardingAll
from tests.e2e.server import READY_S, Command, Server, wait_for
from tests.e2e.streams import Streamed, questions, stream, tokens_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
LOST_AFTER_S = 2.0
NUM_TOKENS = 400


def of_workers(server: ServingCommand) -> dict[str, tuple[int, str]]:
    return {name: (i["epoch"], i["state"]) for name, i in server.instances().items()}


def kill(server: Server) -> None:
    """kill -9 of all that the command has started: nobody starts it again."""
    for process in server.processes():
        process.kill()
    server.process.wait()


async def test_kill_of_one_of_two_gateways_costs_its_open_connections() -> None:
    """The other one's streams go on, each token as without it; what the dead one's requests held is
    free when its silence has passed the bound; when it returns, nobody has begun anew."""
    endpoints = [f"tcp://127.0.0.1:{any_free('127.0.0.1')}" for _ in range(2)]
    joined = ("--join", ",".join(endpoints), "--threads", "1", *LOST_SOON)
    with DiscardingAll() as started:
        one, other = (started(Server("gateway", "--listen", at, *LOST_SOON)) for at in endpoints)
        workers = started(Command("run", "--topology", "2e2pd", *joined))
        for server in (one, other):
            server.wait_healthy(4)
        before = of_workers(one)
        assert before == of_workers(other)
        bodies = questions(7, 8, 80, NUM_TOKENS)
        seen = [Streamed() for _ in bodies]
        async with aiohttp.ClientSession() as session:
            asked = [
                asyncio.create_task(stream(session, (one, other)[n % 2].base_url, body, into))
                for n, (body, into) in enumerate(zip(bodies, seen, strict=True))
            ]
            while not all(len(into.tokens) > 2 for into in seen):
                await asyncio.sleep(0.02)
            kill(other)
            killed_s = time.monotonic()
            ended = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(end, aiohttp.ClientError) for end in ended[1::2]), ended
        for into in seen[::2]:
            into.check_has_one_end()
            assert into.is_done and not into.has_migrated, into
        await asyncio.to_thread(wait_for, lambda: not held(one), 2 * LOST_AFTER_S * SLOW, "free")
        print(f"all is free {time.monotonic() - killed_s:.1f} s behind the kill")
        for body, into in list(zip(bodies, seen, strict=True))[::2]:
            assert await answer(one, body) == into.tokens
        assert of_workers(one) == before
        again = started(Server("gateway", "--listen", endpoints[1], *LOST_SOON, like=other))
        again.wait_healthy(4)
        assert of_workers(again) == before, "the lives of the workers go on"
        assert await answer(again, bodies[0]) == seen[0].tokens
        wait_for(lambda: not (one.in_use() or again.in_use()), READY_S, "all is free")
        for command in (workers, again, one):
            assert command.stop() == 0, command.text
            assert "Traceback" not in command.text, command.text


def held(server: ServingCommand) -> list[str]:
    """But for the doubt about a gateway that is gone, which has no end."""
    return [name for name in server.in_use() if "links_doubted" not in name]


async def answer(server: ServingCommand, body: Body) -> list[bytes]:
    (reply,) = await post_all(server.base_url, [body])
    return tokens_of(reply.body["choices"][0])
