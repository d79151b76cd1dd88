"""Pixels before the encoders have a budget, and each key its share of it (F52)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from epd.api.http.errors import ApiError
from epd.api.prompts.pixels import PixelBudget
from epd.config import Limits
from epd.frontend import Readiness
from tests.api.fakes import FakeFrontend, said, serving
from tests.api.wire import HI, Wire, exchange, request, until

LIMITS = Limits(max_encoder_pixels=1000, max_pixels_share_per_key=0.5)


def refused(budget: PixelBudget, key: str, num_pixels: int) -> str:
    with pytest.raises(ApiError) as caught:
        budget.take(key, num_pixels)
    assert (caught.value.status, caught.value.may_be_retried) == (429, True)
    return caught.value.message


def test_a_budget_for_each_encoder() -> None:
    encoders = [1]
    budget = PixelBudget(LIMITS, lambda: encoders[0])
    first = budget.take("", 800)
    assert "800 pixels" in refused(budget, "", 300)
    encoders[0] = 2
    second = budget.take("", 300)
    first()
    first()  # once is enough
    assert budget.num_pixels == 300
    second()
    assert budget.num_pixels == 0


def test_a_share_for_each_key() -> None:
    budget = PixelBudget(LIMITS, lambda: 1)
    give_back = budget.take("a", 400)
    assert "this key has images of 400 pixels" in refused(budget, "a", 200)
    budget.take("b", 400)
    budget.take("", 200)
    refused(budget, "b", 1)
    give_back()
    budget.take("a", 400)


def test_whoever_comes_first_is_served_whatever_its_size() -> None:
    budget = PixelBudget(LIMITS, lambda: 0)
    give_back = budget.take("a", 5000)
    refused(budget, "b", 1)
    give_back()
    budget.take("a", 5000)


def asks(url: str) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": url}}
    return {"messages": [{"role": "user", "content": [part]}], "stream": True}


async def test_pixels_are_before_the_encoders_until_the_first_token() -> None:
    wait, end = asyncio.Event(), asyncio.Event()
    frontend = FakeFrontend([wait, said("he"), end, said("llo", "stop")])
    frontend.readiness = Readiness(True, "", [{"roles": ["encode"]}])
    raw = request(asks("data:,"))
    async with serving(frontend, max_encoder_pixels=150) as (server, _, _):
        first = await Wire.to(server)
        first.writer.write(raw)
        await until(lambda: frontend.generations)
        status, headers, answer = await exchange(server, raw)
        assert (status, headers["retry-after"]) == (429, "1")
        assert json.loads(answer)["error"]["code"] == "overloaded"
        text = await Wire.to(server)
        text.writer.write(request({**HI, "stream": True}))  # has no image
        await until(lambda: len(frontend.generations) == 2)
        wait.set()
        assert (await first.head())[0] == 200
        second = await Wire.to(server)  # while the first still answers
        second.writer.write(raw)
        assert (await second.head())[0] == 200
        end.set()


async def test_a_client_that_leaves_gives_its_pixels_back() -> None:
    frontend = FakeFrontend([asyncio.Event()])
    async with serving(frontend, max_encoder_pixels=150) as (server, _, _):
        assert server._completions is not None
        budget = server._completions._pixels
        for count in (1, 2, 3):
            wire = await Wire.to(server)
            wire.writer.write(request(asks("data:,")))
            await until(lambda count=count: len(frontend.generations) == count)
            wire.drop()
            await until(lambda: budget.num_pixels == 0)
