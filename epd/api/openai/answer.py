"""OpenAI's objects, whole and in chunks, for chat and plain completions.

A stream repeats most of its bytes in every chunk.  So a chunk is joined from fragments that are
encoded once per answer; only the new text goes through the JSON encoder.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import msgspec

from epd import __version__
from epd.api.answers.answer import (
    NO_EXTRAS,
    Answer,
    AnswerFacts,
    Extras,
    finite,
    raw_list,
    token_logprobs,
    usage,
)
from epd.api.answers.choice import Choice, Delta
from epd.api.answers.echo import prompt_logprobs
from epd.api.asked.asked import Asked
from epd.api.asked.tools import whole_calls
from epd.frontend import JsonObject
from epd.messages import TokenLogprobs

FINGERPRINT = f"epd-{__version__}"
DONE = b"data: [DONE]\n\n"

_json = msgspec.json.Encoder().encode
_FINISH = {"": b"null", "stop": b'"stop"', "length": b'"length"'}


class OpenAIAnswer(Answer):
    """What is equal in all objects of one answer of either kind; makes each of them."""

    whole_object: str
    chunk_object: str
    id_prefix: str

    def __init__(self, facts: AnswerFacts, asked: Asked) -> None:
        super().__init__(facts, asked)
        self._shared = {
            "id": self.id_prefix + facts.request_id,
            "object": self.whole_object,
            "created": facts.created_s,
            "model": facts.model_name,
            "system_fingerprint": FINGERPRINT,
        }
        self._num_logprobs = asked.num_logprobs
        shared = _json({**self._shared, "object": self.chunk_object})[:-1]
        self._head = b"data: " + shared + b',"choices":[{"index":'
        self._usage_head = b"data: " + shared + b',"choices":[],"usage":'
        self._tail = b',"usage":null}\n\n' if asked.include_usage else b"}\n\n"
        self._offsets: dict[int, int] = {}  # by choice: characters of the tokens so far

    # --- whole ------------------------------------------------------------------------------------

    def whole(self, choices: Sequence[tuple[Choice, Delta]], extras: Extras = NO_EXTRAS) -> bytes:
        """The response of a request that does not stream."""
        value = {
            **self._shared,
            "choices": [
                {
                    "index": choice.index,
                    **self._said(choice, delta),
                    "logprobs": self._logprobs(choice.index, delta.logprobs),
                    "finish_reason": choice.finish_reason,
                    **self._besides(choice, delta),
                }
                for choice, delta in choices
            ],
            "usage": usage(self._facts.num_prompt_tokens, [choice for choice, _ in choices]),
            **self._scored(choices[0][0]),
        }
        value |= extras.of([choice for choice, _ in choices])
        return _json(value)

    # --- chunks -----------------------------------------------------------------------------------

    def events(self, choice: Choice, delta: Delta, extras: Extras = NO_EXTRAS) -> bytes:
        """One event with what is new of a choice; empty if nothing is.

        Tokens whose text is held back, or that have none, are news too: clients time them.  But the
        marks around a call are none: clients take an empty text for the end of the calls.
        """
        silent = choice.is_parsed and self._num_logprobs < 0 and not self._asked.return_token_ids
        has_tokens = delta.token_ids and not silent
        is_said = delta.text or delta.calls or delta.reasoning
        if not (has_tokens or is_said or delta.finish_reason):
            return b""
        logprobs = b"null"
        if self._num_logprobs >= 0:
            logprobs = _json(self._logprobs(choice.index, delta.logprobs))
        besides = self._besides(choice, delta)
        tail = self._tail_of(choice)
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
                b"," + _json(besides)[1:] if besides else b"}",
                b"]",
                tail,
            )
        )

    def _tail_of(self, choice: Choice) -> bytes:
        """The end of a chunk, with the usage so far if each is to have it."""
        if not self._asked.continuous_usage:
            return self._tail
        return b',"usage":' + _json(usage(choice.num_prompt_tokens, [choice])) + b"}\n\n"

    def end(self, choices: Sequence[Choice]) -> bytes:
        """For stream_options.include_usage one more event, then the mark of a whole stream."""
        if not self._asked.include_usage:
            return DONE
        told = _json(usage(self._facts.num_prompt_tokens, choices))
        return self._usage_head + told + b"}\n\n" + DONE

    # --- what other servers tell besides ----------------------------------------------------------

    def _besides(self, choice: Choice, delta: Delta) -> JsonObject:
        """Of a choice, whole or in a chunk: its end, under SGLang's name, and under vLLM's if the
        client named it; and the tokens that it counts."""
        told: JsonObject = {}
        if delta.finish_reason:
            ended = choice.matched_stop
            own = isinstance(ended, str) or ended in self._asked.stop_token_ids
            told = {"stop_reason": ended if own else None, "matched_stop": ended}
        if self._asked.return_token_ids:
            told["token_ids"] = delta.token_ids
        return told

    def _prompt_ids(self, choice: Choice) -> JsonObject:
        if not self._asked.return_token_ids:
            return {}
        return {"prompt_token_ids": choice.prompt_token_ids}

    def _named(self, token_id: int) -> tuple[str, bytes]:
        """A token as log-probabilities show it: by its text, or by its id, and its bytes."""
        text, raw = self._facts.token_text(token_id)
        return f"token_id:{token_id}" if self._asked.return_tokens_as_token_ids else text, raw

    # --- what differs -----------------------------------------------------------------------------

    def _scored(self, choice: Choice) -> JsonObject:
        """Fields of the prompt beside the choices."""
        return {}

    def _prompt_logprobs(self, choice: Choice) -> JsonObject:
        num_top = self._asked.num_prompt_logprobs
        if num_top < 0:
            return {}
        told = prompt_logprobs(choice.prompt_logprobs, num_top, self._facts.token_text)
        return {"prompt_logprobs": raw_list(told, lambda position: position)}

    @abstractmethod
    def _said(self, choice: Choice, delta: Delta) -> JsonObject:
        """The part of a whole choice that holds the text."""

    @abstractmethod
    def _new(self, choice: Choice, delta: Delta) -> bytes:
        """The part of a chunk's choice that holds the text, with a comma ahead of it."""

    @abstractmethod
    def _logprobs(self, index: int, entries: Sequence[TokenLogprobs]) -> JsonObject | None: ...


class ChatAnswer(OpenAIAnswer):
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"
    tells_reasoning = True

    def opening(self, choice: Choice) -> bytes:
        role = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        prompt = self._prompt_ids(choice)
        ids = b"," + _json(prompt)[1:-1] if prompt else b""
        return b"".join((self._head, b"%d" % choice.index, role, ids, self._tail_of(choice)))

    def _scored(self, choice: Choice) -> JsonObject:
        return self._prompt_logprobs(choice) | self._prompt_ids(choice)

    def _said(self, choice: Choice, delta: Delta) -> JsonObject:
        message: JsonObject = {"role": "assistant", "content": delta.text, "refusal": None}
        if delta.calls:
            message["content"] = delta.text or None
            message["tool_calls"] = whole_calls(delta.calls)
        if delta.reasoning:
            message |= {"content": delta.text or None, **_reasoning(delta.reasoning)}
        return {"message": message}

    def _new(self, choice: Choice, delta: Delta) -> bytes:
        if delta.text and not (delta.calls or delta.reasoning):
            return b',"delta":{"content":' + _json(delta.text) + b"}"
        said: JsonObject = _reasoning(delta.reasoning) if delta.reasoning else {}
        if delta.text or not (choice.is_parsed or delta.finish_reason):
            said["content"] = delta.text
        if delta.calls:
            said["tool_calls"] = [piece.delta() for piece in delta.calls]
        return b',"delta":' + _json(said)

    def _logprobs(self, index: int, entries: Sequence[TokenLogprobs]) -> JsonObject | None:
        if self._num_logprobs < 0:
            return None
        content = raw_list(entries, self._told)
        return {"content": content, "refusal": None}

    def _told(self, entry: TokenLogprobs) -> JsonObject:
        if self._asked.logprob_token_ids and all(i != entry.token_id for i, _ in entry.top):
            own = (entry.token_id, entry.logprob)
            entry = msgspec.structs.replace(entry, top=(own, *entry.top))
        return token_logprobs(entry, self._named)


class CompletionAnswer(OpenAIAnswer):
    whole_object = "text_completion"
    chunk_object = "text_completion"
    id_prefix = "cmpl-"

    def _said(self, choice: Choice, delta: Delta) -> JsonObject:
        return {"text": delta.text, **self._prompt_logprobs(choice), **self._prompt_ids(choice)}

    def _new(self, choice: Choice, delta: Delta) -> bytes:
        is_first = len(delta.token_ids) == choice.num_tokens
        said = {"text": delta.text, **(self._prompt_ids(choice) if is_first else {})}
        return b"," + _json(said)[1:-1]

    def _logprobs(self, index: int, entries: Sequence[TokenLogprobs]) -> JsonObject | None:
        if self._num_logprobs < 0:
            return None
        offset = self._offsets.get(index, 0)
        tokens, offsets = [], []
        for entry in entries:
            tokens.append(self._named(entry.token_id)[0])
            offsets.append(offset)
            offset += len(self._facts.token_text(entry.token_id)[0])
        self._offsets[index] = offset
        return {
            "tokens": tokens,
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            "top_logprobs": raw_list(entries, self._top),
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float] | None:
        """By text; of two tokens that look alike, the likelier one.  The token itself is among
        them, as in OpenAI's API, also if it is none of the likeliest."""
        if math.isnan(entry.logprob):
            return None
        top: dict[str, float] = {}
        own = (entry.token_id, entry.logprob)
        is_chosen = self._asked.logprob_token_ids and not entry.rank  # else of the prompt
        others = entry.top if is_chosen else entry.top[: self._num_logprobs]
        for token_id, logprob in (*others, own):
            top.setdefault(self._named(token_id)[0], finite(logprob))
        return top


def _reasoning(text: str) -> JsonObject:
    """Under vLLM's name, and the older one of it and others."""
    return {"reasoning": text, "reasoning_content": text}
