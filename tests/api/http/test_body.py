"""Bodies (F52): media and text told apart however they are cut, and bounds before any work."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.api.anthropic.request import read_message
from epd.api.http import body as body_module
from epd.api.http.body import Body, Intake
from epd.api.http.data_url import Bound, DataUrl, read_data_url
from epd.api.http.errors import ApiError
from epd.config import Limits
from tests.api.fakes import FakePreparer, conversation, serving
from tests.api.wire import HI, Wire, exchange, is_well, request, until

LONG = bytes(range(256)) * 30
BOUND = Bound("image", 1 << 20)
PNG = "data:image/png;base64,"


@pytest.fixture
async def intake(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Intake]:
    monkeypatch.setattr(body_module, "MAX_JSON_VALUES", 1000)
    made = Intake(Limits(max_text_nbytes=200_000), 100)
    yield made
    made.close()
    assert made.nbytes == 0


async def parsed(intake: Intake, raw: bytes, *cuts: int) -> dict[str, Any]:
    body = Body(intake)
    try:
        for start, end in zip((0, *cuts), (*cuts, len(raw)), strict=True):
            await body.read(raw[start:end])
        return await body.parse()
    finally:
        body.close()


async def refusal(intake: Intake, raw: bytes) -> ApiError:
    with pytest.raises(ApiError) as refused:
        await parsed(intake, raw)
    return refused.value


def url_of(data: bytes) -> str:
    return PNG + base64.b64encode(data).decode()


def with_urls(*urls: str, **more: Any) -> bytes:
    return json.dumps({"parts": [{"url": url} for url in urls], **more}).encode()


async def test_data_is_the_same_however_it_is_cut(intake: Intake) -> None:
    """With its escapes, two in a row, and a short one that stays what it was."""
    raw = with_urls(url_of(LONG), url_of(b"short"), url_of(LONG[1:]), "http://x", text='a "data: b')
    raw = raw.replace(b"+", b"\\u002b").replace(b"/", b"\\/")
    for step in (1, 2, 3, 5, 7, 64, 1000, len(raw)):
        body = await parsed(intake, raw, *range(step, len(raw), step))
        first, short, second, other = [part["url"] for part in body["parts"]]
        assert isinstance(first, DataUrl)
        assert isinstance(second, DataUrl)
        assert read_data_url(first, BOUND, "x") == LONG
        assert read_data_url(second, BOUND, "x") == LONG[1:]
        assert first == PNG
        assert (short, other, body["text"]) == (url_of(b"short"), "http://x", 'a "data: b')


@given(
    value=st.recursive(
        st.sampled_from(['"', "\\", '"data:;base64,', '\\"data:image/png;base64,A', "é", ""])
        | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ),
    step=st.integers(1, 40),
)
def test_any_other_body_is_what_its_json_says(value: Any, step: int) -> None:
    raw = json.dumps({"value": value}).encode()
    intake = Intake(Limits(), 100)
    found = asyncio.run(parsed(intake, raw, *range(step, len(raw), step)))
    assert found == {"value": value}
    intake.close()


@pytest.mark.parametrize(
    "data",
    [
        "A" * 5000 + "A===" + "A" * 5001 + "=",
        "A" * 5001,
        "A" * 5000 + "\n" + "A" * 4000,
        "☃" * 5000,
        "A" * 5000 + '"',
        "A" * 5000 + "\\",
        "A" * 5000 + '\\"' + "A" * 5000,
        "A" * 5000 + "," + "A" * 4000,
    ],
)
async def test_broken_data(intake: Intake, data: str) -> None:
    for ascii_only in (True, False):
        raw = json.dumps({"url": PNG + data}, ensure_ascii=ascii_only).encode()
        body = await parsed(intake, raw, 100, 5100)
        with pytest.raises(ApiError, match="x holds invalid base64"):
            read_data_url(body["url"], BOUND, "x")


async def test_too_much_data_is_not_kept() -> None:
    intake = Intake(Limits(max_image_nbytes=10_000, max_video_nbytes=10_000), 100)
    url = (await parsed(intake, with_urls(url_of(LONG * 2)), 5000, 9000))["parts"][0]["url"]
    assert not any(url.frames)
    with pytest.raises(ApiError, match="x has more than 9000 bytes, the limit for one image"):
        read_data_url(url, Bound("image", 9000), "x")
    intake.close()


async def test_frames_in_one_url(intake: Intake) -> None:
    frames = [LONG, b"", b"abc", LONG[:-1]]
    url = "data:video/jpeg;base64," + ",".join(base64.b64encode(f).decode() for f in frames)
    body = await parsed(intake, with_urls(url), *range(777, len(url), 777))
    part = {"type": "video_url", "video_url": body["parts"][0]}
    read: Any = conversation([{"role": "user", "content": [part]}])[0]["content"][0]
    assert not read["is_file"]
    assert [read_data_url(u, BOUND, "x") for u in read["urls"]] == frames


async def test_what_is_no_medium_stays_text(intake: Intake) -> None:
    """Arguments of a call, or somebody's question about a URL."""
    data = base64.b64encode(LONG).decode()
    for value in (
        {"text": PNG + data},
        {"input": {"type": "file", "data": data}},
        {"data": "no base64 at all; " * 1000, "next": PNG},
        {"data": PNG + data},
        {"data": "abcdef0123" * 1000},
        {"data": "abcdef0123" * 1000 + "abc"},
    ):
        raw = json.dumps(value).encode()
        for step in (5, 100, len(raw)):
            found = await parsed(intake, raw, *range(step, len(raw), step))
            assert found == value
            assert not any(isinstance(v, DataUrl) for v in found.values())
    error = await refusal(intake, json.dumps({"a": [{"text": url_of(LONG * 20)}]}).encode())
    assert error.status == 413
    late = json.dumps({"a": [{"text": PNG + "A" * 6000 + "! " * 100}]}).encode()
    with pytest.raises(ApiError, match=r"a\[0\].text begins as base64"):
        await parsed(intake, late, 5000)
    error = await refusal(intake, json.dumps({"a": {url_of(LONG): 1}}).encode())
    assert "name of a field" in error.message


async def test_a_source_in_base64(intake: Intake) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(LONG).decode()}
    block = {"type": "image", "source": source}
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": [block]}]}
    value = await parsed(intake, json.dumps(body).encode())
    found = value["messages"][0]["content"][0]["source"]["data"]
    assert isinstance(found, DataUrl)
    model = FakePreparer()
    asked = read_message(value, model, Limits())
    assert asked.messages is not None
    url = asked.messages[0]["content"][0]["image_url"]["url"]
    assert url == PNG
    assert read_data_url(url, BOUND, "x") == LONG


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": "b" * 200_000}, "besides the base64 data"),
        ({"a": [[]] * 20_000}, "more than 1000 values"),
        ({"a": ["" * i for i in range(20_000)]}, "more than 1000 values"),
        ({"a": list(range(20_000))}, "more than 1000 values"),
        ({str(i): "a" for i in range(10_000)}, "more than 1000 values"),
    ],
)
async def test_bounds(intake: Intake, value: Any, words: str) -> None:
    error = await refusal(intake, json.dumps(value).encode())
    assert (error.status, error.code) == (413, "request_too_large")
    assert words in error.message


async def test_what_is_written_in_texts_is_not_counted(intake: Intake) -> None:
    text = '[{"a": "\\\\", "b": [1, 2]}], ' * 5000
    value = {"a": text, "b": "\\" * 9, "c": '\\"'}
    assert await parsed(intake, json.dumps(value).encode()) == value


async def test_ids_of_a_prompt_come_on_top(intake: Intake) -> None:
    prompt = [10**15] * 5000
    assert "values" in (await refusal(intake, json.dumps({"prompt": prompt}).encode())).message
    intake.max_context = 5000
    assert await parsed(intake, json.dumps({"prompt": prompt}).encode()) == {"prompt": prompt}


# --- bytes in flight ------------------------------------------------------------------------------


def image_of(nbytes: int) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": url_of(bytes(nbytes))}}
    return {"messages": [{"role": "user", "content": [part]}]}


async def test_bodies_that_arrive_share_a_budget() -> None:
    raw = request(image_of(60_000))
    async with serving(max_inflight_nbytes=100_000) as (server, _, _):
        assert server._intake is not None
        slow = await Wire.to(server)
        slow.writer.write(raw[:-10])
        await until(lambda: server._intake is not None and server._intake.nbytes > 70_000)
        status, headers, answer = await exchange(server, raw)
        assert (status, headers["retry-after"]) == (429, "1")
        assert "100000 bytes" in json.loads(answer)["error"]["message"]
        assert await is_well(server)  # a short one finds its place
        slow.writer.write(raw[-10:])
        assert (await slow.answer())[0] == 200
        await until(lambda: server._intake is not None and server._intake.nbytes == 0)
        assert (await exchange(server, raw))[0] == 200


async def test_a_body_is_in_flight_until_its_request_has_ended() -> None:
    async with serving(max_inflight_nbytes=100_000) as (server, frontend, _):
        assert server._intake is not None
        wait = asyncio.Event()
        frontend.scripts[0] = [wait, *frontend.scripts[0]]
        wire = await Wire.to(server)
        wire.writer.write(request(HI))
        await until(lambda: frontend.generations)
        metrics = (await exchange(server, request(method="GET", path="/metrics")))[2]
        assert b"\nepd_open_body_bytes %d" % server._intake.nbytes in metrics
        assert server._intake.nbytes > 0
        wait.set()
        assert (await wire.answer())[0] == 200
        await until(lambda: server._intake is not None and server._intake.nbytes == 0)


async def test_a_client_that_leaves_gives_its_bytes_back() -> None:
    async with serving() as (server, _, _):
        wire = await Wire.to(server)
        wire.writer.write(request(image_of(60_000))[:-10])
        await until(lambda: server._intake is not None and server._intake.nbytes > 0)
        wire.drop()
        await until(lambda: server._intake is not None and server._intake.nbytes == 0)


# --- texts that have a data: URL in them ----------------------------------------------------------

LONG_URL = PNG + "QUFB" * 1500
TEXTS = {
    "HTML": f'what is <img src="{LONG_URL}"> of?',
    "JSON": json.dumps([{"type": "image", "url": LONG_URL}]),
    "JSON in JSON": json.dumps({"call": json.dumps({"url": LONG_URL})}),
    "one of several ends": LONG_URL + "QR==",
    "another": LONG_URL + "QUF=",
    "cut off": LONG_URL + "QR",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
async def test_a_text_comes_as_it_was_sent(intake: Intake, text: str) -> None:
    """An agent's calls and results are JSON in a string."""
    value = {"messages": [{"content": text, "data": text}, {"url": LONG_URL}], "text": text}
    raw = json.dumps(value).encode()
    begins = raw.index(b"data:image")
    for cut in (*range(begins - 3, begins + 3), len(raw) // 2, raw.rindex(b"data:image") - 1):
        read = await parsed(intake, raw, cut)
        assert read["text"] == text and read["messages"][0] == value["messages"][0]
        assert isinstance(read["messages"][1]["url"], DataUrl)
