"""Keys of a file against a cluster that runs; and no time tells a tenant what another one asked.

Both are asked for, in turns and in random order, what the other tenant has asked before and what
nobody has.  By the test of Mann and Whitney the times of a tenant's own repetitions differ from
those of fresh questions, so that the same number of questions would show a leak of that size.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from PIL import Image

from tests.e2e.client import Body, in_session, png, post, question
from tests.e2e.server import Server, run, serving
from tests.key_files import key, write_keys

pytestmark = pytest.mark.timeout(300)

NUM_ROUNDS = 10
CLEAR = 3.3  # standard deviations: by chance once in a thousand measurements
ANN, BOB = ({"Authorization": f"Bearer {name}"} for name in ("ann", "bob"))
Make = Callable[[random.Random], Body]


def text(dice: random.Random) -> Body:
    return question(" ".join(str(dice.randrange(1000, 9999)) for _ in range(80)), max_tokens=1)


def image(dice: random.Random) -> Body:
    pixels = np.random.default_rng(dice.getrandbits(32)).integers(0, 255, (24, 32, 3), np.uint8)
    return question("Read it.", png(Image.fromarray(pixels).resize((160, 128))), max_tokens=1)


def schema(dice: random.Random) -> Body:
    names = {f"n{dice.randrange(10**6):06}": {"type": "integer"} for _ in range(40)}
    told = {"type": "object", "properties": names, "required": [*names]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": told, "strict": True}}
    return question("What is it?", max_tokens=1, response_format=form)


def z_score(times: Sequence[float], others: Sequence[float]) -> float:
    """Mann and Whitney's U as a normal deviate; negative: `times` are the shorter ones."""
    num_longer = sum(a > b for a in times for b in others)
    n, m = len(times), len(others)
    return (num_longer - n * m / 2) / math.sqrt(n * m * (n + m + 1) / 12)


async def measure(server: Server, make: Make, seed: int) -> tuple[float, float]:
    """How Bob's times for what Ann has asked, and Ann's for it again, differ from fresh ones."""
    dice = random.Random(seed)
    found: dict[str, list[float]] = {name: [] for name in ("ann's", "own", "fresh")}

    async def work(session: aiohttp.ClientSession) -> None:
        for _ in range(NUM_ROUNDS):
            asked, fresh = make(dice), make(dice)
            await post(session, server.base_url, asked, **ANN)
            turns = [("ann's", asked, BOB), ("own", asked, ANN), ("fresh", fresh, BOB)]
            dice.shuffle(turns)
            for name, body, who in turns:
                reply = await post(session, server.base_url, body, **who)
                assert reply.status == 200, reply.body
                found[name].append(reply.lasted_s)

    await in_session(work)
    return z_score(found["ann's"], found["fresh"]), z_score(found["own"], found["fresh"])


KEYS = [key("ann", tenant="anns", operator=True), key("bob", tenant="bobs")]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    path = tmp_path_factory.mktemp("keys") / "keys.jsonl"
    write_keys(str(path), KEYS)
    with serving("1e1p1d", "--key-file", str(path), engine__block_size=8) as server:
        yield server, path


@pytest.mark.parametrize("make", [text, image, schema])
async def test_no_time_tells_what_another_tenant_has_asked(
    guarded: tuple[Server, Path], make: Make
) -> None:
    server, _ = guarded
    anns, own = await measure(server, make, seed=1)
    print(f"{make.__name__}: another tenant's {anns:+.1f}, own {own:+.1f} standard deviations")
    assert own < -CLEAR, "what a tenant has asked itself is faster, or nothing is measured here"
    if abs(anns) > CLEAR:  # chance does not come twice
        anns, _ = await measure(server, make, seed=2)
    assert abs(anns) < CLEAR


@pytest.mark.long
async def test_in_a_global_scope_the_time_does_tell() -> None:
    """So the measurement would notice a cache that tenants share."""
    with serving("1e1p1d", "--cache-scope", "global") as server:
        for make in (text, image, schema):
            assert (await measure(server, make, seed=3))[0] < -CLEAR


async def test_a_key_comes_and_goes_while_a_cluster_serves(guarded: tuple[Server, Path]) -> None:
    server, path = guarded
    file = ("--key-file", str(path))
    status, told = run("keys", "make", "eve", *file)
    fresh = told.split()[-1]
    assert status == 0 and fresh.startswith("epd-") and fresh not in path.read_text()

    async def status_of(who: str, path: str = "/v1/chat/completions") -> int:
        sent, body = {"Authorization": f"Bearer {who}"}, question("Hi.", max_tokens=1)
        asked = await in_session(lambda one: post(one, server.base_url, body, path, **sent))
        return asked.status

    reload = "keys", "reload", "--url", server.base_url, "--api-key"
    assert run(*reload, "ann") == (0, '{"reloaded":["keys"],"keys":3}\n')
    assert [await status_of(who) for who in (fresh, "ann", "none")] == [200, 200, 401]
    assert run("keys", "remove", "eve", *file)[0] == 0
    assert await status_of("ann", "/reload") == 200
    assert [await status_of(who) for who in (fresh, "ann")] == [401, 200]
    assert await status_of("bob", "/reload") == 403
