"""Anthropic's objects and events of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from epd.api.answers.choice import Choice
from epd.api.answers.parts import AnswerPart, Kind, PartsAnswer, event
from epd.api.anthropic.errors import error_body
from epd.api.http.errors import ApiError
from epd.frontend import JsonObject
from epd.messages import TokenLogprobs

_STOP = {"length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS = {
    Kind.REASONING: ("thinking_delta", "thinking"),
    Kind.TEXT: ("text_delta", "text"),
    Kind.CALL: ("input_json_delta", "partial_json"),
}


class MessageAnswer(PartsAnswer):
    """A `message`, whole or as its six events."""

    def opening(self, choice: Choice) -> bytes:
        message = self._message(choice, [], None)
        message["usage"] = {**self._usage(choice), "output_tokens": 0}
        return event({"type": "message_start", "message": message}) + event({"type": "ping"})

    def failure(self, error: ApiError) -> bytes:
        return event(error_body(error))

    def _complete(self, choice: Choice) -> JsonObject:
        content = [_block(part) for part in self._parts]
        return self._message(choice, content, self._stop_reason(choice)) | self._extras

    def _message(self, choice: Choice, content: list[JsonObject], reason: str | None) -> JsonObject:
        return {
            "id": f"msg_{self._facts.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._facts.model_name,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": choice.stop_string or None if reason else None,
            "usage": self._usage(choice),
        }

    def _stop_reason(self, choice: Choice) -> str:
        if choice.stop_string:
            return "stop_sequence"
        most = self._asked.max_context
        if (
            choice.finish_reason == "length"
            and choice.num_tokens + choice.num_prompt_tokens == most
        ):
            return "model_context_window_exceeded"
        if choice.finish_reason == "stop" and any(p.kind is Kind.CALL for p in self._parts):
            return "tool_use"  # of a function that was named
        return _STOP.get(choice.finish_reason, "end_turn")

    def _usage(self, choice: Choice) -> JsonObject:
        """Here what was found in the cache is not among the input's tokens."""
        return {
            "input_tokens": self._facts.num_prompt_tokens - choice.num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": choice.num_cached,
            "output_tokens": choice.num_tokens,
        }

    # --- events -----------------------------------------------------------------------------------

    def _opened(self, part: AnswerPart) -> bytes:
        block = _block(replace(part, text=""))
        return event({"type": "content_block_start", "index": part.index, "content_block": block})

    def _grown(self, part: AnswerPart, text: str, logprobs: Sequence[TokenLogprobs]) -> bytes:
        kind, name = _DELTAS[part.kind]
        delta = {"type": kind, name: text}
        return event({"type": "content_block_delta", "index": part.index, "delta": delta})

    def _closed(self, part: AnswerPart) -> bytes:
        return event({"type": "content_block_stop", "index": part.index})

    def _ended(self, choice: Choice) -> bytes:
        delta = {
            "stop_reason": self._stop_reason(choice),
            "stop_sequence": choice.stop_string or None,
        }
        last = {"type": "message_delta", "delta": delta, "usage": self._usage(choice)}
        return event(last | self._extras) + event({"type": "message_stop"})


def _block(part: AnswerPart) -> JsonObject:
    if part.kind is Kind.TEXT:
        return {"type": "text", "text": part.text}
    if part.kind is Kind.REASONING:
        return {"type": "thinking", "thinking": part.text, "signature": ""}  # nobody signs here
    call_id = part.call_id.replace("call_", "toolu_", 1)
    return {"type": "tool_use", "id": call_id, "name": part.name, "input": _arguments(part.text)}


def _arguments(text: str) -> JsonObject:
    """A call that was cut off by its number of tokens has none that can be read."""
    try:
        value = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}
