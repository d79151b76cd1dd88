"""The names of a request's parameters: which are read, which change nothing, which are refused.

Nothing is ignored: a parameter is read, or it cannot change the answer, or it is harmless at the
value that was sent, or it is refused by name.  A server that drops what it does not know gives
answers that nobody asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from epd.api.asked.structured import SPELLINGS
from epd.api.http.errors import bad_request
from epd.api.http.fields import MAX_BAD_WORDS, MAX_STOP_CHARS, MAX_STOPS
from epd.api.http.shapes import JsonValue, read_shape
from epd.frontend import JsonObject

Penalty = Annotated[float, Meta(ge=-2, le=2)]
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[tuple[Stop, ...], Meta(max_length=MAX_STOPS)]
Word = Annotated[str, Meta(pattern=r"\S", max_length=MAX_STOP_CHARS)]
Tokens = Annotated[int, Meta(ge=1)]

# Read one by one into the field of `Asked` that has their name.
SIMPLE: JsonObject = {
    "cache_salt": Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)],
    "bad_words": Annotated[tuple[Word, ...], Meta(max_length=MAX_BAD_WORDS)],
    "frequency_penalty": Penalty,
    "ignore_eos": bool,
    "include_stop_str_in_output": bool,
    "max_tokens": Tokens,
    "min_p": Annotated[float, Meta(ge=0, le=1)],
    "min_tokens": Annotated[int, Meta(ge=0, le=2**31 - 1)],
    "presence_penalty": Penalty,
    "priority": Annotated[int, Meta(ge=-100, le=100)],
    "repetition_penalty": Annotated[float, Meta(gt=0, le=10)],
    "return_token_ids": bool,
    "return_tokens_as_token_ids": bool,
    "seed": Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)],
    "skip_special_tokens": bool,
    "stop": Stop | Stops,
    "stream": bool,
    "temperature": Annotated[float, Meta(ge=0, le=2)],
    "top_k": Annotated[int, Meta(ge=-1, le=2**31 - 1)],
    "top_p": Annotated[float, Meta(gt=0, le=1)],
    "truncate_prompt_tokens": Tokens,
    "user": str,
}
# Accepted, and without effect on the answer: they name, tag or cache, or are hints to other models.
INERT: JsonObject = {
    "metadata": dict[str, JsonValue],
    "prompt_cache_key": str,
    "prompt_cache_retention": str,
    "request_id": str,
    "safety_identifier": str,
    "service_tier": Literal["auto", "default", "flex", "priority", "scale"],
    "store": bool,
    "verbosity": Literal["low", "medium", "high"],
}
_READ = msgspec.defstruct("Parameters", [(n, kind, None) for n, kind in (SIMPLE | INERT).items()])
# Accepted at these values only, which change nothing.
HARMLESS: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
}
# Likewise, of one kind of request: the defaults of flags.
CHAT_HARMLESS: dict[str, tuple[object, ...]] = HARMLESS | {
    "add_special_tokens": (False,),
    "documents": ([],),
    "echo": (False,),
}
COMPLETION_HARMLESS: dict[str, tuple[object, ...]] = HARMLESS | {
    "add_special_tokens": (True,),
    "include_reasoning": (True,),
}
# Known elsewhere, and why not here.
REFUSED = {
    "add_generation_prompt": "a plain completion has no chat template",
    "add_special_tokens": "they are added to plain prompts, and chat templates write their own",
    "audio": "this server makes text only",
    "best_of": "use n and choose yourself",
    "continue_final_message": "a plain completion continues its prompt",
    "documents": "put them into messages",
    "echo": "an answer of a conversation stands alone",
    "function_call": "use tools and tool_choice",
    "functions": "use tools",
    "include_reasoning": "a plain completion has its reasoning in its text",
    "length_penalty": "there is no beam search; for several answers use n",
    "modalities": "this server makes text only",
    "prediction": "predicted output is not used",
    "reasoning_effort": "a plain completion has no chat template",
    "spaces_between_special_tokens": "tokens are joined as the tokenizer joins them",
    "suffix": "there is no insertion mode",
    "use_beam_search": "there is no beam search; for several answers use n",
    "web_search_options": "this server does not search",
}
_SHARED = {*SIMPLE, *INERT, "logit_bias", "logprobs", "model", "n", "prompt_logprobs"}
_SHARED |= {"allowed_token_ids", "logprob_token_ids", "stop_token_ids"}
_SHARED |= {"ec_transfer_params", "kv_transfer_params"}
_SHARED |= {"stream_options", "structured_outputs", *SPELLINGS}
CHAT = _SHARED | {"max_completion_tokens", "messages", "response_format", "top_logprobs"}
CHAT |= {"add_generation_prompt", "chat_template_kwargs", "continue_final_message"}
CHAT |= {"include_reasoning", "reasoning_effort"}
CHAT |= {"parallel_tool_calls", "tool_choice", "tools", "media_io_kwargs", "mm_processor_kwargs"}
COMPLETION = _SHARED | {"echo", "prompt"}
# What other APIs hand on to chat, under its own name.  Their answers have no place for ids.
PASSED = {*SIMPLE, "include_reasoning", "logit_bias", "model", "stop_token_ids"}
PASSED -= {"return_token_ids", "return_tokens_as_token_ids"}


def check_names(
    present: Mapping[str, object],
    known: Collection[str],
    harmless: Mapping[str, tuple[object, ...]],
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


def read_simple(present: Mapping[str, object]) -> JsonObject:
    """The values of `SIMPLE`; those of `INERT` are looked at and left.  Raises ApiError 400."""
    given = {name: present[name] for name in present if name in SIMPLE or name in INERT}
    found = read_shape(given, _READ)
    read = {name: getattr(found, name) for name in given if name in SIMPLE}
    if isinstance(read.get("stop"), str):
        read["stop"] = (read["stop"],)
    return read


def _is_one_of(value: object, harmless: tuple[object, ...]) -> bool:
    """1 is not true here."""
    return any(value == one and type(value) is type(one) for one in harmless)
