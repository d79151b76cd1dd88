"""One answer, whole or streamed: the port to the form of each API."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from msgspec import Raw

from epd.api.answers.choice import Choice, Delta
from epd.api.asked.asked import Asked
from epd.api.http.errors import ApiError, failure_event
from epd.frontend import JsonObject
from epd.messages import TokenLogprobs

T = TypeVar("T")
PIECE = 256  # tokens
_json = msgspec.json.Encoder().encode
TokenText = Callable[[int], tuple[str, bytes]]


@dataclass(frozen=True, slots=True)
class Extras:
    """Fields of an answer that a header asks for."""

    timeline: bool = False
    transfer_params: bool = False
    began_s: float = 0.0  # of the request's head, by the wall clock

    def of(self, choices: Sequence[Choice]) -> JsonObject:
        """Fields to add to an object that holds these choices."""
        added: JsonObject = {}
        if self.timeline:
            added["epd"] = {"timeline": _timeline(choices, self.began_s)}
        if self.transfer_params:
            params = [choice.stream.transfer_params() for choice in choices]
            single = len(params) == 1  # with several, one entry for each choice
            added["ec_transfer_params"] = params[0].ec if single else [p.ec for p in params]
            added["kv_transfer_params"] = params[0].kv if single else [p.kv for p in params]
        return added


NO_EXTRAS = Extras()


@dataclass(frozen=True, slots=True)
class AnswerFacts:
    """Data of an answer's objects, beside what was generated."""

    request_id: str
    model_name: str
    created_s: int
    num_prompt_tokens: int
    token_text: TokenText


class Answer(ABC):
    """Makes the objects and events of one answer; choices go through their lives in it."""

    tells_reasoning = False  # apart from the text; else its marks are text

    def __init__(self, facts: AnswerFacts, asked: Asked) -> None:
        self._facts = facts
        self._asked = asked

    @abstractmethod
    def whole(self, choices: Sequence[tuple[Choice, Delta]], extras: Extras = NO_EXTRAS) -> bytes:
        """The response of a request that does not stream."""

    def opening(self, choice: Choice) -> bytes:
        """Events ahead of a choice's first ones, with which they leave."""
        return b""

    @abstractmethod
    def events(self, choice: Choice, delta: Delta, extras: Extras = NO_EXTRAS) -> bytes:
        """Events with what is new of one choice; may be empty."""

    @abstractmethod
    def end(self, choices: Sequence[Choice]) -> bytes:
        """Events behind the last of all choices."""

    def failure(self, error: ApiError) -> bytes:
        """The event that ends a stream which has begun and cannot go on."""
        return failure_event(error)


def token_logprobs(entry: TokenLogprobs, token_text: TokenText) -> JsonObject:
    """One token and the likeliest ones of its place, in OpenAI's form."""

    def told(token_id: int, logprob: float) -> JsonObject:
        text, raw = token_text(token_id)
        return {"token": text, "logprob": finite(logprob), "bytes": list(raw)}

    return {
        **told(entry.token_id, entry.logprob),
        "top_logprobs": [told(*top) for top in entry.top],
    }


def raw_list(entries: Sequence[T], told: Callable[[T], object]) -> Raw:
    """As JSON, encoded by pieces: a step of the encoder in C lets nobody else run."""
    pieces = (
        _json([told(entry) for entry in entries[at : at + PIECE]])[1:-1]
        for at in range(0, len(entries), PIECE)
    )
    return Raw(b"[" + b",".join(pieces) + b"]")


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes a forbidden token so.  NaN stays, and is null in JSON."""
    return max(logprob, -9999.0)


def usage(num_prompt_tokens: int, choices: Sequence[Choice]) -> JsonObject:
    """Prompt tokens include the rows of images; completion tokens are of all choices.  Cached are
    tokens of the prompt that were computed for no choice.

    Where tokens were drafted (speculative decoding), how many drafts were right and wrong, under
    OpenAI's names; wrong ones are in no other count.
    """
    num_tokens = sum(choice.num_tokens for choice in choices)
    counts: JsonObject = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
        "prompt_tokens_details": {"cached_tokens": _num_cached(choices)},
    }
    accepted = sum(choice.num_accepted for choice in choices)
    rejected = sum(choice.num_rejected for choice in choices)
    if accepted or rejected:
        counts["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
        }
    return counts


def _num_cached(choices: Sequence[Choice]) -> int:
    """Of each prompt what none of its choices computed."""
    least: dict[int, int] = {}
    for choice in choices:
        known = least.get(choice.prompt_index, choice.num_cached)
        least[choice.prompt_index] = min(known, choice.num_cached)
    return sum(least.values())


def _timeline(choices: Sequence[Choice], began_s: float) -> list[JsonObject]:
    """For X-EPD-Timeline; with several choices each entry has its choice's index."""
    entries = []
    for choice in choices:
        for one in choice.stream.timeline():
            entry: JsonObject = {
                "machine": f"{one.machine}@{one.instance}",
                "key": one.key,
                "state": one.state,
                "t_ms": round((one.at_s - began_s) * 1e3, 3),
            }
            if one.lasted_s:
                entry |= {"ms": round(one.lasted_s * 1e3, 3), "num_tokens": one.num_tokens}
            entries.append(entry if len(choices) == 1 else {"choice": choice.index, **entry})
    return entries
