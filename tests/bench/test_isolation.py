"""`epd bench isolation` and `overlap`: who sends what when, and what is made of it."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from epd_lab.bench.servers import isolation, overlap
from epd_lab.bench.servers.isolation import IsolationLoad, Phase
from epd_lab.bench.servers.openai_load import Sample, ServerError, send_all
from epd_lab.bench.workload import Closed, Wording, chat_body


class Server:
    """Answers texts in no time, images in a moment; tokens of texts are late beside images."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._images = 0

    async def wording(self) -> Wording:
        return Wording(1.0)

    async def ask(self, body: bytes, zero_s: float) -> Sample:
        asked = json.loads(body)
        self.bodies.append(asked)
        parts = asked["messages"][0]["content"]
        num_images = sum(part["type"] == "image_url" for part in parts)
        words = sum(len(part["text"].split()) for part in parts if part["type"] == "text")
        sample = Sample(0.0, ttft_s=0.01, prompt_tokens=words + 256 * num_images)
        if num_images:
            self._images += 1
            await asyncio.sleep(0.05)
            self._images -= 1
            sample.timeline = [
                {"machine": "OUTGOING@e0", "state": "WRITTEN", "t_ms": 10.0 * n}
                for n in range(1, num_images + 1)
            ]
            sample.ttft_s = 0.06
        else:
            await asyncio.sleep(0.01)
            sample.gaps_s = [0.03 if self._images else 0.01] * 9
        return sample


async def play(*, with_bursts: bool) -> tuple[Server, Phase]:
    server = Server()
    load = IsolationLoad(users=4, probe_every_s=0.05, burst_every_s=0.1, phase_s=0.3)
    phase = await isolation.phase(server, load, "x", with_bursts=with_bursts)  # type: ignore[arg-type]
    return server, phase


async def test_bursts_come_beside_the_texts() -> None:
    server, phase = await play(with_bursts=True)
    assert len(phase.probes) == 6
    assert len(phase.users) >= 4
    assert len(phase.bursts) >= 4
    urls = [
        part["image_url"]["url"]
        for body in server.bodies
        for part in body["messages"][0]["content"]
        if part["type"] == "image_url"
    ]
    assert len(urls) == 4 * len(phase.bursts)
    assert len(set(urls)) == len(urls)
    texts = [body["messages"][0]["content"][-1]["text"] for body in server.bodies]
    assert len(set(texts)) == len(texts)
    assert not (await play(with_bursts=False))[1].bursts


async def test_users_ask_no_more_when_their_time_is_over() -> None:
    body = chat_body("word", [], 1)
    users = Closed(2, for_s=0.05)
    samples = await send_all(
        Server(), [body] * 1000, users, time.perf_counter(), lambda sample: None
    )
    assert 2 <= len(samples) < 100


async def test_a_row_tells_by_how_much_texts_were_slowed() -> None:
    alone = (await play(with_bursts=False))[1]
    beside = (await play(with_bursts=True))[1]
    row = isolation._row("1epd", ("0", "1"), [(alone, beside)] * 3)
    assert row.ratios["itl_ms_p99"] == pytest.approx(3.0)
    assert row.ratios["ttft_ms_p50"] == pytest.approx(1.0)
    assert not row.errors
    assert "| 1epd | 0 + 1 | 10.0 / 10.0 | " in isolation.table([row])
    beside.bursts.append(Sample(0.0, error="HTTP 503"))
    assert isolation._row("1epd", (), [(alone, beside)]).errors == ("HTTP 503",)


async def test_ttft_is_compared_with_the_longer_path() -> None:
    plan = overlap.OverlapPlan("1e1p1d", None, text_tokens=100)  # type: ignore[arg-type]
    asker = overlap._Asker(Server(), Wording(1.0), plan)  # type: ignore[arg-type]
    for place in overlap.PLACES:
        one = await asker.round(place)
        assert (one.encode_s, one.prefill_s, one.ttft_s) == (0.04, 0.01, 0.06)
        assert one.ratio == pytest.approx(1.5)
        assert one.prompt_tokens == 100 + 4 * 256
    kinds = {place: [part["type"] for part in asker._parts(place, 100)] for place in overlap.PLACES}
    assert kinds["behind the text"] == ["text"] + ["image_url"] * 4
    assert kinds["spread over it"] == ["text", "image_url"] * 4
    assert kinds["in front of it"] == ["image_url"] * 4 + ["text"]
    with pytest.raises(ServerError, match="no image"):
        overlap._rows_at_prefill_s(Sample(0.0))
