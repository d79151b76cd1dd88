"""From a record to spans: names, nesting and attributes, as plain data.

The request is a SERVER span with the GenAI attributes of OpenTelemetry and, where vLLM has other
names for the same, those as well.  Its children are the stays of machines in states, by the field's
words: queue, fetch, decode-image, encode, transfer, wait, prefill (with its chunks), kv, decode.
States that are not in the table count with their neighbours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from epd.api.watching.tracing import Attribute, Record
from epd.frontend import TimelineEntry
from epd.records import STAGES

LATENCIES = {  # vLLM's attributes: sums of these spans of the language model
    "gen_ai.latency.time_in_queue": "queue",
    "gen_ai.latency.time_in_model_prefill": "prefill",
    "gen_ai.latency.time_in_model_decode": "decode",
}


@dataclass(slots=True)
class SpanData:
    """Seconds of the wall clock; `children` lie within it."""

    name: str
    began_s: float
    ended_s: float
    attributes: dict[str, Attribute] = field(default_factory=dict)
    children: list[SpanData] = field(default_factory=list)

    def __iter__(self) -> Iterator[SpanData]:
        """It and all below it."""
        yield self
        for child in self.children:
            yield from child


def spans_of(record: Record) -> SpanData:
    """The request's span, with everything below it."""
    model = record.attributes.get("gen_ai.request.model", "")
    root = SpanData(f"{record.operation} {model}".rstrip(), record.began_s, record.ended_s)
    root.attributes = {"gen_ai.operation.name": record.operation, **record.attributes}
    root.attributes["gen_ai.latency.e2e"] = record.ended_s - record.began_s
    if record.first_token_s:
        ttft_s = record.first_token_s - record.began_s
        root.attributes["gen_ai.latency.time_to_first_token"] = ttft_s
        root.attributes["gen_ai.response.time_to_first_chunk"] = ttft_s
    for index, timeline in enumerate(record.timelines):
        stays = list(_stays(timeline))
        root.children += stays
        if len(record.timelines) > 1:
            for span in stays:
                span.attributes["epd.choice"] = index
    _nest(root.children, "prefill", _chunks(record), same="epd.key")
    fetches = [SpanData("fetch", began_s, ended_s) for began_s, ended_s in record.fetches]
    _nest(root.children, "prepare", fetches)
    _add_latencies(root)
    if record.status:
        root.attributes["http.response.status_code"] = record.status
    if record.error[0]:
        root.attributes["error.type"] = record.error[0]
    return root


def _stays(timeline: list[TimelineEntry]) -> Iterator[SpanData]:
    """One span per stay of a machine in a state that has a name; without an end, to the last."""
    last_s = max((entry.at_s for entry in timeline), default=0.0)
    tracks = defaultdict[tuple[str, str, str], list[TimelineEntry]](list)
    for entry in timeline:
        if entry.machine != "CHUNK":
            tracks[entry.machine, entry.instance, entry.key].append(entry)
    for track in tracks.values():
        ends = [entry.at_s for entry in track[1:]] + [last_s]
        for entry, ended_s in zip(track, ends, strict=True):
            name = STAGES.get((entry.machine, entry.state))
            if name:
                yield SpanData(name, entry.at_s, ended_s, _where(entry))


def _where(entry: TimelineEntry) -> dict[str, Attribute]:
    return {
        "epd.instance": entry.instance,
        "epd.state": f"{entry.machine} {entry.state}",
        "epd.key": entry.key,
    }


def _chunks(record: Record) -> list[SpanData]:
    return [
        SpanData(
            "prefill chunk",
            entry.at_s,
            entry.at_s + entry.lasted_s,
            {**_where(entry), "epd.num_tokens": entry.num_tokens},
        )
        for timeline in record.timelines
        for entry in timeline
        if entry.machine == "CHUNK"
    ]


def _nest(spans: list[SpanData], name: str, inner: list[SpanData], same: str = "") -> None:
    """Put each of `inner` below the last span of that name that began before it; or beside them."""
    for one in inner:
        under = [
            span
            for span in spans
            if span.name == name
            and span.began_s <= one.ended_s
            and (not same or span.attributes.get(same) == one.attributes.get(same))
        ]
        (max(under, key=lambda span: span.began_s).children if under else spans).append(one)


def _add_latencies(root: SpanData) -> None:
    for attribute, name in LATENCIES.items():
        found = [
            span.ended_s - span.began_s
            for span in root.children
            if span.name == name and str(span.attributes["epd.state"]).startswith("REQUEST")
        ]
        if found:
            root.attributes[attribute] = sum(found)
