"""The load generator against a server whose answers are known."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from epd.cli.parser import UsageError
from epd_lab.bench.servers import serve
from epd_lab.bench.servers.figures import (
    CLIENT_LAG,
    Slo,
    figures,
    percentile,
    ratios,
    stages_ms,
    table,
)
from epd_lab.bench.servers.openai_load import Sample, ServerError, connected
from epd_lab.bench.verbs.serve import SLO, slo_of
from epd_lab.bench.workload import (
    NAMED,
    Bursts,
    Closed,
    Poisson,
    Shape,
    Stream,
    Wording,
    Workload,
    bodies,
    image_numbers,
    named,
    noise_jpeg,
    page_jpeg,
)
from tests.cli import openai_fake

TOKENS = 4
GAP_S = 0.01


class FakeServer:
    """Streams `TOKENS` chunks, a second token per word in the prompt; refuses what says REFUSE.

    The tokens of what says WORDLESS have no text and come with the end; MUTE: there are none.
    GARBLED: an event is no JSON.
    """

    def __init__(self) -> None:
        self.url, self.name = "", "fake"
        self.bodies: list[dict[str, Any]] = []
        self.open: Counter[bool] = Counter()  # by whether there is an image
        self.most_open = self.most_with_images = 0
        self.peers: set[object] = set()  # connections

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.name}]})

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "1.0"})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        assert request.transport is not None
        self.peers.add(request.transport.get_extra_info("peername"))
        text = json.dumps(body["messages"])
        if "REFUSE" in text:
            return web.json_response({"error": {"message": "no"}}, status=400)
        has_image = "image_url" in text
        self.open[has_image] += 1
        self.most_open = max(self.most_open, self.open.total())
        self.most_with_images = max(self.most_with_images, self.open[True])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self._event(response, {"delta": {"role": "assistant", "content": ""}})
        if "GARBLED" in text:
            await response.write(b"data: {\n\n")
        tokens = 0 if "MUTE" in text else TOKENS
        for index in range(0 if "WORDLESS" in text else tokens):
            await asyncio.sleep(GAP_S)
            await self._event(response, {"delta": {"content": "x" if index else ""}})
        await self._event(response, {"delta": {}, "finish_reason": "length"})
        self.open[has_image] -= 1  # now: the client asks anew when it has read the end
        if "CUT" not in text:
            words = len(body["messages"][0]["content"][-1]["text"].split())
            usage = {"prompt_tokens": 10 + 2 * words, "completion_tokens": tokens}
            await response.write(_sse({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
            await asyncio.sleep(GAP_S)  # its end comes by itself
        return response

    async def _event(self, response: web.StreamResponse, choice: dict[str, Any]) -> None:
        await response.write(_sse({"choices": [{"index": 0, **choice}]}))


def _sse(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


@asynccontextmanager
async def serving_fake() -> AsyncIterator[FakeServer]:
    server = FakeServer()
    app = web.Application(client_max_size=1 << 24)
    app.router.add_get("/version", server.version)
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/chat/completions", server.chat)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    server.url = f"http://127.0.0.1:{port}"
    yield server
    await runner.cleanup()


@pytest.fixture
async def fake() -> AsyncIterator[FakeServer]:
    async with serving_fake() as server:
        yield server


def workload(*streams: Stream) -> Workload:
    return Workload("known", streams)


async def test_a_run_is_what_was_asked_for(fake: FakeServer) -> None:
    users = Stream("users", Shape(20, TOKENS, 1, (32, 32)), Closed(3), 9)
    burst = Stream("burst", Shape(5, TOKENS), Bursts(2, 0.05), 4)
    target = serve.Target("fake", url=fake.url)
    plan = serve.ServePlan((target, target), (workload(users, burst),), 2, Slo(10.0, 10.0))
    found = await serve.measure(plan)
    first = found["rows"][0]["figures"]
    assert (first["requests"], first["failed"]) == (9.0, 0.0)
    assert first["goodput_req_per_s"] == first["req_per_s"] > 0
    assert first["prompt_tokens"] == 10 + 20  # two tokens a word: half as many words
    assert first["ttft_ms_p50"] >= 1e3 * GAP_S
    assert first["itl_ms_p50"] >= 1e3 * GAP_S * 0.9
    assert first["e2e_ms_p50"] >= first["ttft_ms_p50"] + 3 * 1e3 * GAP_S * 0.9
    assert fake.most_with_images == 3  # the users
    assert len(fake.peers) <= 2 * (3 + 4)  # connections are used again
    assert 3 <= fake.most_open <= 3 + 4  # and bursts that a slow machine lets overlap
    images = Counter(
        part["image_url"]["url"]
        for body in fake.bodies
        for part in body["messages"][0]["content"]
        if part["type"] == "image_url"
    )
    assert set(images.values()) == {2}  # once per server, never again in a later repeat
    assert len(images) == 2 * 9
    assert {body["model"] for body in fake.bodies} == {"fake"}
    names = [row["server"] for row in found["rows"]]
    assert names == ["fake"] * 4 + ["fake / fake"] * 2
    assert "fake / fake" in table(found["rows"])


async def test_an_open_loop_does_not_wait_for_answers(fake: FakeServer) -> None:
    stream = Stream("open", Shape(5, TOKENS), Poisson(1000.0), 12)
    plan = serve.ServePlan(
        (serve.Target("fake", url=fake.url),), (workload(stream),), 1, Slo(1e-9, 10.0)
    )
    rows = (await serve.measure(plan))["rows"]
    assert fake.most_open > 6
    assert rows[0]["figures"]["goodput_req_per_s"] == 0.0


async def test_failures_are_counted_and_named(fake: FakeServer, tmp_path: Path) -> None:
    def line(word: str) -> str:
        content = [{"type": "text", "text": word}]
        return json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 4})

    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(map(line, ("fine", "REFUSE", "CUT", "WORDLESS", "MUTE", "GARBLED"))))
    found = named(str(file))
    assert found.streams[0].count == 6
    plan = serve.ServePlan((serve.Target("fake", url=fake.url),), (found,), 1, Slo())
    (row,) = (await serve.measure(plan))["rows"]
    assert row["figures"]["failed"] == 4.0
    assert row["errors"] == [
        "DecodeError: Input data was truncated",
        'HTTP 400: {"error": {"message": "no"}}',
        "no token came",
        "the stream ended without [DONE]",
    ]


async def test_a_long_body_arrives_whole(fake: FakeServer, tmp_path: Path) -> None:
    words = " ".join(map(str, range(100_000)))
    content = [{"type": "text", "text": words}]
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": content}]}) + "\n")
    plan = serve.ServePlan((serve.Target("fake", url=fake.url),), (named(str(file)),), 1, Slo())
    (row,) = (await serve.measure(plan))["rows"]
    assert row["errors"] == []
    assert fake.bodies[-1]["messages"][0]["content"] == content


async def test_a_client_that_is_late_says_so(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it measures then is its own time, too."""
    told = serve.ServeProgress.done

    def slow(progress: serve.ServeProgress, sample: Sample) -> None:
        time.sleep(0.2)
        told(progress, sample)

    monkeypatch.setattr(serve.ServeProgress, "done", slow)
    stream = Stream("users", Shape(5, TOKENS), Closed(1), 3)
    plan = serve.ServePlan((serve.Target("fake", url=fake.url),), (workload(stream),), 1, Slo())
    rows = (await serve.measure(plan))["rows"]
    assert rows[0]["figures"]["client_lag_ms_p99"] >= 100
    assert "lag p99" in table(rows)


async def test_no_server() -> None:
    with pytest.raises(ServerError, match="start it first"):
        async with connected("http://127.0.0.1:1", 5.0):
            pass


@pytest.mark.parametrize(("keys", "sent"), [("one,two", "Bearer one"), ("", "")])
async def test_a_server_is_asked_with_the_key_of_the_environment(
    keys: str, sent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the one that is started for it: that asks for this key."""
    monkeypatch.setenv("EPD_API_KEY", keys)
    async with openai_fake.serving(openai_fake.ended()) as fake, connected(fake.url, 5.0) as server:
        await server.ask(b'{"messages": []}', 0.0)
    assert fake.keys == [sent, sent]


def test_unknown_workload() -> None:
    with pytest.raises(ValueError, match="choose one of text, text-c1, 3x560"):
        named("nothing")


@pytest.mark.parametrize(
    ("name", "share"), [("reuse-0", 0.0), ("reuse-50", 0.5), ("reuse-90", 0.9)]
)
def test_reuse_repeats_images(name: str, share: float) -> None:
    (stream,) = NAMED[name].streams
    numbers = [n for request in image_numbers(stream, 0) for n in request]
    assert len(numbers) == 576
    assert len(set(numbers)) / len(numbers) == pytest.approx(1 - share, abs=0.05)
    assert not set(numbers) & {n for r in image_numbers(stream, 1) for n in r}


def test_no_stream_sends_the_images_of_another() -> None:
    """4x1080p and the bursts of `mixed` have images of one size: the second one measured on a
    server would find the first one's KV."""
    seen: set[int] = set()
    for workload in NAMED.values():
        for stream in workload.streams:
            numbers = {n for request in image_numbers(stream, 0) for n in request}
            assert not numbers & seen, stream.name
            seen |= numbers


def test_pages_differ_and_are_quick_to_decode() -> None:
    (stream,) = NAMED["pages"].streams
    pages = [page_jpeg(stream.shape.size, number) for number in range(2)]
    assert pages[0] == page_jpeg(stream.shape.size, 0) != pages[1]
    for page in pages:
        with Image.open(io.BytesIO(page)) as image:
            assert image.size == (2480, 3508)
            shares = [n / (2480 * 3508) for n in image.convert("L").histogram()]
        assert len(page) < 3e6 and sum(shares[250:]) > 0.7 and sum(shares[:40]) > 0.05
    small = replace(stream, count=1, shape=replace(stream.shape, size=(124, 175)))
    (body,) = bodies(Workload("w", (small,)), small, Wording(1.0), 0, lambda count: None)
    (number,) = image_numbers(small, 0)[0]
    url = json.loads(body)["messages"][0]["content"][0]["image_url"]["url"]
    assert base64.b64decode(url.partition(",")[2]) == page_jpeg((124, 175), number)


def test_images_differ_and_are_noise() -> None:
    images = {noise_jpeg((560, 560), number) for number in range(5)}
    assert len(images) == 5
    assert min(map(len, images)) > 560 * 560 / 2


@given(st.lists(st.floats(0, 1e6), min_size=1), st.integers(1, 100))
def test_percentile_is_the_nearest_rank(values: list[float], share: int) -> None:
    found = percentile(values, share)
    assert sum(value <= found for value in values) >= share * len(values) / 100
    assert sum(value < found for value in values) < share * len(values) / 100 + 1e-9


def test_figures_of_known_samples() -> None:
    one = Sample(0.0, 2.0, 0.5, [0.1, 0.4], 7, 4)
    late = replace(one, sent_s=1.0, ended_s=5.0, ttft_s=3.0)
    bad = Sample(1.0, 10.0, error="x")
    found = figures([one, late, bad], Slo(1.0, 0.6))
    assert found["req_per_s"] == pytest.approx(0.2)
    assert found["goodput_req_per_s"] == pytest.approx(0.1)
    assert found["output_tok_per_s"] == pytest.approx(0.8)
    halting = replace(one, gaps_s=[0.01, 0.01, 0.2])
    for slo, goodput in ((Slo(1.0, 0.6, 0.2), 0.1), (Slo(1.0, 0.6, 0.19), 0.0)):
        assert figures([halting, late, bad], slo)["goodput_req_per_s"] == pytest.approx(goodput)
    assert found["tpot_ms_p50"] == pytest.approx(1e3 / 3)
    ours = {"a": 2.0, "b": 0.0, CLIENT_LAG: 1.0}
    assert ratios(ours, {"a": 3.0, "b": 1.0, CLIENT_LAG: 2.0}) == {"a": 1.5}


def test_bounds_of_goodput() -> None:
    assert slo_of(SLO) == Slo(1.0, 0.03)
    assert slo_of("itl=30") == Slo(math.inf, math.inf, 0.03)
    assert slo_of("ttft=1s,itl=50ms") == Slo(1.0, math.inf, 0.05)
    for wrong in ("", "ttft", "ttft=x", "ttft=1,p99=2"):
        with pytest.raises(UsageError, match="write ttft=1000,tpot=30"):
            slo_of(wrong)


def test_time_in_each_state() -> None:
    events = [("G@1", "A", 0.5), ("T@1", "X", 1.0), ("G@1", "B", 4.5), ("G@1", "C", 5.5)]
    timeline = [{"machine": m, "state": s, "t_ms": t} for m, s, t in events]
    assert stages_ms([Sample(0.0, timeline=timeline)]) == {
        "body": 0.5, "G A": 4.0, "G B": 1.0,
    }  # fmt: skip


def test_words_for_tokens() -> None:
    assert len(Wording(0.5).text(40, "k").split()) == 20
