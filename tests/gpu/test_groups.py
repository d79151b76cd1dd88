"""Instances of two ranks on two GPUs: what transformers and one GPU answer, and one fate.

Rows and KV go between groups of different sizes over the transport between GPUs, sliced on their
way; then ranks are killed under load.  Each test prints how long its parts took.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import psutil
import pytest

from epd.tiny import CHECKPOINT
from epd.transport.cuda.driver import missing
from tests.e2e.client import Body, post_all
from tests.e2e.faults.test_groups import followers
from tests.e2e.goldens import directory_of, goldens, sent, token_bytes
from tests.e2e.server import Server, serving, wait_for
from tests.e2e.streams import (
    PATIENT,
    ask_during,
    check_same_afterwards,
    first_has_said,
    questions,
    tokens_of,
    wait_until_replaced,
)
from tests.e2e.test_exactness import burst
from tests.engine.reference import reference_generate
from tests.engine.test_equality import NEW_TOKENS, cases
from tests.engine.tiny_models import is_known
from tests.gpu.test_kill import DRIVER_NBYTES, FREED_WITHIN_S, in_use

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus, pytest.mark.timeout(400)]
ENDS = (256, 258)  # of the bundled model's answers
SETTINGS: dict[str, Any] = {
    "engine__dtype": "float32", "engine__kv_nbytes": "256MiB", "engine__kv_landing_nbytes": "64MiB",
    "encode__cache_device_nbytes": "256MiB", "encode__cache_host_nbytes": "256MiB",
    "decode__max_running": 16, "engine__max_captured_tokens": 512,
}  # fmt: skip
TWO: dict[str, Any] = SETTINGS | PATIENT | {"transport": "cuda", "engine__device": "cuda:0,cuda:1"}
DRAWN = questions(400, 10, side=200, num_tokens=40)


class Laps:
    """Prints what took how long."""

    def __init__(self, title: str) -> None:
        self._title, self._began_s = title, time.monotonic()

    def __call__(self, what: str) -> None:
        now_s = time.monotonic()
        print(f"{self._title}: {what} {now_s - self._began_s:.1f} s", flush=True)
        self._began_s = now_s


def asked() -> list[Body]:
    """What `transformers.generate` is asked, too, then what is drawn in every way."""
    greedy = {"max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": True}
    return [{"messages": sent(*case)} | greedy for case in cases("embedded")] + DRAWN


async def answers(server: Server) -> list[list[bytes]]:
    replies = await post_all(server.base_url, asked())
    assert [r.status for r in replies] == [200] * len(replies), [r.body for r in replies]
    return [tokens_of(reply.body["choices"][0]) for reply in replies]


@pytest.fixture(scope="module")
def alone(two_gpus: None) -> list[list[bytes]]:
    """The answers of one GPU."""
    if reason := missing():
        pytest.skip(reason)
    lap = Laps("1epd")
    with serving("1epd", model=CHECKPOINT, engine__device="cuda:0", **SETTINGS) as server:
        lap("starts in")
        return asyncio.run(answers(server))


def test_one_gpu_equals_generate(alone: list[list[bytes]]) -> None:
    for said, case in zip(alone, cases("embedded"), strict=False):
        expected = reference_generate(CHECKPOINT, *case, NEW_TOKENS)
        text = [token_bytes("embedded", token) for token in expected if token not in ENDS]
        assert said[: len(text)] == text != []


@pytest.mark.parametrize(
    ("topology", "told", "victims"),
    [
        ("1e1p:tp2,1d", "sharded", ["p0", "p0.1"]),
        ("1e1p1d:tp2", "sharded", ["d0.1", "d0"]),
        ("1e:tp2,1pd:tp2", "replicated", ["e0.1", "pd0.1"]),
        ("1e1p:tp2,1d:tp2", "sharded", []),
    ],
)
async def test_groups_answer_as_one_gpu_does(
    topology: str, told: str, victims: list[str], alone: list[list[bytes]]
) -> None:
    """Token for token; `told`: how rows come to a group's ranks.  Then each victim is killed: its
    group comes back as one, every answer goes on, and the GPUs' memory is what it was."""
    lap = Laps(topology)
    with serving(topology, model=CHECKPOINT, prefill__rows_at_ranks=told, **TWO) as server:
        lap("starts in")
        entries = server.instances().values()
        used = {one for entry in entries for one in entry["transports"].values()}
        assert used == {TWO["transport"]}
        assert await answers(server) == alone
        rows = sum(
            nbytes
            for name, nbytes in server.metrics().items()
            if name.startswith("epd_link_nbytes_total") and 'instance="e0"' in name
        )
        lap(f"{len(alone)} answers, {rows / 1e6:.2f} MB of rows {told}, in")
        server.check_all_returned()
        before = in_use()
        for number, victim in enumerate(victims):
            await lose(server, victim, 410 + number)
            wait_for(
                lambda: all(n < b + DRIVER_NBYTES for n, b in zip(in_use(), before, strict=True)),
                FREED_WITHIN_S,
                f"the GPUs' memory is as before {victim} died ({before})",
            )
            lap(f"without {victim}, and back, in")


@pytest.mark.parametrize("topology", ["1e1p:tp2,1d:tp2", "1e1p:tp2,1d", "1e1p1d:tp2"])
async def test_states_go_between_groups(topology: str, alone: list[list[bytes]]) -> None:
    """Of the same size, and head by head where sizes differ; twice, so that copies are found."""
    with serving(topology, model=directory_of("qwen3_5"), **TWO) as server:
        for seed in range(2):
            assert await burst(server, "qwen3_5", goldens("qwen3_5"), seed) == []
        server.check_all_returned()


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("gemma4", {}),
        ("gemma4", {"engine__cuda_graphs": "false", "engine__per_layer_embeddings": "host"}),
        ("gemma4_moe", {}),
        ("gemma4_moe", {"engine__cuda_graphs": "false"}),
    ],
    ids=["E model", "E model, not captured, from the host", "mixture", "mixture, not captured"],
)
@pytest.mark.parametrize("topology", ["1e1p:tp2,1d:tp2", "1epd:tp2", "1e1p:tp2,1d"])
async def test_blocks_of_several_shapes_in_groups(
    topology: str, family: str, more: dict[str, Any], two_gpus: None
) -> None:
    """Gemma's windows and full layers, ranks with heads of each; twice, so that prefixes are
    found."""
    if not is_known(family):
        pytest.skip("not known here")
    if family == "gemma4_moe" and topology == "1e1p:tp2,1d":
        pytest.skip("its ranks have a part of the heads each, which are not moved one by one")
    lap = Laps(f"{topology} {family}")
    with serving(topology, model=directory_of(family), **TWO | more) as server:
        lap("starts in")
        for seed in range(2):
            assert await burst(server, family, goldens(family), seed) == []
        lap("two bursts in")
        server.check_all_returned()


async def lose(server: Server, rank: str, seed: int) -> None:
    """Kill it while it has work."""
    name, _, number = rank.partition(".")
    epoch = server.instances()[name]["epoch"]
    victim = followers(server, name)[0] if number else psutil.Process(server.pid(name))
    bodies = questions(seed, 8, side=200, num_tokens=60)
    when = None if name == "e0" else first_has_said
    replies = await ask_during(server, bodies, victim.kill, when)
    wait_until_replaced(server, name, epoch)
    assert await check_same_afterwards(server, bodies, replies) == {"answered": len(bodies)}
    assert len(followers(server, name)) == 1
    server.check_all_returned()
