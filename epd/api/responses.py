"""OpenAI's response objects, whole and in chunks, for chat and plain completions.

A stream repeats most of its bytes in every chunk, so a chunk is glued from fragments that are
encoded once per answer; only the new text goes through the JSON encoder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from epd import __version__
from epd.api.choice import Choice, Delta
from epd.api.tools import whole_calls
from epd.messages import TokenLogprobs

FINGERPRINT = f"epd-{__version__}"
TokenText = Callable[[int], tuple[str, bytes]]

_json = msgspec.json.Encoder().encode
_FINISH = {"": b"null", "stop": b'"stop"', "length": b'"length"'}


@dataclass(frozen=True, slots=True)
class Extras:
    """What an answer tells besides, because a header asked for it."""

    timeline: bool = False
    transfer_params: bool = False

    def of(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Fields to add to an object that holds these choices."""
        added: dict[str, Any] = {}
        if self.timeline:
            added["epd"] = {"timeline": _timeline(choices)}
        if self.transfer_params:
            params = [choice.stream.transfer_params() for choice in choices]
            single = len(params) == 1  # with several, one entry for each choice
            added["ec_transfer_params"] = params[0].ec if single else [p.ec for p in params]
            added["kv_transfer_params"] = params[0].kv if single else [p.kv for p in params]
        return added


NO_EXTRAS = Extras()


class Answer(ABC):
    """What is equal in all objects of one answer; makes each of them."""

    whole_object: str
    chunk_object: str
    id_prefix: str

    def __init__(
        self,
        request_id: str,
        model_name: str,
        created_s: int,
        num_prompt_tokens: int,
        *,
        num_logprobs: int,
        include_usage: bool,
        continuous_usage: bool = False,
        token_text: TokenText,
    ) -> None:
        self._shared = {
            "id": self.id_prefix + request_id,
            "object": self.whole_object,
            "created": created_s,
            "model": model_name,
            "system_fingerprint": FINGERPRINT,
        }
        self._num_prompt_tokens = num_prompt_tokens
        self._num_logprobs = num_logprobs
        self._token_text = token_text
        shared = _json({**self._shared, "object": self.chunk_object})[:-1]
        self._head = b"data: " + shared + b',"choices":[{"index":'
        self._usage_head = b"data: " + shared + b',"choices":[],"usage":'
        self._tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._continuous_usage = continuous_usage
        self._offsets: dict[int, int] = {}  # by choice: characters of the tokens so far

    # --- whole ------------------------------------------------------------------------------------

    def whole(self, choices: Sequence[tuple[Choice, Delta]], extras: Extras = NO_EXTRAS) -> bytes:
        """The response of a request that does not stream."""
        value = {
            **self._shared,
            "choices": [
                {
                    "index": choice.index,
                    **self._said(delta),
                    "logprobs": self._logprobs(choice.index, delta.logprobs),
                    "finish_reason": choice.finish_reason,
                }
                for choice, delta in choices
            ],
            "usage": usage(self._num_prompt_tokens, [choice for choice, _ in choices]),
        }
        value |= extras.of([choice for choice, _ in choices])
        return _json(value)

    # --- chunks -----------------------------------------------------------------------------------

    def first_chunk(self, index: int) -> bytes:
        """What goes ahead of a choice's text; may be empty."""
        return b""

    def chunk(self, choice: Choice, delta: Delta, extras: Extras = NO_EXTRAS) -> bytes:
        """An event with what is new of one choice; empty if nothing is.

        Tokens whose text is held back, or that have none, are news too: clients time them.  But the
        marks around a call are none: clients take an empty text for the end of the calls.
        """
        silent = choice.is_parsed and self._num_logprobs < 0
        has_tokens = delta.num_tokens and not silent
        if not (has_tokens or delta.text or delta.finish_reason or delta.calls):
            return b""
        logprobs = b"null"
        if self._num_logprobs >= 0:
            logprobs = _json(self._logprobs(choice.index, delta.logprobs))
        tail = self._tail
        if self._continuous_usage:
            so_far = usage(self._num_prompt_tokens, [choice])
            tail = b',"usage":' + _json(so_far) + b"}\n\n"
        if delta.finish_reason and (added := extras.of([choice])):
            tail = b"," + _json(added)[1:-1] + tail
        return b"".join(
            (
                self._head,
                b"%d" % choice.index,
                self._new(choice, delta),
                b',"logprobs":',
                logprobs,
                b',"finish_reason":',
                _FINISH.get(delta.finish_reason) or _json(delta.finish_reason),
                b"}]",
                tail,
            )
        )

    def usage_chunk(self, choices: Sequence[Choice]) -> bytes:
        """The event after the last choice's end, for stream_options.include_usage."""
        return self._usage_head + _json(usage(self._num_prompt_tokens, choices)) + b"}\n\n"

    # --- what differs -----------------------------------------------------------------------------

    @abstractmethod
    def _said(self, delta: Delta) -> dict[str, Any]:
        """The part of a whole choice that holds the text."""

    @abstractmethod
    def _new(self, choice: Choice, delta: Delta) -> bytes:
        """The part of a chunk's choice that holds the text, with a comma ahead of it."""

    @abstractmethod
    def _logprobs(self, index: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None: ...


class ChatAnswer(Answer):
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def first_chunk(self, index: int) -> bytes:
        role = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        return b"".join((self._head, b"%d" % index, role, self._tail))

    def _said(self, delta: Delta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": delta.text, "refusal": None}
        if delta.calls:
            message["content"] = delta.text or None
            message["tool_calls"] = whole_calls(delta.calls)
        return {"message": message}

    def _new(self, choice: Choice, delta: Delta) -> bytes:
        if delta.text and not delta.calls:
            return b',"delta":{"content":' + _json(delta.text) + b"}"
        said: dict[str, Any] = {}
        if delta.text or not (choice.is_parsed or delta.finish_reason):
            said["content"] = delta.text
        if delta.calls:
            said["tool_calls"] = [piece.delta() for piece in delta.calls]
        return b',"delta":' + _json(said)

    def _logprobs(self, index: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if self._num_logprobs < 0:
            return None
        content = [
            {
                **self._token(entry.token_id, entry.logprob),
                "top_logprobs": [self._token(*top) for top in entry.top],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = self._token_text(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}


class CompletionAnswer(Answer):
    whole_object = "text_completion"
    chunk_object = "text_completion"
    id_prefix = "cmpl-"

    def _said(self, delta: Delta) -> dict[str, Any]:
        return {"text": delta.text}

    def _new(self, choice: Choice, delta: Delta) -> bytes:
        return b',"text":' + _json(delta.text)

    def _logprobs(self, index: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if self._num_logprobs < 0:
            return None
        offset = self._offsets.get(index, 0)
        tokens, offsets = [], []
        for entry in entries:
            text = self._token_text(entry.token_id)[0]
            tokens.append(text)
            offsets.append(offset)
            offset += len(text)
        self._offsets[index] = offset
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [self._top(e) for e in entries] if self._num_logprobs else None,
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """By text; of two tokens that look alike, the likelier one."""
        top: dict[str, float] = {}
        for token_id, logprob in entry.top:
            top.setdefault(self._token_text(token_id)[0], _finite(logprob))
        return top


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes a forbidden token so."""
    return max(logprob, -9999.0)


def usage(num_prompt_tokens: int, choices: Sequence[Choice]) -> dict[str, Any]:
    """Prompt tokens include the rows of images; completion tokens are of all choices.  Cached are
    tokens of the prompt that were computed for no choice.

    Where tokens were guessed (speculative decoding), how many guesses were right and wrong, under
    OpenAI's names; wrong ones are in no other count.
    """
    num_tokens = sum(choice.num_tokens for choice in choices)
    counts: dict[str, Any] = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
        "prompt_tokens_details": {"cached_tokens": min(choice.num_cached for choice in choices)},
    }
    accepted = sum(choice.num_confirmed for choice in choices)
    rejected = sum(choice.num_rejected for choice in choices)
    if accepted or rejected:
        counts["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
        }
    return counts


def _timeline(choices: Sequence[Choice]) -> list[dict[str, Any]]:
    """For X-EPD-Timeline; with several choices each entry says whose it is."""
    entries = []
    for choice in choices:
        timeline = choice.stream.timeline()
        start_s = timeline[0].at_s if timeline else 0.0
        for one in timeline:
            entry: dict[str, Any] = {
                "machine": f"{one.machine}@{one.instance}",
                "key": one.key,
                "state": one.state,
                "t_ms": round((one.at_s - start_s) * 1e3, 3),
            }
            if one.lasted_s:
                entry |= {"ms": round(one.lasted_s * 1e3, 3), "num_tokens": one.num_tokens}
            entries.append(entry if len(choices) == 1 else {"choice": choice.index, **entry})
    return entries
