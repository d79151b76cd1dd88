"""Tokens on their way to gateways: those of one step leave in one message per gateway."""

from __future__ import annotations

from epd.fsm.request import Request
from epd.messages import TokenChunk, Tokens
from epd.roles.base import Actor
from epd.roles.steps.record import Record
from epd.roles.steps.step import new_tokens


class TokenOutbox:
    """Of one instance."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self._chunks: dict[str, list[TokenChunk]] = {}  # by gateway
        self.is_settling = False  # a step's outcomes are being turned into events

    def put(self, request: Request, record: Record, but_last: int = 0) -> None:
        """All that its gateway has not been sent, but so many that go another way."""
        is_first = not self._chunks
        chunk = new_tokens(request, record, but_last)
        self._chunks.setdefault(request.gateway.instance_id, []).append(chunk)
        if is_first and not self.is_settling:  # the step loop sends what its step made
            self._actor.mailbox.put("tokens", self.send)

    def send(self) -> None:
        for gateway, chunks in self._chunks.items():
            self._actor.send(gateway, Tokens(chunks=tuple(chunks)))
        self._chunks.clear()
