"""The reports of an instance when an attempt ends: its outcome, and its timeline.

A timeline is read from the machines' stories, which keep changes of state.  The chunks in which a
prompt was computed change no state, so they are noted here, for those requests whose client or
trace asked for them.
"""

from __future__ import annotations

from collections.abc import Callable

from epd.fsm.kernel import Event, Machine
from epd.fsm.request import Do, Request
from epd.messages import RequestAborted, RequestFailed, Span, StageReport
from epd.roles.base import Actor, Component, performs

MAX_CHUNKS = 256  # of one attempt; a timeline of more tells nobody anything


class Reports(Component[Request]):
    """A part of `Requests`."""

    def __init__(self, actor: Actor) -> None:
        super().__init__(actor)
        self.related: list[Callable[[Request], list[Machine | None]]] = []
        self._chunks: dict[str, list[Span]] = {}

    def live(self) -> dict[str, int]:
        return {"chunk_logs": len(self._chunks)}

    def note_chunk(self, request: Request, lasted_s: float, num_tokens: int) -> None:
        """A step that took so long has just computed so much of its prompt."""
        if not request.message.reports or request.terminal:
            return
        chunks = self._chunks.setdefault(request.key, [])
        if len(chunks) < MAX_CHUNKS:
            offset_s = self.actor.told_offset_s(request.gateway.instance_id)
            at_s = self.clock.now_s() + offset_s - lasted_s
            chunks.append(
                Span(
                    machine="CHUNK",
                    state="COMPUTED",
                    at_s=at_s,
                    key=request.key,
                    lasted_s=lasted_s,
                    num_tokens=num_tokens,
                )
            )

    def forget(self, request: Request) -> None:
        self._chunks.pop(request.key, None)

    def _spans(self, request: Request) -> tuple[Span, ...]:
        machines = [machine for related in self.related for machine in related(request)]
        chunks = self._chunks.get(request.key, ())
        own = self.actor.spans(request, *machines, gateway=request.gateway.instance_id)
        return (*own, *chunks)

    @performs(Do.REPORT_SPANS)
    def report_spans(self, request: Request, event: Event) -> None:
        if request.message.reports:
            spans = self._spans(request)
            report = StageReport(
                request_id=request.request_id, attempt=request.attempt, spans=spans
            )
            self.actor.send(request.gateway, report)

    @performs(Do.SEND_ABORTED)
    def send_aborted(self, request: Request, event: Event) -> None:
        self.report_spans(request, event)  # ahead of the message that ends the generation there
        self.actor.send(
            request.gateway, RequestAborted(request_id=request.request_id, attempt=request.attempt)
        )

    @performs(Do.SEND_FAILURE)
    def send_failure(self, request: Request, event: Event) -> None:
        assert request.failure is not None  # whatever orders this has said why
        spans = self._spans(request) if request.message.reports else ()
        failed = RequestFailed(
            request_id=request.request_id,
            attempt=request.attempt,
            failure=request.failure,
            spans=spans,
        )
        self.actor.send(request.gateway, failed)
