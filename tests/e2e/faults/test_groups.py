"""Instances of several ranks: the same answers, and one fate, whichever rank dies under load."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.e2e.client import post_all, question
from tests.e2e.server import READY_S, STOP_S, Server, serving, wait_for
from tests.e2e.streams import (
    DRAWN,
    PATIENT,
    TOLD,
    all_have_said,
    ask_during,
    check_same_afterwards,
    first_has_said,
    questions,
)

pytestmark = pytest.mark.timeout(400)
FEW_NBYTES = "4MiB"


@pytest.fixture(scope="module")
def group() -> Iterator[Server]:
    """An encoder of two ranks beside a group of two ranks."""
    with serving("1e:tp2,1pd:tp2", **PATIENT) as server:
        yield server


def followers(server: Server, name: str) -> list[psutil.Process]:
    return psutil.Process(server.pid(name)).children()


def wait_until_replaced(server: Server, name: str, epoch: int) -> None:
    def healthy() -> bool:
        entry = server.instances().get(name)
        return entry is not None and entry["epoch"] > epoch and entry["state"] == "HEALTHY"

    wait_for(healthy, READY_S, f"{name} serves again")


async def test_two_ranks_answer_as_one_does(group: Server, together: Server) -> None:
    """Token for token, drawn in every way, with images that ranks of another group have shared."""
    assert [len(followers(group, name)) for name in ("e0", "pd0")] == [1, 1]
    bodies = questions(300, 10, side=200, num_tokens=60)
    answers = [
        [reply.text for reply in await post_all(server.base_url, bodies)]
        for server in (group, together)
    ]
    assert answers[0] == answers[1] and all(answers[0])
    group.check_all_returned()


SPLIT = ("1e1p1d:tp2", "1e1p:tp2,1d", "1e1p:tp2,1d:tp2", "1e1p:tp4,1d:tp2")


@pytest.mark.long  # tests/groups/test_kv_ranks.py slices between groups within one process
@pytest.mark.parametrize("topology", SPLIT)
async def test_kv_is_sliced_on_its_way(topology: str, together: Server) -> None:
    """Between groups of any sizes, in parts while the prompt is computed: token for token."""
    bodies = questions(330, 6, side=200, num_tokens=30)
    with serving(topology, **PATIENT) as server:
        replies = [await post_all(one.base_url, bodies) for one in (server, together)]
        answers = [[reply.text for reply in each] for each in replies]
        assert answers[0] == answers[1] and all(answers[0])
        server.check_all_returned()


@pytest.mark.long
async def test_who_gives_way_in_a_group_says_the_same(together: Server) -> None:
    """Blocks for an answer and a half: texts and prompts with images at the ranks give way."""
    seen = questions(350, 8, side=260, num_tokens=40)
    texts = [question(f"{n} " * 60, **TOLD | {"max_tokens": 200} | DRAWN[n % 3]) for n in range(8)]
    bodies = [body for pair in zip(texts, seen, strict=True) for body in pair]
    few = {"engine__kv_nbytes": FEW_NBYTES, "engine__max_chunk_tokens": 32}
    with serving("1e1pd:tp2", **few, **PATIENT) as server:
        replies = [await post_all(one.base_url, bodies) for one in (server, together)]
        answers = [[reply.text for reply in each] for each in replies]
        assert answers[0] == answers[1] and all(answers[0])
        gave_way = [n for name, n in server.metrics().items() if "preemptions" in name]
        assert sum(gave_way) > 0, gave_way
        server.check_all_returned()


@pytest.mark.long
async def test_a_group_that_encodes_in_turns_says_the_same(together: Server) -> None:
    """Batches of images are cut, and the ranks that run them decode meanwhile."""
    bodies = questions(360, 6, side=260, num_tokens=30)
    with serving("1epd:tp2", engine__max_quantum_ms=4, **PATIENT) as server:
        replies = [await post_all(one.base_url, bodies) for one in (server, together)]
        answers = [[reply.text for reply in each] for each in replies]
        assert answers[0] == answers[1] and all(answers[0])
        server.check_all_returned()


@pytest.mark.long
@pytest.mark.parametrize("name", ["p0", "d0"])
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_dies_in_a_transfer_leaves_nothing_behind(name: str, rank: int) -> None:
    """Who wrote to it, or was written to by it, has its memory again."""
    with serving("1e1p:tp2,1d:tp2", **PATIENT) as server:
        epoch = server.instances()[name]["epoch"]
        victim = [psutil.Process(server.pid(name)), *followers(server, name)][rank]
        bodies = questions(340 + 2 * rank + (name == "d0"), 8, 150, 60)
        replies = await ask_during(server, bodies, victim.kill, first_has_said)
        wait_until_replaced(server, name, epoch)
        assert await check_same_afterwards(server, bodies, replies) == {"answered": 8}
        server.check_all_returned()


def kill_leader(server: Server) -> None:
    os.kill(server.pid("pd0"), signal.SIGKILL)


def kill_follower(server: Server) -> None:
    (follower,) = followers(server, "pd0")
    follower.kill()


@pytest.mark.parametrize(
    ("kill", "when"),
    [
        (kill_follower, first_has_said),
        pytest.param(kill_leader, all_have_said, marks=pytest.mark.long),
        pytest.param(kill_follower, all_have_said, marks=pytest.mark.long),
        pytest.param(kill_leader, first_has_said, marks=pytest.mark.long),
    ],
)
async def test_the_loss_of_a_rank_is_the_loss_of_the_group(
    group: Server, kill: Callable[[Server], None], when: Callable[..., bool]
) -> None:
    """It comes back as one, with other ranks, and every answer goes on with its next token."""
    epoch = group.instances()["pd0"]["epoch"]
    before = [psutil.Process(group.pid("pd0")), *followers(group, "pd0")]
    bodies = questions(310 + 2 * (kill is kill_leader) + (when is all_have_said), 6, 150, 120)
    replies = await ask_during(group, bodies, lambda: kill(group), when)
    wait_until_replaced(group, "pd0", epoch)
    wait_for(lambda: not any(p.is_running() for p in before), STOP_S, "the former ranks are gone")
    assert await check_same_afterwards(group, bodies, replies) == {"answered": 6}
    assert len(followers(group, "pd0")) == 1
    group.check_all_returned()


@pytest.mark.long
async def test_a_rank_that_hangs_ends_its_group() -> None:
    """F29: the others are in a collective without it, and not for long."""
    with serving("2epd:tp2", timing__group_step_timeout_s=8, **PATIENT) as server:
        wait_for(lambda: len(server.instances()) == 2, READY_S, "both have joined")
        epoch = server.instances()["epd0"]["epoch"]
        (follower,) = followers(server, "epd0")
        bodies = questions(320, 6, 150, 80)
        replies = await ask_during(server, bodies, follower.suspend, first_has_said)
        wait_until_replaced(server, "epd0", epoch)
        assert not follower.is_running()
        assert await check_same_afterwards(server, bodies, replies) == {"answered": 6}
        server.check_all_returned()
