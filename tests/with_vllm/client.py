"""What a client asks of our gateway, or of a vLLM server, and what it gets."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import aiohttp
from PIL import Image, ImageDraw, ImageFont

from epd.tiny import SAMPLES
from epd.tiny.samples import read_index
from tests.e2e.client import Body, data_url, png, question

LETTERS = "ABCDEFGHKLMNPRSTUVWXYZ23456789"
SAYS = "What does the image say?"
AT_ONCE = 8
ANSWER_S = 60.0
BEFORE_S = 0.2  # that the last of some streams have, before something ends


def painted(count: int, seed: int) -> list[str]:
    """Pictures of five letters each, which no other seed has."""
    rng, urls = random.Random(seed), []
    for _ in range(count):
        image = Image.new("RGB", (96, 64), "white")
        text = "".join(rng.choice(LETTERS) for _ in range(5))
        font = ImageFont.load_default(20)
        ImageDraw.Draw(image).text((10, 20), text, fill="black", font=font)
        urls.append(png(image))
    return urls


def bodies(count: int, seed: int) -> list[Body]:
    """Of the samples, of one picture each, and of one that comes twice."""
    those = [
        question(one.question, *(data_url((SAMPLES / name).read_bytes()) for name in one.images))
        for one in read_index()
    ]
    (twice,) = painted(1, seed + 1000)
    those.append(question(SAYS, twice, twice))
    those.append(question("Hello"))
    those += [question(SAYS, url) for url in painted(count - len(those), seed)]
    return [{**body, "model": "tiny", "max_tokens": 24, "temperature": 0} for body in those]


async def ask(url: str, body: Body, path: str = "/v1/chat/completions") -> tuple[int, Any]:
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(url + path, json=body) as answer,
    ):
        text = await answer.text()
        if answer.status != 200:
            return answer.status, text
        return 200, json.loads(text)


def said(answer: tuple[int, Any]) -> str:
    status, body = answer
    return body["choices"][0]["message"]["content"] if status == 200 else f"{status}: {body[:300]}"


async def ask_all(url: str, those: list[Body], at_once: int = AT_ONCE) -> list[str]:
    places = asyncio.Semaphore(at_once)

    async def one(body: Body) -> str:
        async with places:
            return said(await ask(url, body))

    return await asyncio.gather(*(one(body) for body in those))


async def stream(url: str, body: Body, begun: Callable[[], None]) -> list[int]:
    """Token ids of its answer; `begun` is called after some of them."""
    timeout, tokens = aiohttp.ClientTimeout(total=2 * ANSWER_S), list[int]()
    body = {**body, "stream": True, "return_token_ids": True}
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(url + "/v1/chat/completions", json=body) as answer,
    ):
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            assert "error" not in event, event
            before = len(tokens)
            for choice in event["choices"]:
                tokens += choice.get("token_ids") or []
            if before < 40 <= len(tokens):
                begun()
    return tokens


async def streams(
    url: str, those: list[Body], at: int, act: Callable[[], None], num_late: int = 0
) -> list[list[int]]:
    """`act` when so many of them have 40 tokens; the last `num_late` begin just before it."""
    num_begun, is_due = 0, asyncio.Event()

    def begun() -> None:
        nonlocal num_begun
        num_begun += 1
        if num_begun == at:
            is_due.set()
            asyncio.get_running_loop().call_later(BEFORE_S if num_late else 0.0, act)

    async def one(body: Body, *, is_late: bool) -> list[int]:
        if is_late and at:
            await is_due.wait()
        return await stream(url, body, begun)

    first_late = len(those) - num_late
    return await asyncio.gather(*(one(b, is_late=n >= first_late) for n, b in enumerate(those)))


def longs(count: int, seed: int) -> list[Body]:
    asked = [question(SAYS, url) for url in painted(count, seed)]
    return [{**one, "model": "tiny", "max_tokens": 200, "ignore_eos": True} for one in asked]
