"""The audit log: a line for each request, with nothing in it that a client has written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from epd.config import AccessConfig
from epd.runtime.logs import JsonFormatter
from tests.api.fakes import serving
from tests.api.wire import CHAT, HI, exchange, request
from tests.key_files import key, write_keys

CANARY = "c4n4ry"
LOGGER = "epd.api.http.audit"


def image(url: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
        ]
    }


TOOL = {"type": "function", "function": {"name": CANARY, "parameters": {}}}
SAID = {"messages": [{"role": "user", "content": CANARY}]}
HIDDEN = [
    request(SAID),
    request({**SAID, "stream": True}),
    request(image(f"https://host.example/{CANARY}.png")),
    request(image(f"file:///{CANARY}")),
    request({**HI, "tools": [TOOL]}),
    request({**HI, "user": CANARY, "stop": [CANARY], "cache_salt": CANARY}),
    request({**HI, "model": CANARY}),
    request({**HI, CANARY: 1}),
    request(f'{{"messages": "{CANARY}'.encode()),
    request({"prompt": CANARY}, path="/v1/completions"),
    request({"input": CANARY}, path="/v1/responses"),
    request({"prompt": CANARY}, path="/tokenize"),
    request({**SAID, "max_tokens": 5}, path="/v1/messages"),
    request(HI, path=f"{CHAT}?q={CANARY}"),
    request(HI, path=f"/{CANARY}"),
    request(method="GET", path=f"/v1/models/{CANARY}"),
    request(HI, x_request_id=CANARY, x_epd_tenant=CANARY, user_agent=CANARY, referer=CANARY),
]


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Of the audit log, as --log-json has them."""
    form = JsonFormatter("gateway")
    found = [
        json.loads(form.format(one)) for one in caplog.records if one.name == "epd.api.http.audit"
    ]
    assert {(one.pop("level"), one.pop("text"), one.pop("instance")) for one in found} == {
        ("info", "audit", "gateway")
    }
    return found


@pytest.mark.parametrize("with_keys", [True, False])
async def test_no_content_is_in_the_log(
    caplog: pytest.LogCaptureFixture, *, with_keys: bool
) -> None:
    keys = ("right",) if with_keys else ()
    config = AccessConfig(api_keys=keys, audit_log="addresses")
    async with serving(access=config) as (server, frontend, _):
        statuses = []
        for raw in HIDDEN:
            for sent in ("right", CANARY):
                head = raw.replace(b"\r\n", f"\r\nauthorization: Bearer {sent}\r\n".encode(), 1)
                statuses.append((await exchange(server, head))[0])
        read = ["".join(map(chr, one.token_ids)) for one in frontend.generations]
    assert statuses.count(200) >= 9 and any(CANARY in text for text in read), "they were asked"
    assert statuses[1] == (401 if with_keys else 200)
    told = lines(caplog)
    assert CANARY not in str(told)
    assert [one["status"] for one in told] == statuses
    assert {one["address"] for one in told} == {"127.0.0.1"}


async def test_what_is_in_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = str(tmp_path / "keys.jsonl")
    write_keys(path, [key("ann", tenant="acme")])
    config = AccessConfig(key_file=path, audit_log="on")
    caplog.set_level("ERROR")  # as --log-level would
    caplog.handler.setLevel("INFO")
    async with serving(access=config) as (server, frontend, _):
        for raw in (
            request(HI, authorization="Bearer ann"),
            request(HI),
            request(method="GET", path="/health"),
            request(method="GET", path="/nothing", authorization="Bearer ann"),
        ):
            await exchange(server, raw)
        request_id = frontend.streams[0].request_id
    asked, refused, other = lines(caplog)
    times = asked.pop("at_s"), asked.pop("lasted_s")
    assert times[0] > 1.7e9 and 0 <= times[1] < 60
    assert asked == {
        "logger": LOGGER,
        "key": "ann",
        "tenant": "acme",
        "method": "POST",
        "path": CHAT,
        "status": 200,
        "request": request_id,
        "input_tokens": 2,
        "output_tokens": 5,
    }
    assert (refused["key"], refused["status"]) == ("", 401)
    assert (other["path"], other["status"]) == ("other", 403)


async def test_nobody_is_noted_by_default(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as (server, _, _):
        await exchange(server, request(HI))
    assert LOGGER not in [one.name for one in caplog.records]
