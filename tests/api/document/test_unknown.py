"""Names that no API has: refused, or left out and told (`--unknown-parameters`)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.api.document.openapi import OPERATIONS, document
from epd.api.document.schemas import KNOWN
from epd.api.http.unknown import MAX_CHARS, MAX_NAMES, Unknown
from epd.api.openai.request import ChatRequest
from epd.config import Limits
from tests.api.fakes import FakePreparer, serving
from tests.api.wire import CHAT, HI, exchange, request

BODIES = {o.path: next(iter(o.examples.values())) for o in OPERATIONS if o.body}
STREAMED = [o.path for o in OPERATIONS if o.streams]
IGNORED = "x-epd-ignored-parameters"
PATHS = [path for path in BODIES if not path.startswith("/encode")]


async def answer(policy: str, path: str, **more: Any) -> tuple[int, str, bytes]:
    async with serving(unknown_parameters=policy) as (server, _, _):
        raw = request({**BODIES[path], **more}, path=path)
        status, headers, body = await exchange(server, raw)
    return status, headers.get(IGNORED, ""), body


@pytest.mark.parametrize("path", PATHS)
async def test_what_nobody_knows_is_refused_or_left_out_and_told(path: str) -> None:
    status, header, body = await answer("refuse", path, provider={"a": 1})
    assert (status, header) == (400, "") and json.loads(body)["error"]["param"] == "provider"
    sent = {"provider": {"a": 1}, "top_a": 0.5, "nothing": None}
    assert (await answer("warn", path, **sent))[:2] == (200, "provider, top_a")
    assert (await answer("warn", path))[:2] == (200, "")
    if path in STREAMED:
        assert (await answer("warn", path, **sent, stream=True))[:2] == (200, "provider, top_a")


@pytest.mark.parametrize("path", PATHS)
async def test_what_would_change_the_answer_is_refused_all_the_same(path: str) -> None:
    """What has a reason not to be taken, what another API takes, and a value out of range."""
    names = ["suffix", "web_search_options", "use_beam_search", "previous_response_id"]
    for name, value in [*((name, "x") for name in names), ("model", 3)]:
        status, header, body = await answer("warn", path, **{name: value}, top_a=1)
        assert (status, header) == (400, "top_a")
        assert json.loads(body)["error"]["param"] == name


def test_what_is_refused_is_known() -> None:
    told = document(FakePreparer(), Limits())["components"]["schemas"]
    properties = {name for o in OPERATIONS if o.body for name in told[o.body]["properties"]}
    assert properties | {*ChatRequest.refused} <= KNOWN


@settings(max_examples=40)
@given(st.lists(st.text(max_size=2 * MAX_CHARS), max_size=2 * MAX_NAMES, unique=True))
def test_no_name_leaves_its_place_in_the_header(names: list[str]) -> None:
    unknown = Unknown({"messages"})
    body: dict[str, Any] = {"messages": 1} | {name: 1 for name in names if name != "messages"}
    value = unknown.told(found := unknown.leave_out(body)).decode("ascii")
    assert body == {"messages": 1} and len(found) == unknown.sample().value
    shown = value.split(", ") if value else []
    assert len(shown) == min(len(found), MAX_NAMES + 1) and len(value) < 2048
    allowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-? "
    assert set(value) <= {*allowed, ","} and all(len(name) <= MAX_CHARS for name in shown)


async def test_a_header_of_the_client_s_making_does_not_leave() -> None:
    name = "a\r\nset-cookie: b=c\r\n\r\nbody"
    async with serving(unknown_parameters="warn") as (server, _, _):
        status, headers, _ = await exchange(server, request({**HI, name: 1, "é": 2}, path=CHAT))
        assert (status, headers[IGNORED]) == (200, "a??set-cookie??b?c????body, ?")
        assert "set-cookie" not in headers
        _, _, body = await exchange(server, request(method="GET", path="/metrics"))
        assert b"epd_ignored_parameters_total 2.0" in body
        _, _, body = await exchange(server, request(method="GET", path="/openapi.json"))
        schemas = json.loads(body)["components"]["schemas"]
        assert "additionalProperties" not in schemas["ChatRequest"]
