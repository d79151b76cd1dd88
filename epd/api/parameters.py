"""The names of a request's parameters: which are read, which change nothing, which are refused.

Nothing is ignored: a parameter is read, or it cannot change the answer, or it is harmless at the
value that was sent, or it is refused by name.  A server that drops what it does not know gives
answers that nobody asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from epd.api import fields
from epd.api.errors import bad_request
from epd.api.structured import GUIDED, SGLANG

Reader = Callable[[Any, str], Any]


@dataclass(frozen=True, slots=True)
class Parameter:
    """How a value is read, and what it may be: a JSON schema for `epd.api.openapi`."""

    read: Reader
    schema: dict[str, Any]

    def __call__(self, value: Any, name: str) -> Any:
        return self.read(value, name)


def _int(low: int, high: int | None = None) -> Parameter:
    bounds = {"minimum": low} if high is None else {"minimum": low, "maximum": high}
    return Parameter(
        lambda value, name: fields.integer(value, name, low, high), {"type": "integer", **bounds}
    )


def _number(low: float, high: float, *, low_excluded: bool = False) -> Parameter:
    return Parameter(
        lambda value, name: fields.number(value, name, low, high, low_excluded=low_excluded),
        {
            "type": "number",
            "exclusiveMinimum" if low_excluded else "minimum": low,
            "maximum": high,
        },
    )


def _one_of(*values: str) -> Parameter:
    return Parameter(lambda value, name: fields.one_of(value, name, values), {"enum": [*values]})


BOOLEAN = Parameter(fields.boolean, {"type": "boolean"})
STRING = Parameter(fields.string, {"type": "string"})
MAPPING = Parameter(fields.mapping, {"type": "object"})
_STOP = {"type": "string", "minLength": 1, "maxLength": fields.MAX_STOP_CHARS}
_STOPS = Parameter(
    fields.stops,
    {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": fields.MAX_STOPS}]},
)

_WORD = {"type": "string", "pattern": "\\S", "maxLength": fields.MAX_STOP_CHARS}
_WORDS = Parameter(
    fields.words, {"type": "array", "items": _WORD, "maxItems": fields.MAX_BAD_WORDS}
)

# Read one by one into the field of `Asked` that has their name.
SIMPLE: dict[str, Parameter] = {
    "bad_words": _WORDS,
    "frequency_penalty": _number(-2, 2),
    "ignore_eos": BOOLEAN,
    "include_stop_str_in_output": BOOLEAN,
    "max_tokens": _int(1),
    "min_p": _number(0, 1),
    "min_tokens": _int(0, 2**31 - 1),
    "presence_penalty": _number(-2, 2),
    "priority": _int(-100, 100),
    "repetition_penalty": _number(0, 10, low_excluded=True),
    "seed": _int(-(2**63), 2**63 - 1),
    "skip_special_tokens": BOOLEAN,
    "stop": _STOPS,
    "stream": BOOLEAN,
    "temperature": _number(0, 2),
    "top_k": _int(-1, 2**31 - 1),
    "top_p": _number(0, 1, low_excluded=True),
    "truncate_prompt_tokens": _int(1),
    "user": STRING,
}
# Accepted, and without effect on the answer: they name, tag or cache, or are hints to other models.
INERT: dict[str, Parameter] = {
    "metadata": MAPPING,
    "prompt_cache_key": STRING,
    "prompt_cache_retention": STRING,
    "request_id": STRING,
    "safety_identifier": STRING,
    "service_tier": _one_of("auto", "default", "flex", "priority", "scale"),
    "store": BOOLEAN,
    "verbosity": _one_of("low", "medium", "high"),
}
# Accepted at these values only, which change nothing.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
}
# Likewise, of one kind of request: the defaults of flags.
CHAT_HARMLESS: dict[str, tuple[Any, ...]] = HARMLESS | {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
}
COMPLETION_HARMLESS: dict[str, tuple[Any, ...]] = HARMLESS | {"add_special_tokens": (True,)}
# Known elsewhere, and why not here.
REFUSED = {
    "add_generation_prompt": "the prompt always ends where an answer begins",
    "add_special_tokens": "they are added to plain prompts, and chat templates write their own",
    "audio": "this server makes text only",
    "best_of": "use n and choose yourself",
    "continue_final_message": "the prompt always ends where an answer begins",
    "documents": "put them into messages",
    "echo": "an answer of a conversation stands alone",
    "function_call": "use tools and tool_choice",
    "functions": "use tools",
    "length_penalty": "there is no beam search",
    "modalities": "this server makes text only",
    "prediction": "predicted output is not used",
    "reasoning_effort": "a plain completion has no chat template",
    "return_token_ids": "ids are not told; tokenize the text",
    "return_tokens_as_token_ids": "ids are not told; tokenize the text",
    "spaces_between_special_tokens": "tokens are joined as the tokenizer joins them",
    "suffix": "there is no insertion mode",
    "use_beam_search": "there is no beam search",
    "web_search_options": "this server does not search",
}
_SHARED = {*SIMPLE, *INERT, "logit_bias", "logprobs", "model", "n", "prompt_logprobs"}
_SHARED |= {"allowed_token_ids", "ec_transfer_params", "kv_transfer_params", "stop_token_ids"}
_SHARED |= {"stream_options", "structured_outputs", *(f"guided_{kind}" for kind in GUIDED), *SGLANG}
CHAT = _SHARED | {"max_completion_tokens", "messages", "response_format", "top_logprobs"}
CHAT |= {"chat_template_kwargs", "reasoning_effort"}
CHAT |= {"parallel_tool_calls", "tool_choice", "tools", "media_io_kwargs", "mm_processor_kwargs"}
COMPLETION = _SHARED | {"echo", "prompt"}


def check_names(
    present: Mapping[str, Any], known: Collection[str], harmless: Mapping[str, tuple[Any, ...]]
) -> None:
    """Refuse by name what is none of `known` and not `harmless`.  Raises ApiError 400."""
    for name, value in present.items():
        if name in known or _is_one_of(value, harmless.get(name, ())):
            continue
        reason = REFUSED.get(name)
        if reason is None:
            shown = name[:80]
            raise bad_request(f"unknown parameter '{shown}'; remove it", shown, "unknown_parameter")
        raise bad_request(f"{name} is not supported: {reason}", name, "unsupported_parameter")


def read_simple(present: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `SIMPLE`; those of `INERT` are looked at and left.  Raises ApiError 400."""
    read = {}
    for name, value in present.items():
        if name in SIMPLE:
            read[name] = SIMPLE[name](value, name)
        elif name in INERT:
            INERT[name](value, name)
    return read


def _is_one_of(value: Any, harmless: tuple[Any, ...]) -> bool:
    """1 is not true here."""
    return any(value == one and type(value) is type(one) for one in harmless)
