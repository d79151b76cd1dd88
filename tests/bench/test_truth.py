"""The table of truth: each row finds a server that is right to be so, and one that is not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from epd.cli.main import main
from epd.tiny.samples import read_index
from epd_lab.bench.truth import faults
from epd_lab.bench.truth import rows as rows_of
from epd_lab.bench.truth.client import PATH, Peer, TruthCell
from epd_lab.bench.truth.cluster import TruthCluster
from epd_lab.bench.truth.run import measure, renew, report_of, table_of
from epd_lab.bench.truth.table import ROWS, NamedRow

Answer = tuple[int, str]
Behave = Callable[[list[dict[str, Any]], str], Awaitable[Answer] | Answer]
METER = rows_of.METER[2]
NOTHING = {"epd_open_requests": 0.0}


def answers(behave: Behave, in_use: dict[str, float]) -> web.Application:
    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def chat(request: web.Request) -> web.Response:
        body = await request.json()
        *parts, last = body["messages"][0]["content"]
        found = behave(parts, last["text"])
        status, text = await found if isinstance(found, Awaitable) else found
        if body.get("stream") and status == 200:
            return await streamed(request, text)
        message = {"choices": [{"message": {"content": text}}]}
        return web.json_response(message if status == 200 else {"error": text}, status=status)

    async def streamed(request: web.Request, text: str) -> web.StreamResponse:
        """A word at a time; `cut` is the end of it."""
        response = web.StreamResponse()
        await response.prepare(request)
        for word in text.split():
            if word == "cut":
                return response
            event = {"choices": [{"delta": {"content": word}}]}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await asyncio.sleep(0.005)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text="".join(f"{name} {in_use[name]}\n" for name in in_use))

    app = web.Application(client_max_size=1 << 26)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/v1/models", models)
    app.router.add_post(PATH, chat)
    return app


@contextlib.asynccontextmanager
async def peer_that(
    behave: Behave, cluster: TruthCluster | None = None, in_use: dict[str, float] = NOTHING
) -> AsyncIterator[Peer]:
    runner = web.AppRunner(answers(behave, in_use))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    host, port = site._server.sockets[0].getsockname()[:2]
    peer = Peer("it", f"http://{host}:{port}", 10.0, cluster)
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
        self.texts |= {url: text for text, url in rows_of.painted(12, 0)}

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


def row_named(name: str) -> NamedRow:
    return next(row for row in ROWS if row.name == name)


async def cell_of(name: str, behave: Behave) -> TruthCell:
    async with peer_that(behave) as peer:
        return await row_named(name).ask(peer)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("19 questions with pictures", 19),
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
async def test_an_answer_to_a_bad_input_is_none_that_is_right(name: str) -> None:
    cell = await cell_of(name, lambda parts, text: (200, METER))
    assert (cell.counts, cell.then) == ({"ANSWERED": 1}, "right")


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


WORDS = " ".join("abcdefgh")


async def slow(parts: list[dict[str, Any]], question: str) -> Answer:
    if question == rows_of.METER[1]:
        return 200, METER
    await asyncio.sleep(0.1)
    return 200, WORDS


@pytest.mark.parametrize(
    ("in_use", "words"),
    [
        (NOTHING, "memory back in 0 s"),
        ({"vllm:kv_cache_usage_perc{x=1}": 0.25}, "held after 0 s: vllm:kv_cache_usage_perc{x=1}"),
        ({"other": 1.0}, "held after 0 s: it shows none"),
    ],
)
async def test_clients_that_leave_are_counted_and_what_they_held(
    in_use: dict[str, float], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_of, "MEMORY_S", 0.3)
    async with peer_that(slow, in_use=in_use) as peer:
        cell = await row_named("20 clients leave").ask(peer)
    assert (cell.counts, cell.then) == ({"left": 20}, "right")
    assert words in cell.memory


class OneProcess(TruthCluster):
    """All roles of a server in a process that only sleeps."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    def victims(self, role: str) -> Sequence[Callable[[], None]]:
        return [self.process.kill]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def lives(self) -> bool:
        return self.process.poll() is None


@pytest.fixture
def one() -> Iterator[OneProcess]:
    cluster = OneProcess()
    yield cluster
    cluster.close()
    assert cluster.process.returncode == -signal.SIGKILL


async def test_an_encoder_is_killed_under_load(
    one: OneProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "KILL_S", 2.0)
    behave: Behave = lambda parts, text: (200, METER) if one.lives else (502, "")  # noqa: E731
    async with peer_that(behave, one) as peer:
        cell = await row_named("kill -9 of one of two encoders").ask(peer)
    assert one.process.wait(10.0) == -signal.SIGKILL
    assert cell.counts["WRONG"] and cell.counts["502"] and cell.then == "502"


@pytest.mark.parametrize("goes_on", [True, False])
async def test_streams_of_a_killed_server_are_compared_to_their_ends(
    one: OneProcess, monkeypatch: pytest.MonkeyPatch, *, goes_on: bool
) -> None:
    """Those that are cut by it, and those that begin behind it."""
    monkeypatch.setattr(faults, "BEGUN_AT", 4)

    async def behave(parts: list[dict[str, Any]], question: str) -> Answer:
        if not (one.lives or goes_on):
            return 502, ""
        return 200, WORDS if goes_on or len(seen) < 2 * faults.STREAMS else f"{WORDS} cut"

    seen: list[int] = []

    async def counting(parts: list[dict[str, Any]], question: str) -> Answer:
        found = await behave(parts, question)
        seen.append(1)
        return found

    async with peer_that(counting, one) as peer:
        cell = await row_named("kill -9 of D amid streams").ask(peer)
    assert one.process.wait(10.0) == -signal.SIGKILL
    if goes_on:
        assert cell.counts == {"right": 2 * faults.STREAMS}
    else:
        assert cell.counts["cut: no end"] >= faults.STREAMS // 2
        assert cell.counts.keys() <= {"cut: no end", "502"}


async def test_streams_that_fail_without_a_kill_judge_nothing() -> None:
    """What is right is not known then: seen as WRONG where a machine was slow."""
    cluster = OneProcess()
    seen: list[int] = []

    async def behave(parts: list[dict[str, Any]], question: str) -> Answer:
        seen.append(1)
        return (200, WORDS) if len(seen) < faults.STREAMS else (502, "away")

    try:
        async with peer_that(behave, cluster) as peer:
            (cell,) = await measure(peer, [row_named("kill -9 of D amid streams")])
        assert "without a kill" in cell.skipped and "away" in cell.skipped and cluster.lives
    finally:
        cluster.close()


async def test_what_was_not_started_here_is_skipped() -> None:
    rows = [row for row in ROWS if "kill" in row.name]
    async with peer_that(Oracle()) as peer:
        cells = await measure(peer, rows)
    assert len(cells) == 5 and all("not started here" in cell.skipped for cell in cells)


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


async def test_columns_of_one_run_are_one_table() -> None:
    rows = ROWS[:2]
    async with peer_that(Oracle()) as one, peer_that(lambda parts, text: (200, "?")) as two:
        columns = {"one": await measure(one, rows), "two": await measure(two, rows)}
    report = json.loads(json.dumps(report_of(rows, columns)))
    assert [row["two"]["counts"] for row in report["rows"]] == [{"WRONG": 19}, {"WRONG": 4}]
    lines = table_of(report).splitlines()
    assert lines[0] == "| Row | Right is | one | two |" and len(lines) == 4
    assert lines[3].startswith("| one picture twice in a request (vllm 58123) | all right |")
    assert lines[3].endswith("| 4 right | 4 WRONG |")


async def test_servers_that_run_are_asked_by_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    async with peer_that(Oracle()) as one, peer_that(lambda parts, text: (500, "?")) as two:
        words = ["--against", one.url, "--peer", two.url, "--rows", "twice"]
        assert await asyncio.to_thread(main, ["bench", "truth", *words]) == 0
    assert "| all right | 4 right | 4 500 |" in capsys.readouterr().out


def test_a_second_column_without_a_first_is_refused() -> None:
    assert main(["bench", "truth", "--peer", "http://127.0.0.1:1"]) == 2


def test_each_row_names_its_report() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert all(re.fullmatch(r"[\w-]+ \d+", row.report) for row in ROWS)


def test_the_page_has_the_table_that_was_measured() -> None:
    docs = Path(__file__).parents[2] / "docs"
    report = json.loads((docs / "bench/truth_cpu.json").read_text())
    assert table_of(report) in (docs / "vllm.md").read_text()
    assert {"machine", "versions", "date"} <= set(report)


def test_cells_of_a_later_run_replace_their_own() -> None:
    def report(text: str, *columns: str) -> dict[str, Any]:
        cells = {name: [TruthCell(skipped=f"{text} {name}")] * 2 for name in columns}
        return report_of(ROWS[:2], cells)

    former, later = report("old", "a", "b"), report("new", "b", "c")
    later["rows"].pop()
    renew(former, later)
    cells = [[row[name]["text"] for name in "ab"] for row in former["rows"]]
    assert cells == [["skipped: old a", "skipped: new b"], ["skipped: old a", "skipped: old b"]]
    (renewed,) = former["renewed"]
    assert renewed["rows"] == [ROWS[0].name] and renewed["columns"] == ["b"]
