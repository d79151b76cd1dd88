"""The parameters of a request that go into what is asked as they are: each is one field here.

The type of a field has its bounds, by which it is read, documented and refused
(`epd.api.http.shapes`); its default is what a request without it asks for.  A new parameter of all
APIs is a field of `Parameters`, one of OpenAI's completions a field of `Spoken`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from epd.api.http.shapes import JsonValue, Shape, most

MAX_STOPS = 16
MAX_CHARS = 1024  # of a stop string and its like
MAX_TOP_LOGPROBS = 20
MAX_NGRAM, MAX_WINDOW = 128, 1024  # tokens that each step of an answer compares

Penalty = Annotated[float, Meta(ge=-2, le=2)]
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_CHARS)]
Stops = Stop | Annotated[tuple[Stop, ...], Meta(max_length=MAX_STOPS)]
Word = Annotated[str, Meta(pattern=r"\S", max_length=MAX_CHARS)]
Tokens = Annotated[int, Meta(ge=1)]
TokenId = Annotated[int, most("token_id")]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
# Accepted, and without effect on the answer: what names, tags or caches.
Metadata = dict[str, JsonValue]
ServiceTier = Annotated[
    Literal["auto", "default", "flex", "priority", "scale"], Meta(extra={"code": "out_of_range"})
]


class NoRepeatNgram(Shape):
    """DeepSeek-OCR's rule, under the names that it has in vLLM's `vllm_xargs`."""

    ngram_size: Annotated[int, Meta(ge=2, le=MAX_NGRAM)]
    window_size: Annotated[int, Meta(ge=2, le=MAX_WINDOW)] = 100
    whitelist_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=1024)] = ()


class Parameters(Shape):
    """Of every API."""

    bad_words: Annotated[tuple[Word, ...], Meta(max_length=128)] = ()
    cache_salt: Stop = ""  # what is computed of its prompt is shared with equal ones only
    frequency_penalty: Penalty = 0.0
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logit_bias: Annotated[
        dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]],
        Meta(extra_json_schema={"propertyNames": {"pattern": "^[0-9]{1,11}$"}}),
    ] = field(default_factory=dict)
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    no_repeat_ngram: NoRepeatNgram | None = None
    presence_penalty: Penalty = 0.0
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] = 1.0
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    skip_special_tokens: bool = True
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_STOPS)] = ()
    stream: bool = False
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    truncate_prompt_tokens: Tokens | None = None  # the last so many are kept


class Spoken(Parameters):
    """Of OpenAI's completions, to which the requests of all APIs become."""

    allowed_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=1024)] = ()
    max_tokens: Tokens | None = None  # None: the model's default, or what the context allows
    n: Annotated[int, most("choices", 1)] = 1
    return_token_ids: bool = False  # of the prompt, and of what was generated
    return_tokens_as_token_ids: bool = False  # log-probabilities name tokens by their ids
    stop: Stops = ()
    user: str = ""
