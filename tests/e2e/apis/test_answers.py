"""The bundled model reads fresh images through real processes as well as in its evaluation."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

import epd.tiny
from epd.cli.main import main
from tests.e2e.client import Body, image_part, in_session, png, post_all
from tests.e2e.server import READY_S, Server, serving, wait_for
from tests.e2e.shared import MAX_OPEN_REQUESTS
from tests.e2e.streams import TOLD, WITHOUT_END, Streamed, stream
from tests.engine.conftest import drawn_image
from training.ocrbench import write
from training.tasks import TASKS, Sample, exact_match, fresh_samples

pytestmark = pytest.mark.timeout(400)

README = Path(epd.tiny.__file__).parent / "README.md"


@functools.cache
def samples(per_task: int) -> list[Sample]:
    """Conversations about fresh images, all tasks in turn."""
    of_task = [fresh_samples(task, per_task) for task in TASKS]
    return [sample for group in zip(*of_task, strict=True) for sample in group]


def evaluated() -> float:
    """Mean exact match of the committed evaluation's table (epd/tiny/README.md)."""
    rows = re.findall(r"^\| (\w+) \|[^|]*\| (1?\.\d+)", README.read_text(), re.MULTILINE)
    scores = {task: float(score) for task, score in rows if task in TASKS}
    assert set(scores) == set(TASKS), f"{README} has no row for {set(TASKS) - set(scores)}"
    return sum(scores.values()) / len(scores)


async def answers(server: Server, asked: list[Sample]) -> list[str]:
    bodies = [
        {"messages": sample.openai_messages(), "temperature": 0, "max_tokens": 128}
        for sample in asked
    ]
    at_once = (bodies[i : i + MAX_OPEN_REQUESTS] for i in range(0, len(bodies), MAX_OPEN_REQUESTS))
    return [reply.text for some in at_once for reply in await post_all(server.base_url, some)]


@pytest.mark.parametrize("per_task", [6, pytest.param(25, marks=pytest.mark.long)])
async def test_answers_are_those_of_one_process_and_right(
    apart: Server, together: Server, per_task: int
) -> None:
    asked = samples(per_task)
    said = await answers(apart, asked)
    assert said == await answers(together, asked)
    right = sum(
        exact_match(answer, sample.answer) for answer, sample in zip(said, asked, strict=True)
    )
    rate = right / len(said)
    print(f"{right} of {len(said)} right; the evaluation's table has {evaluated():.3f}")
    assert rate >= 0.95 * evaluated()


def test_bench_accuracy_finds_no_difference(
    apart: Server, together: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, 5)
    urls = apart.base_url, together.base_url
    assert main(["bench", "accuracy", str(file), *urls, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [pair["differ"] for pair in report["pairs"]] == [[]]
    assert min(one["right"] for one in report["servers"]) >= 4


def asking(*parts: Body | str, **settings: object) -> Body:
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    return {"messages": [{"role": "user", "content": content}], "temperature": 0} | settings


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(READY_S):
        while not what():
            await asyncio.sleep(0.02)


async def test_decode_goes_on_while_it_receives(apart: Server) -> None:
    """F27: a prompt has begun to move to decode, and waits in its middle for an encoder that
    stands still; the tokens of who decodes there come meanwhile."""
    encoder = apart.pid("e0")
    image = image_part(png(drawn_image(424242, 90, 70)))
    begun = asking("Look at this. " * 30, image, "?", max_tokens=4, **WITHOUT_END, **TOLD)
    talks, waits = Streamed(), Streamed()

    def both_are_there() -> bool:
        held = apart.metrics().get('epd_in_use{instance="d0",kind="requests"}', 0.0)
        return held == 2 or bool(waits.tokens)

    async def work(session: aiohttp.ClientSession) -> None:
        long = asking("Tell me all.", max_tokens=3000, **WITHOUT_END, **TOLD)
        talking = asyncio.create_task(stream(session, apart.base_url, long, talks))
        await until(lambda: len(talks.tokens) > 5)
        os.kill(encoder, signal.SIGSTOP)
        try:
            waiting = asyncio.create_task(stream(session, apart.base_url, begun, waits))
            await asyncio.to_thread(lambda: wait_for(both_are_there, READY_S, "d0 has both"))
            num_said = len(talks.tokens)
            await until(lambda: len(talks.tokens) > num_said + 20)
            assert not waits.tokens and not talks.is_done, "nothing was received meanwhile"
        finally:
            with contextlib.suppress(ProcessLookupError):  # replaced, if this took too long
                os.kill(encoder, signal.SIGCONT)
        await waiting
        talking.cancel()

    await in_session(work)
    assert len(waits.tokens) == 4 and waits.is_done, waits
    apart.check_all_returned()


@pytest.mark.long
@pytest.mark.parametrize("alone", [(), pytest.param(("1epd",), marks=pytest.mark.long)])
async def test_kv_in_eight_bits_moves_between_processes(alone: tuple[str, ...]) -> None:
    """What decode reads is what prefill wrote, scales too: nearly all answers are right, and all
    are those of one process."""
    asked = samples(4)
    said = []
    for topology in ("1e1p1d", *alone):
        with serving(topology, engine__kv_cache_dtype="fp8") as server:
            said.append(await answers(server, asked))
    assert said[1:] in ([], said[:1])
    right = sum(exact_match(a, sample.answer) for a, sample in zip(said[0], asked, strict=True))
    assert right / len(asked) >= 0.95 * evaluated()
