"""The `response` object of OpenAI's Responses API, and the events that it grows by.

Every event has a number.  An item is announced, its content grows, and then it is sent again as a
whole; the last event has the whole response.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from msgspec import Raw

from epd.api.answers.answer import AnswerFacts, raw_list, token_logprobs
from epd.api.answers.choice import Choice
from epd.api.answers.parts import AnswerPart, Kind, PartsAnswer, event
from epd.api.asked.asked import Asked
from epd.api.http.errors import ApiError
from epd.frontend import JsonObject
from epd.messages import TokenLogprobs

_ITEMS = {Kind.REASONING: "rs", Kind.TEXT: "msg", Kind.CALL: "fc"}
_GROWS = {
    Kind.REASONING: "reasoning_text",
    Kind.TEXT: "output_text",
    Kind.CALL: "function_call_arguments",
}


class ResponseAnswer(PartsAnswer):
    """One response."""

    def __init__(self, facts: AnswerFacts, asked: Asked) -> None:
        super().__init__(facts, asked)
        self._num_events = 0

    def opening(self, choice: Choice) -> bytes:
        begun = self._response("in_progress")
        return self._event("created", response=begun) + self._event("in_progress", response=begun)

    def failure(self, error: ApiError) -> bytes:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self._open = None
        told = {"code": code, "message": error.message}
        return self._event("failed", response=self._response("failed", error=told))

    def _complete(self, choice: Choice) -> JsonObject:
        is_cut = choice.finish_reason == "length"
        return self._response(
            "incomplete" if is_cut else "completed",
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            completed_at=None if is_cut else int(time.time()),
            usage=self._usage(choice),
            **self._extras,
        )

    def _ended(self, choice: Choice) -> bytes:
        response = self._complete(choice)
        return self._event(str(response["status"]), response=response)

    def _response(self, status: str, **more: object) -> JsonObject:
        return {
            "id": f"resp_{self._facts.request_id}",
            "object": "response",
            "created_at": self._facts.created_s,
            "model": self._facts.model_name,
            "status": status,
            "output": [self._item(part) for part in self._parts],
            **self._asked.echo,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "usage": None,
            **more,
        }

    def _usage(self, choice: Choice) -> JsonObject:
        """The number of reasoning tokens is given where there were none, and not counted else."""
        num_prompt_tokens = self._facts.num_prompt_tokens
        is_told = any(part.kind is Kind.REASONING for part in self._parts)
        reasoned = is_told or choice.hides_reasoning
        return {
            "input_tokens": num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": choice.num_cached, "cache_write_tokens": 0},
            "output_tokens": choice.num_tokens,
            "total_tokens": num_prompt_tokens + choice.num_tokens,
            **({} if reasoned else {"output_tokens_details": {"reasoning_tokens": 0}}),
        }

    # --- items ------------------------------------------------------------------------------------

    def _item(self, part: AnswerPart) -> JsonObject:
        status = "completed" if part.is_whole else "incomplete"
        if part is self._open:
            status = "in_progress"
        item = {"id": self._item_id(part), "status": status}
        if part.kind is Kind.CALL:
            call = {"call_id": part.call_id, "name": part.name, "arguments": part.text}
            return {"type": "function_call", **item, **call}
        content = [] if part is self._open and not part.text else [self._content(part)]
        if part.kind is Kind.REASONING:
            return {"type": "reasoning", **item, "summary": [], "content": content}
        return {"type": "message", **item, "role": "assistant", "content": content}

    def _item_id(self, part: AnswerPart) -> str:
        return f"{_ITEMS[part.kind]}_{self._facts.request_id}-{part.index}"

    def _content(self, part: AnswerPart) -> JsonObject:
        if part.kind is Kind.REASONING:
            return {"type": "reasoning_text", "text": part.text}
        logprobs = self._told(part.logprobs)
        return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": logprobs}

    def _told(self, entries: Sequence[TokenLogprobs]) -> Raw:
        return raw_list(entries, lambda entry: token_logprobs(entry, self._facts.token_text))

    # --- events -----------------------------------------------------------------------------------

    def _event(self, kind: str, /, **fields: object) -> bytes:
        number = self._num_events
        self._num_events += 1
        return event({"type": f"response.{kind}", "sequence_number": number, **fields})

    def _opened(self, part: AnswerPart) -> bytes:
        said = self._event("output_item.added", output_index=part.index, item=self._item(part))
        if part.kind is Kind.CALL:
            return said
        return said + self._event(
            "content_part.added", **self._place(part), part=self._content(part)
        )

    def _grown(self, part: AnswerPart, text: str, logprobs: Sequence[TokenLogprobs]) -> bytes:
        more = {"logprobs": self._told(logprobs)} if part.kind is Kind.TEXT else {}
        return self._event(f"{_GROWS[part.kind]}.delta", **self._place(part), delta=text, **more)

    def _closed(self, part: AnswerPart) -> bytes:
        place = self._place(part)
        if part.kind is Kind.CALL:
            told: JsonObject = {"name": part.name, "arguments": part.text}
            said = self._event("function_call_arguments.done", **place, **told)
        else:
            content = self._content(part)
            told = {k: v for k, v in content.items() if k in ("text", "logprobs")}
            said = self._event(f"{_GROWS[part.kind]}.done", **place, **told)
            said += self._event("content_part.done", **place, part=content)
        return said + self._event(
            "output_item.done", output_index=part.index, item=self._item(part)
        )

    def _place(self, part: AnswerPart) -> JsonObject:
        place = {"item_id": self._item_id(part), "output_index": part.index}
        return place if part.kind is Kind.CALL else {**place, "content_index": 0}
