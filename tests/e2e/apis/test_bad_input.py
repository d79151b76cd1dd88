"""Bad input gets one clear answer, while a healthy request of the same moment is unharmed.

Real processes meet here faults F13 (one bad image among good ones), F33 (parameters), F34 (what a
stream's failure looks like), F46 (image bombs and URL tricks) and F11 (a worker whose model or
contract is another).
"""

from __future__ import annotations

import asyncio
import io
import json
import random
import struct
import zlib
from collections import Counter
from typing import Any

import aiohttp
import pytest
from PIL import Image

from epd.tiny import SAMPLES
from tests.e2e.client import Body, Reply, data_url, in_session, png, post, question
from tests.e2e.goldens import directory_of
from tests.e2e.server import READY_S, Command, Server, discarding
from tests.e2e.shared import MAX_BODY_NBYTES
from tests.engine.conftest import drawn_image
from tests.scenarios import SCENARIOS

# A refusal may come before all of the body was read: then the client's own socket is still sending
# as its loop ends, and says so when it is collected.
UNSENT = (
    "ignore:Exception ignored in. <(function _SelectorTransport|socket.socket)"
    ":pytest.PytestUnraisableExceptionWarning"
)
pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings(UNSENT)]

RECEIPT = data_url((SAMPLES / "receipt-cafe.png").read_bytes())
HEALTHY = question("What is the total?", RECEIPT)
ANSWER = "10.85"


@pytest.fixture(scope="module")
def server(apart: Server) -> Server:
    return apart


async def ask_beside_a_healthy_one(server: Server, body: Body) -> Reply:
    """The reply to `body`; the healthy neighbour must be answered rightly."""

    async def work(session: aiohttp.ClientSession) -> list[Reply]:
        return await asyncio.gather(
            post(session, server.base_url, body), post(session, server.base_url, HEALTHY)
        )

    reply, neighbour = await in_session(work)
    assert neighbour.text == ANSWER
    return reply


def check_refused(reply: Reply, status: int, *words: str) -> None:
    """The status, and a message (of bounded size) that has all the words."""
    assert reply.status == status, reply.body
    message = reply.error["message"]
    for word in words:
        assert word in message, message
    assert len(message) < 600
    assert "Traceback" not in message


# --- F33: parameters ------------------------------------------------------------------------------

# tests/api refuses each field and each kind of image by itself; here is one of each reader.
PARAMETERS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a bound": ({"max_tokens": -5}, ("max_tokens", "-5")),
    "two that differ": ({"max_tokens": 3, "max_completion_tokens": 4}, ("max_completion_tokens",)),
    "a stranger": ({"no_such_parameter": 1}, ("no_such_parameter",)),
    "a vocabulary": ({"logit_bias": {"999999": 1}}, ("logit_bias", "999999")),
    "a schema": (
        {"guided_json": {"properties": {"a": {"type": "strin"}}}},
        ("guided_json.properties.a",),
    ),
    "a message": ({"messages": [{"role": "robot", "content": "x"}]}, ("role",)),
    "a context": ({"messages": [{"role": "user", "content": "x" * 30_000}]}, ("30", "context")),
}


@pytest.mark.parametrize(("change", "words"), PARAMETERS.values(), ids=PARAMETERS)
async def test_parameters_are_refused_by_name(
    server: Server, change: dict[str, Any], words: tuple[str, ...]
) -> None:
    reply = await ask_beside_a_healthy_one(server, question("hello") | change)
    check_refused(reply, 400, *words)


RAW: list[tuple[bytes, dict[str, str], int]] = [
    (b"{", {}, 400),
    (b"[" * 60_000, {}, 400),
    (b"{}", {"Content-Encoding": "gzip"}, 415),
    (b"[" + b" " * MAX_BODY_NBYTES + b"]", {}, 413),
]


@pytest.mark.parametrize(("data", "headers", "status"), RAW)
async def test_bodies_that_are_no_request(
    server: Server, data: bytes, headers: dict[str, str], status: int
) -> None:
    async def work(session: aiohttp.ClientSession) -> tuple[int, Any]:
        headers_sent = {"Content-Type": "application/json"} | headers
        url = f"{server.base_url}/v1/chat/completions"
        async with session.post(url, data=io.BytesIO(data), headers=headers_sent) as response:
            return response.status, await response.json()

    found, body = await in_session(work)
    assert found == status, body
    assert body["error"]["message"]


# --- F46: images and URLs -----------------------------------------------------------------------


def png_of(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG that says it has this size, over the given (or no) pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(data))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")


IMAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "bomb": (data_url(png_of(30_000, 30_000, bytes(1 << 20))), ("30000 x 30000",)),
    "truncated": (data_url((SAMPLES / "sign.png").read_bytes()[:9000]), ("image 1", "damaged")),
    "missing pixels": (data_url(png_of(100, 100)), ("image 1", "damaged")),
    "no image": (data_url(b"hello, this is a text"), ("not an image",)),
    "path": ("/etc/passwd", ("data:",)),
    "loopback": ("http://2130706433/a.png", ("image_url",)),
    "local name": ("http://localhost/a.png", ("a private or local address",)),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("url", "words"), IMAGES.values(), ids=IMAGES)
async def test_images_are_refused(
    server: Server, url: str, words: tuple[str, ...], stream: bool
) -> None:
    """Fault F34 too: a stream that cannot begin fails with the status of its error."""
    body = question("What is it?", url, stream=stream)
    check_refused(await ask_beside_a_healthy_one(server, body), 400, *words)


async def test_too_many_images(server: Server) -> None:
    reply = await ask_beside_a_healthy_one(server, question("all?", *[RECEIPT] * 17))
    check_refused(reply, 400, "at most 16")


async def test_an_image_longer_than_the_context(server: Server) -> None:
    """The message says how many tokens were needed and allowed."""
    large = png(drawn_image(5, 256, 256))  # 64 rows and two tokens around them
    limit = 2048
    reply = await ask_beside_a_healthy_one(
        server, question("all?", *[large] * 16, max_tokens=limit)
    )
    check_refused(reply, 400, "holds 4096", "6199", f"max_tokens {limit}", "images included")


async def test_one_bad_image_among_good_ones(server: Server) -> None:
    """Fault F13: in one burst, so that good and bad ones share a batch of the encoder."""
    bad_urls = [IMAGES[kind][0] for kind in ("truncated", "missing pixels")]
    bodies = [question("What is the total?", png(shifted(i)), RECEIPT) for i in range(14)]
    bodies += [question("What is it?", url) for url in bad_urls]
    bodies += [question("Both?", RECEIPT, bad_urls[0]), HEALTHY]
    order = list(range(len(bodies)))
    random.Random(1).shuffle(order)

    async def work(session: aiohttp.ClientSession) -> list[Reply]:
        return await asyncio.gather(*(post(session, server.base_url, bodies[i]) for i in order))

    replies = dict(zip(order, await in_session(work), strict=True))
    for i in range(14):
        assert replies[i].status == 200, replies[i].body
    for i in (14, 15):
        check_refused(replies[i], 400, "image 1", "damaged")
    check_refused(replies[16], 400, "image 2", "damaged")
    assert replies[17].text == ANSWER
    server.check_all_returned()


def shifted(number: int) -> Image.Image:
    """Different images, so that each is encoded."""
    return drawn_image(100 + number, 80 + number, 70)


# --- F34: streams ---------------------------------------------------------------------------------


async def test_a_stream_is_an_event_stream(server: Server) -> None:
    async def work(session: aiohttp.ClientSession) -> tuple[str, list[str]]:
        url = f"{server.base_url}/v1/chat/completions"
        async with session.post(url, json=HEALTHY | {"stream": True}) as response:
            assert response.status == 200
            return response.headers["Content-Type"], (await response.text()).split("\n\n")

    content_type, events = await in_session(work)
    assert content_type.startswith("text/event-stream")
    assert events[-1] == "" and events[-2] == "data: [DONE]"
    pieces = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-2]]
    assert "".join(piece["delta"].get("content", "") for piece in pieces) == ANSWER


async def test_a_client_that_hangs_up(server: Server) -> None:
    """Fault F43: the work of every stage returns, and neighbours are unharmed."""
    long = HEALTHY | {"stream": True, "max_tokens": 2000, "ignore_eos": True}
    outcomes: Counter[str] = Counter()

    async def work(session: aiohttp.ClientSession) -> None:
        url = f"{server.base_url}/v1/chat/completions"
        responses = [await session.post(url, json=long) for _ in range(4)]
        for response in responses:
            await response.content.readany()
            outcomes["ended" if response.content.at_eof() else "hung up"] += 1
            response.close()

    await in_session(work)
    outcomes["answered"] += (await ask_beside_a_healthy_one(server, HEALTHY)).text == ANSWER
    server.check_all_returned()
    SCENARIOS["client hangs up"].check(outcomes, server.in_use())


# --- F11: contracts -------------------------------------------------------------------------------


def joining(*flags: str, tells: tuple[str, ...], often: bool = False) -> Any:
    marks = () if often else pytest.mark.long
    return pytest.param(list(flags), tells, marks=marks, id=flags[-2].strip("-"))


STRANGERS = [
    joining("--role", "prefill", "--model", "qwen3_vl", tells=("models differ",)),
    joining("--role", "encode", "--dtype", "bfloat16", tells=("float32", "bfloat16")),
    joining("--role", "prefill", "--set", "engine.block_size=32", tells=("16", "32"), often=True),
]


@pytest.mark.parametrize(("flags", "words"), STRANGERS)
async def test_a_stranger_is_refused_at_join(
    server: Server, flags: list[str], words: tuple[str, ...]
) -> None:
    """Both values are named, the process ends, and the cluster goes on."""
    flags = [str(directory_of(flag)) if flag == "qwen3_vl" else flag for flag in flags]
    arguments = ["run", *flags, *server.placing(), "--threads", "1", "--id", "stranger"]
    with discarding(Command(*arguments)) as stranger:
        assert stranger.wait(READY_S) not in (0, None)
        for word in words:
            assert word in stranger.text, stranger.text
        assert "Traceback" not in stranger.text
    assert (await ask_beside_a_healthy_one(server, HEALTHY)).text == ANSWER
    assert "stranger" not in server.instances()
