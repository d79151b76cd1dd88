"""How long a client waits: settings, headers, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp
import pytest

from epd.api.http.errors import ApiError
from epd.api.http.time_limits import read_time_limits
from epd.config import Timing
from epd.frontend import TimeLimits
from tests.api.fakes import FakeFrontend, serving
from tests.api.wire import CHAT, HI

MOST = TimeLimits(first_token_s=120.0, token_s=60.0, total_s=3600.0)


def read(**headers: str) -> TimeLimits:
    named = {f"x-epd-{n.replace('_', '-')}".encode(): v.encode() for n, v in headers.items()}
    return read_time_limits(named, MOST)


def test_headers_lower_what_the_settings_say() -> None:
    assert TimeLimits.of(Timing()) == MOST == read()
    assert read(first_token_timeout="2.5", token_timeout="60") == TimeLimits(2.5, 60.0, 3600.0)
    assert read(request_timeout="1e2").total_s == 100.0


@pytest.mark.parametrize("value", ["", "0", "-1", "3601", "inf", "nan", "10s", "\xff"])
def test_what_cannot_be_kept_is_refused_by_name(value: str) -> None:
    with pytest.raises(ApiError) as refused:
        read(request_timeout=value)
    assert refused.value.status == 400 and refused.value.param == "X-EPD-Request-Timeout"
    assert "at most 3600" in refused.value.message


async def post(headers: Mapping[str, str]) -> tuple[int, FakeFrontend]:
    async with (
        serving() as (server, frontend, _),
        aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as session,
        session.post(CHAT, json=HI, headers=headers) as answer,
    ):
        return answer.status, frontend


async def test_a_request_carries_its_limits() -> None:
    status, frontend = await post({"X-EPD-First-Token-Timeout": "7"})
    assert status == 200
    assert frontend.limits == [TimeLimits(7.0, MOST.token_s, MOST.total_s)]
    assert frontend.generations[0].sampling.tokens_per_word > 1
    _, frontend = await post({"x-epd-token-timeout": "3"})
    assert frontend.generations[0].sampling.tokens_per_word == 1, "or some would seem to be late"


async def test_a_refusal_takes_no_place() -> None:
    status, frontend = await post({"X-EPD-Token-Timeout": "soon"})
    assert status == 400 and frontend.limits == []
