"""The table of truth: each row finds a server that is right to be so, and one that is not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from epd.cli.main import main
from epd.tiny.samples import read_index
from epd_lab.bench.truth import rows as rows_of
from epd_lab.bench.truth.client import PATH, Peer, TruthCell
from epd_lab.bench.truth.run import measure

Answer = tuple[int, str]
Behave = Callable[[list[dict[str, Any]], str], Awaitable[Answer] | Answer]
METER = rows_of.METER[2]


def answers(behave: Behave) -> web.Application:
    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def chat(request: web.Request) -> web.Response:
        body = await request.json()
        *parts, last = body["messages"][0]["content"]
        found = behave(parts, last["text"])
        status, text = await found if isinstance(found, Awaitable) else found
        message = {"choices": [{"message": {"content": text}}]}
        return web.json_response(message if status == 200 else {"error": text}, status=status)

    app = web.Application(client_max_size=1 << 26)
    app.router.add_get("/v1/models", models)
    app.router.add_post(PATH, chat)
    return app


@contextlib.asynccontextmanager
async def peer_that(behave: Behave) -> AsyncIterator[Peer]:
    runner = web.AppRunner(answers(behave))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    host, port = site._server.sockets[0].getsockname()[:2]
    peer = Peer("it", f"http://{host}:{port}", 10.0)
    await peer.open()
    try:
        yield peer
    finally:
        await peer.close()
        await runner.cleanup()


class Oracle:
    """What is right, by the pictures that a test knows; bad inputs are refused."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        for count in (60, 200):
            self.texts |= {url: text for text, url in rows_of.painted(count, count)}

    def __call__(self, parts: list[dict[str, Any]], question: str) -> Answer:
        if any(part["type"] != "image_url" for part in parts):
            return 400, "no such part"
        urls = [part["image_url"]["url"] for part in parts]
        for entry in read_index():
            if question == entry.question and urls == [rows_of.sample(n) for n in entry.images]:
                return 200, entry.answer
        if question.startswith("What is the total in image"):
            at = int(question.rstrip("?").split()[-1])
            is_cafe = urls[at - 1] == rows_of.sample("receipt-cafe.png")
            return 200, "10.85" if is_cafe else "7.63"
        if len(urls) == 1 and urls[0] in self.texts:
            return 200, self.texts[urls[0]]
        return 400, "not a picture"


def table() -> dict[str, rows_of.Row]:
    return {row.name: row.ask for row in rows_of.rows({})}


async def cell_of(name: str, behave: Behave) -> TruthCell:
    async with peer_that(behave) as peer:
        return await table()[name](peer)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("questions of the samples", len(read_index())),
        ("one picture twice in a request", 4),
        ("60 pictures at once", 60),
    ],
)
async def test_right_answers_are_found_right_and_others_wrong(name: str, count: int) -> None:
    right = await cell_of(name, Oracle())
    assert right.counts == {"right": count}
    wrong = await cell_of(name, lambda parts, text: (200, "?"))
    assert wrong.counts == {"WRONG": count}
    lost = await cell_of(name, lambda parts, text: (502, "gone"))
    assert lost.counts == {"502": count}


BAD = (
    "bytes that are no picture", "a picture that is cut off", "a file:// URL", "a URL on loopback",
    "a grid without rows",
)  # fmt: skip


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_input_is_refused_and_the_next_request_is_right(name: str) -> None:
    cell = await cell_of(name, Oracle())
    assert (cell.counts, cell.then) == ({"400": 1}, "right")


@pytest.mark.parametrize("name", BAD)
async def test_a_server_that_a_bad_input_ends_is_seen(name: str) -> None:
    oracle, dead = Oracle(), False

    def behave(parts: list[dict[str, Any]], question: str) -> Answer:
        nonlocal dead
        status, text = oracle(parts, question)
        dead = dead or status != 200
        return (500, "engine dead") if dead else (status, text)

    cell = await cell_of(name, behave)
    assert (cell.counts, cell.then) == ({"500": 1}, "500")


async def test_a_picture_by_the_name_of_another_gets_its_own_answer_or_none() -> None:
    """A server that trusts the name is wrong."""
    by_name: dict[str, str] = {}
    oracle = Oracle()

    def trusts(parts: list[dict[str, Any]], question: str) -> Answer:
        if uuid := parts[0].get("uuid"):
            return 200, by_name.setdefault(uuid, "read once")
        return oracle(parts, question)

    assert (await cell_of("another picture's uuid", trusts)).counts == {"WRONG": 1}
    refuses: Behave = lambda parts, text: (  # noqa: E731
        (400, "no uuid") if "uuid" in parts[0] else oracle(parts, text)
    )
    cell = await cell_of("another picture's uuid", refuses)
    assert (cell.counts, cell.then) == ({"400": 1}, "right")


async def test_clients_that_leave_are_counted_so() -> None:
    async def slow(parts: list[dict[str, Any]], question: str) -> Answer:
        if question == rows_of.METER[1]:
            return 200, METER
        await asyncio.sleep(1.0)
        return 200, ""

    cell = await cell_of("20 clients leave", slow)
    assert (cell.counts, cell.then) == ({"left": 20}, "right")


async def test_the_process_that_was_given_is_killed_under_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rows_of, "KILL_S", 0.6)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        lives = lambda parts, text: (200, METER) if process.poll() is None else (502, "")  # noqa: E731
        async with peer_that(lives) as peer:
            row = next(r for r in rows_of.rows({"it": process.pid}) if "killed" in r.name)
            cell = await row.ask(peer)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert cell.counts["WRONG"] and cell.counts["502"] and cell.then == "502"
    skipped = await cell_of("an encoder is killed under load", lambda parts, text: (200, ""))
    assert "--kill it=PID" in skipped.skipped and not skipped.counts


async def test_a_server_that_hangs_or_cuts_has_an_outcome() -> None:
    async def hangs(parts: list[dict[str, Any]], question: str) -> Answer:
        await asyncio.sleep(1.0)
        return 200, ""

    async with peer_that(hangs) as known:
        peer = Peer("it", known.url, 0.2)
        with contextlib.suppress(OSError):
            await peer.open()
        assert (await peer.ask("Hello")).text == "no answer in time"
        await peer.close()


async def test_the_columns_are_measured_row_by_row() -> None:
    async with peer_that(Oracle()) as one, peer_that(lambda parts, text: (200, "?")) as two:
        first = Peer("one", one.url, 10.0), Peer("two", two.url, 10.0)
        found = await measure(first, rows_of.rows({})[:2])
    assert [[set(cell.counts) for cell in cells] for _, cells in found] == [
        [{"right"}, {"WRONG"}]
    ] * 2
    assert json.dumps([cell.as_json() for _, cells in found for cell in cells])


@pytest.mark.parametrize("words", [["a"], ["a=http://127.0.0.1:1", "--kill", "b=1"]])
def test_arguments_that_name_nothing_are_refused(words: list[str]) -> None:
    assert main(["bench", "truth", *words]) == 2
