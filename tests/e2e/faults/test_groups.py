"""Instances of several ranks: the same answers, and one fate, whichever rank dies under load."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from tests.e2e.client import post_all, question
from tests.e2e.server import STOP_S, Server, serving, wait_for
from tests.e2e.streams import (
    DRAWN,
    PATIENT,
    TOLD,
    ask_during,
    check_same_afterwards,
    first_has_said,
    questions,
    wait_until_replaced,
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


async def test_the_loss_of_a_rank_is_the_loss_of_the_group(group: Server) -> None:
    """It comes back as one, with other ranks, and every answer goes on with its next token."""
    epoch = group.instances()["pd0"]["epoch"]
    before = [psutil.Process(group.pid("pd0")), *followers(group, "pd0")]
    bodies = questions(310, 6, 150, 120)
    replies = await ask_during(group, bodies, before[1].kill, first_has_said)
    wait_until_replaced(group, "pd0", epoch)
    wait_for(lambda: not any(p.is_running() for p in before), STOP_S, "the former ranks are gone")
    assert await check_same_afterwards(group, bodies, replies) == {"answered": 6}
    assert len(followers(group, "pd0")) == 1
    group.check_all_returned()
