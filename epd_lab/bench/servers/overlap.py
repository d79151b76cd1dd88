"""`epd bench overlap`: whether images are encoded while the prompt is being computed.

One request at a time on idle instances: a long text and four images that no cache has seen.  Its
time to first token is compared with the longer of its two paths, each taken alone.  The *encode
path* is the time until the rows of four new images lie at prefill.  The *prefill path* is the time
to the first token of a text with as many tokens.  A server that does one after the other needs
their sum.  Where the images stand matters, as nothing behind an image can be computed before its
rows have come, so three places are measured.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from epd.cli.start.plan import StartPlan as ClusterPlan
from epd.cli.start.supervisor import running
from epd_lab.bench.servers.isolation import REQUEST_TIMEOUT_S
from epd_lab.bench.servers.openai_load import Sample, Server, ServerError, connected
from epd_lab.bench.workload import Wording, chat_body, image_url

PLACES = ("behind the text", "spread over it", "in front of it")


@dataclass(frozen=True, slots=True)
class OverlapPlan:
    """What to measure."""

    topology: str
    cluster: Callable[[str], ClusterPlan]
    repeats: int = 5
    text_tokens: int = 2000
    images: int = 4
    size: tuple[int, int] = (256, 256)


@dataclass(frozen=True, slots=True)
class OverlapRow:
    """Images in one place; medians of the repeats, milliseconds."""

    topology: str
    place: str
    prompt_tokens: float
    encode_ms: float
    prefill_ms: float
    ttft_ms: float
    ratio: float  # to the longer path, median of the repeats' own
    repeats: int


async def measure(plan: OverlapPlan) -> list[OverlapRow]:
    """Raises ServerError when a request fails."""
    cluster = plan.cluster(plan.topology)
    assert cluster.gateway is not None
    url = f"http://{cluster.gateway.host}:{cluster.gateway.port}"
    rows = []
    async with running(cluster), connected(url, REQUEST_TIMEOUT_S) as server:
        asker = _Asker(server, await server.wording(), plan)
        await asker.round(PLACES[0])  # warm
        for place in PLACES:
            rounds = [await asker.round(place) for _ in range(plan.repeats)]
            rows.append(_row(plan.topology, place, rounds))
            print(_line(rows[-1]), file=sys.stderr, flush=True)
    return rows


@dataclass(frozen=True, slots=True)
class Round:
    """One repeat: the two paths alone, and the request that has both; seconds."""

    prompt_tokens: int
    encode_s: float
    prefill_s: float
    ttft_s: float

    @property
    def ratio(self) -> float:
        return self.ttft_s / max(self.encode_s, self.prefill_s)


class _Asker:
    """Makes requests whose texts and images are all new."""

    def __init__(self, server: Server, wording: Wording, plan: OverlapPlan) -> None:
        self._server, self._wording, self._plan = server, wording, plan
        self._serial = 0

    async def round(self, place: str) -> Round:
        plan = self._plan
        images = await self._ask(self._parts("in front of it", 16))
        whole = await self._ask(self._parts(place, plan.text_tokens))
        num_text = whole.prompt_tokens
        prompt = await self._ask([self._text(num_text)])
        return Round(num_text, _rows_at_prefill_s(images), prompt.ttft_s, whole.ttft_s)

    def _parts(self, place: str, num_text: int) -> list[dict[str, Any]]:
        count = self._plan.images
        images = [self._image() for _ in range(count)]
        if place == "behind the text":
            return [self._text(num_text), *images]
        if place == "in front of it":
            return [*images, self._text(num_text)]
        texts = [self._text(num_text // count) for _ in range(count)]
        return [part for pair in zip(texts, images, strict=True) for part in pair]

    def _text(self, num_tokens: int) -> dict[str, Any]:
        self._serial += 1
        text = self._wording.text(num_tokens, f"overlap {self._serial} {time.time_ns()}")
        return {"type": "text", "text": text}

    def _image(self) -> dict[str, Any]:
        self._serial += 1
        url = image_url(self._plan.size, time.time_ns() % 1_000_000_000 + self._serial)
        return {"type": "image_url", "image_url": {"url": url}}

    async def _ask(self, parts: list[dict[str, Any]]) -> Sample:
        body = json.loads(chat_body("", [], 2))
        body["messages"][0]["content"] = parts
        sample = await self._server.ask(json.dumps(body).encode(), time.perf_counter())
        if sample.error:
            raise ServerError(f"a request of the measurement failed: {sample.error}")
        return sample


def _rows_at_prefill_s(sample: Sample) -> float:
    """When the last image's rows had been written, by the encoders' own account."""
    done: list[float] = [
        event["t_ms"]
        for event in sample.timeline
        if event["machine"].startswith("OUTGOING@e") and event["state"] == "WRITTEN"
    ]
    if not done:
        raise ServerError("the timeline tells of no image; give a topology with encoders: 1e1p1d")
    return max(done) / 1e3


def _row(topology: str, place: str, rounds: Sequence[Round]) -> OverlapRow:
    def median_ms(values: list[float]) -> float:
        return round(1e3 * statistics.median(values), 1)

    return OverlapRow(
        topology,
        place,
        statistics.median(one.prompt_tokens for one in rounds),
        median_ms([one.encode_s for one in rounds]),
        median_ms([one.prefill_s for one in rounds]),
        median_ms([one.ttft_s for one in rounds]),
        round(statistics.median(one.ratio for one in rounds), 3),
        len(rounds),
    )


# --- for people -----------------------------------------------------------------------------------

HEAD = (
    "| topology | images | prompt tokens | encode path alone ms | prefill path alone ms | "
    "both: TTFT ms | by the longer path | sum of both ms |\n|---|---|---|---|---|---|---|---|"
)


def table(rows: Sequence[OverlapRow]) -> str:
    """Markdown."""
    return "\n".join([HEAD, *map(_line, rows)])


def _line(row: OverlapRow) -> str:
    return (
        f"| {row.topology} | {row.place} | {row.prompt_tokens:.0f} | {row.encode_ms:.0f} | "
        f"{row.prefill_ms:.0f} | {row.ttft_ms:.0f} | {row.ratio:.2f} | "
        f"{row.encode_ms + row.prefill_ms:.0f} |"
    )


def as_objects(rows: Sequence[OverlapRow]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]
