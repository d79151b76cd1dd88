"""The states of a request, for a client that asks for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from epd.api.answers.answer import Extras
from tests.api.fakes import TIMELINE, said
from tests.api.test_server import HI, ask, chunks_of, client_of


def test_a_timeline_begins_with_the_head() -> None:
    choice: Any = SimpleNamespace(stream=SimpleNamespace(timeline=lambda: TIMELINE))
    entries = Extras(timeline=True, began_s=999.75).of([choice])["epd"]["timeline"]
    assert [entry["t_ms"] for entry in entries] == [250.0, 255.0, 262.346]


async def test_request_id_and_timeline():
    wanted = {"x-epd-timeline": "1"}
    async with client_of() as (client, _, _):
        raw = await client.chat.completions.with_raw_response.create(model="tiny", messages=HI)
        assert raw.headers["x-request-id"] == "gw-1-0"
        assert "epd" not in raw.parse().model_dump()
        answer = await ask(client, extra_headers=wanted)
        chunks = await chunks_of(client, extra_headers=wanted)
        both = await ask(client, extra_headers=wanted, n=2)
    for entries in (answer.epd["timeline"], chunks[-1].epd["timeline"]):
        first, chunk, last = entries
        began_ms = first.pop("t_ms")
        assert first == {"machine": "GENERATION@gateway", "key": "", "state": "PREPARING"}
        assert (chunk["machine"], chunk["key"]) == ("CHUNK@p0", "1")
        assert (chunk["ms"], chunk["num_tokens"]) == (2.5, 7)
        assert chunk["t_ms"] - began_ms == pytest.approx(5.0, abs=0.01)
        assert last["t_ms"] - began_ms == pytest.approx(12.346, abs=0.01)
    assert [e["choice"] for e in both.epd["timeline"]] == [0] * len(TIMELINE) + [1] * len(TIMELINE)


async def test_an_answer_ended_by_a_stop_string_has_its_timeline():
    async with client_of([said("he"), said("llo")]) as (client, _, _):
        answer = await ask(client, extra_headers={"x-epd-timeline": "1"}, stop=["l"])
    assert answer.choices[0].message.content == "he"
    assert len(answer.epd["timeline"]) == len(TIMELINE)
