"""What a key may have per minute and at a time, and the headers of each answer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest

from epd.api.http.errors import ApiError
from epd.api.http.identity import Caller
from epd.api.http.places import MAX_ACCOUNTS, Places
from epd.config import KeyLimits, Limits
from tests.api.fakes import FakeFrontend, serving
from tests.api.wire import HI, exchange, request

ANN = Caller("a")


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def places(clock: Callable[[], float] = Clock(), **limits: int) -> Places:  # noqa: B008
    return Places(Limits(per_key=KeyLimits(**limits)), lambda: 0, clock)


def test_requests_per_minute_and_when_more_may_come() -> None:
    clock = Clock()
    some = places(clock, requests_per_minute=2)
    for left in (b"1", b"0"):
        with some.taken(ANN) as taken:
            assert dict(taken.headers) == {
                b"x-ratelimit-limit-requests": b"2",
                b"x-ratelimit-remaining-requests": left,
                b"x-ratelimit-reset-requests": b"30s" if left == b"1" else b"60s",
            }
    for wait_s in (30.0, 60.0):
        with (
            pytest.raises(ApiError, match="2 requests per minute") as caught,
            some.taken(ANN),
        ):
            pass
        assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
        assert caught.value.retry_after_s == wait_s
        assert (b"x-ratelimit-remaining-requests", b"0") in caught.value.headers
    with some.taken(Caller("b")), some.taken(Caller()):
        pass  # others have theirs
    clock.now_s += 30.0
    with some.taken(ANN):
        pass


def test_tokens_are_estimated_and_then_set_right() -> None:
    clock = Clock()
    some = places(clock, tokens_per_minute=600)
    with some.taken(ANN, num_tokens=500) as taken:
        assert dict(taken.headers)[b"x-ratelimit-remaining-tokens"] == b"100"
        taken.num_tokens = 40
    with some.taken(ANN, num_tokens=560) as taken:
        taken.num_tokens = 900  # images, that no text has
    with pytest.raises(ApiError, match="600 tokens per minute") as caught, some.taken(ANN):
        pass
    assert caught.value.retry_after_s == pytest.approx(34.0)
    clock.now_s += 120.0
    with some.taken(ANN, num_tokens=5000):
        pass  # a request of any permitted size fits


@pytest.mark.parametrize(("status", "left"), [(503, b"9"), (429, b"9"), (400, b"8"), (500, b"8")])
def test_what_got_no_place_costs_nothing(status: int, left: bytes) -> None:
    some = places(requests_per_minute=10, tokens_per_minute=100)
    with pytest.raises(ApiError), some.taken(ANN, num_tokens=50):
        raise ApiError(status, "no place")
    with some.taken(ANN) as taken:
        assert dict(taken.headers)[b"x-ratelimit-remaining-requests"] == left
        assert dict(taken.headers)[b"x-ratelimit-remaining-tokens"] == b"100"


def test_open_answers_of_a_key_are_bounded_and_those_refused_come_one_after_another() -> None:
    some = places(concurrency=2)
    with ExitStack() as stack:
        stack.enter_context(some.taken(ANN, 2))
        waits = []
        for _ in range(4):
            with pytest.raises(ApiError, match="2 requests open, where 2 may be") as caught:
                stack.enter_context(some.taken(ANN))
            waits.append(caught.value.retry_after_s)
        assert waits == [2, 2, 4, 4]
        stack.enter_context(some.taken(Caller("b")))
    with some.taken(Caller("c"), 5):
        pass  # n of one request


def test_keys_without_number_are_forgotten_the_idle_first() -> None:
    some = places(concurrency=1)
    with some.taken(Caller("open")):
        for n in range(MAX_ACCOUNTS + 5):
            with some.taken(Caller(f"key {n}")):
                pass
        assert len(some._accounts) == MAX_ACCOUNTS
        with pytest.raises(ApiError), some.taken(Caller("open")):
            pass


async def test_an_answer_has_the_headers_and_a_refusal_its_time() -> None:
    limits = KeyLimits(requests_per_minute=60, tokens_per_minute=4000)
    async with serving(FakeFrontend(), per_key=limits) as (server, _, _):
        status, headers, _ = await exchange(server, request({**HI, "max_tokens": 50}))
        assert (status, headers["x-ratelimit-remaining-requests"]) == (200, "59")
        assert 3900 < int(headers["x-ratelimit-remaining-tokens"]) < 3950
        _, headers, _ = await exchange(server, request({**HI, "max_tokens": 100}))
        assert 3860 < int(headers["x-ratelimit-remaining-tokens"]) < 3900  # 50 were not used
        for _ in range(61):
            status, headers, _ = await exchange(server, request(HI))
            if status == 429:
                break
        assert (status, headers["retry-after"]) == (429, "1")
        assert headers["x-ratelimit-reset-requests"].endswith("s")
    async with serving() as (server, _, _):
        _, headers, _ = await exchange(server, request(HI))
    assert not [name for name in headers if "ratelimit" in name]
