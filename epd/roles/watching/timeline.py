"""The timelines of open requests at the gateway: its own story, and the reports of the stages.

Reports may be repeated and may be lost; a timeline has those that came, in order of time.
"""

from __future__ import annotations

from epd.frontend import TimelineEntry
from epd.fsm.generation import Generation
from epd.messages import Span
from epd.roles.base import Actor

HASH_DIGITS = 12  # of an mm_hash: enough to tell the images of a request apart


class Timelines:
    """By request id."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self._reports: dict[str, dict[tuple[str, Span], None]] = {}

    def __len__(self) -> int:
        """Requests with reports."""
        return len(self._reports)

    def add(self, source: str, request_id: str, spans: tuple[Span, ...]) -> None:
        """A stage's message; repeats change nothing."""
        report = self._reports.setdefault(request_id, {})
        report.update(dict.fromkeys((source, span) for span in spans))

    def drop(self, request_id: str) -> None:
        self._reports.pop(request_id, None)

    def of(self, machine: Generation) -> list[TimelineEntry]:
        """All stages of the request so far; empty unless it was asked for."""
        if machine.asked is None or not machine.asked.wants_timeline:
            return []
        own = [(self._actor.address.instance_id, span) for span in self._actor.spans(machine)]
        spans = sorted([*own, *self._reports.get(machine.key, ())], key=lambda pair: pair[1].at_s)
        start_s = own[0][1].at_s
        clock = self._actor.clock
        set_s = clock.wall_s() - clock.now_s() - self._actor.told_offset_s()  # since it started
        return [
            TimelineEntry(
                span.machine,
                source,
                _short(span, machine.key),
                span.state,
                span.at_s + set_s,
                span.lasted_s,
                span.num_tokens,
            )
            for source, span in spans
            if span.at_s >= start_s  # rows cached earlier have a longer story than this request
        ]


def _short(span: Span, request_id: str) -> str:
    """A key within its request: attempt, attempt/item, attempt/kv, or the image's hash."""
    if span.machine == "ENCODING":
        return span.key[:HASH_DIGITS]
    return span.key.removeprefix(request_id).removeprefix("/")
