"""What /metrics tells of the HTTP front, read by Prometheus' own parser."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from epd.api.watching.metrics import exposition
from epd.api.watching.telemetry import Histogram
from epd.frontend import Refused
from tests.api.fakes import NUM_IMAGE_ROWS, FakeFrontend, failed, said, serving
from tests.patience import PATIENCE_S

IMAGE = {"type": "image_url", "image_url": {"url": "data:,x"}}


def parsed(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = list(text_string_to_metric_families(text))
    return {(s.name, tuple(s.labels.items())): s.value for f in families for s in f.samples}


def test_a_histogram_counts_what_is_at_most_its_bound() -> None:
    histogram = Histogram("wait_seconds", "how long", (1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    text = exposition(histogram.samples()).decode()
    (family,) = text_string_to_metric_families(text)
    assert (family.name, family.type, family.documentation) == (
        "wait_seconds",
        "histogram",
        "how long",
    )
    found = parsed(text)
    buckets = [found["wait_seconds_bucket", (("le", le),)] for le in ("1.0", "2.0", "+Inf")]
    assert buckets == [2, 3, 4]
    assert (found["wait_seconds_count", ()], found["wait_seconds_sum", ()]) == (4, 12.0)


async def test_requests_are_counted_as_their_clients_see_them() -> None:
    frontend = FakeFrontend(
        [0.03, said("a"), 0.03, said("b", "stop")], [failed("engine", 500)], [said("x", "stop")]
    )
    frontend.refused[3] = Refused(429, "full")
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    async with (
        serving(frontend) as (server, _, _),
        aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as session,
    ):

        async def post(path: str, **fields: Any) -> int:
            async with session.post(path, json={**body, **fields}) as response:
                await response.read()
                return response.status

        chat = "/v1/chat/completions"
        with_image = [{"role": "user", "content": [IMAGE, {"type": "text", "text": "hi"}]}]
        statuses = [await post(chat, stream=True), await post(chat)]
        statuses += [
            await post(chat, messages=with_image),
            await post(chat),
            await post("/nowhere"),
        ]
        assert statuses == [200, 500, 200, 429, 404]
        async with session.get("/metrics") as response:
            found = parsed(await response.text())
    for path, status, count in (
        (chat, "200", 2), (chat, "500", 1), (chat, "429", 1), ("other", "404", 1),
    ):  # fmt: skip
        labels = (("path", path), ("status", status))
        assert found["epd_http_responses_total", labels] == count
    assert found["epd_prompt_images_total", ()] == 1
    assert found["epd_prompt_tokens_sum", ()] == 2 + 2 + 2 + NUM_IMAGE_ROWS
    assert found["epd_completion_seconds_count", ()] == 2
    assert found["epd_time_to_first_token_seconds_count", ()] == 2
    first, whole = (
        found[f"epd_{name}_seconds_sum", ()] for name in ("time_to_first_token", "completion")
    )
    assert 0.03 <= first < whole
    assert whole >= 0.06


BODY = b'{"prompt": "a"}'
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n" % len(BODY)
)


async def begun(frontend: FakeFrontend) -> None:
    """The request has been read."""
    async with asyncio.timeout(PATIENCE_S):
        while not frontend.generations:
            await asyncio.sleep(0.01)


async def test_how_long_a_body_takes() -> None:
    async with serving(FakeFrontend([])) as (server, frontend, _):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(HEAD + BODY[:9])
        await asyncio.sleep(0.05)
        writer.write(BODY[9:])
        await begun(frontend)
        found = {(s.name, s.labels): s.value for s in server._telemetry.samples()}
        assert found["epd_body_seconds_count", ()] == 1
        assert 0.03 < found["epd_body_seconds_sum", ()] < PATIENCE_S
        writer.close()


async def test_a_client_that_leaves_early_has_no_status() -> None:
    async with serving(FakeFrontend([asyncio.Event()])) as (server, frontend, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(HEAD + BODY)
        await begun(frontend)
        async with asyncio.timeout(PATIENCE_S):
            writer.close()
            await writer.wait_closed()
            labels = (("path", "/v1/completions"), ("status", "none"))
            while True:
                samples = {(s.name, s.labels): s.value for s in server._telemetry.samples()}
                if samples.get(("epd_http_responses_total", labels)) == 1:
                    break
                await asyncio.sleep(0.01)
        assert reader.at_eof() or not await reader.read()
