"""`POST /drain` and `POST /role`: who may ask, and what is asked of the gateway role."""

from __future__ import annotations

import json
from typing import Any

import pytest

from epd.config import AccessConfig
from epd.frontend import Refused
from tests.api.fakes import FakeFrontend, serving
from tests.api.wire import exchange, request

Asked = tuple[str, float, bool, bool, tuple[str, ...]]


async def post(
    frontend: FakeFrontend, body: dict[str, Any], path: str = "/drain", **config: Any
) -> tuple[int, Any]:
    async with serving(frontend, **config) as (server, _, _):
        status, _, told = await exchange(server, request(body, path=path))
        return status, json.loads(told)


@pytest.mark.parametrize(
    ("path", "body", "asked"),
    [
        ("/drain", {"instance": "d0"}, ("d0", 30.0, False, False, ())),
        (
            "/drain",
            {"instance": "d0", "within_s": 0, "force": True, "restart": True},
            ("d0", 0.0, True, True, ()),
        ),
        (
            "/role",
            {"instance": "d0", "within_s": 2, "roles": ["decode", "encode", "decode"]},
            ("d0", 2.0, False, True, ("encode", "decode")),
        ),
    ],
)
async def test_what_is_asked_is_handed_on(path: str, body: dict[str, Any], asked: Asked) -> None:
    frontend = FakeFrontend()
    told = await post(frontend, body, path)
    assert told == (200, {"instance": "d0", "within_s": asked[1]})
    assert frontend.drained == [asked]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/drain", {}),
        ("/drain", {"instance": ""}),
        ("/drain", {"instance": "d0", "within_s": -1}),
        ("/drain", {"instance": "d0", "now": True}),
        ("/role", {"instance": "d0"}),
        ("/role", {"instance": "d0", "roles": []}),
        ("/role", {"instance": "d0", "roles": ["gateway"]}),
    ],
)
async def test_what_is_wrong_is_named(path: str, body: dict[str, Any]) -> None:
    frontend = FakeFrontend()
    status, told = await post(frontend, body, path)
    assert status == 400 and told["error"]["message"] and not frontend.drained


async def test_a_refusal_is_an_answer_in_words() -> None:
    frontend = FakeFrontend()
    frontend.drain_refusal = Refused(409, "d0 drains already")
    status, told = await post(frontend, {"instance": "d0"})
    assert (status, told["error"]["message"]) == (409, "d0 drains already")


async def test_strangers_may_not() -> None:
    """As `/state`: beyond this host it takes a key, or certificates."""
    frontend = FakeFrontend()
    status, told = await post(frontend, {"instance": "d0"}, host="0.0.0.0")
    assert status == 403 and "--api-key" not in told["error"]["message"]
    assert "set an API key" in told["error"]["message"] and not frontend.drained
    keyed = AccessConfig(api_keys=("secret",))
    status, _ = await post(frontend, {"instance": "d0"}, host="0.0.0.0", access=keyed)
    assert status == 401 and not frontend.drained
