"""What a client may ask, and what it is told otherwise.

Nothing is ignored: a parameter is read, or it is harmless at the value that was sent, or it is
refused by name.  A server that drops what it does not know gives answers that nobody asked for.
`null` is the same as absence.  All that can be refused before any work is refused here (fault F33);
the context length is checked once the prompt's tokens are known (`max_new_tokens`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from epd.api import fields
from epd.api.errors import ApiError, bad_request
from epd.api.messages_field import read_messages
from epd.api.structured import GUIDED, Constraint, read_constraint
from epd.api.tools import ToolUse, read_tools
from epd.api.video_field import read_request_sampling
from epd.config import Limits
from epd.messages import SamplingParams

MAX_TOP_LOGPROBS = 20
SEED_MASK = 2**63 - 1
WHOLE_TOKENS_PER_WORD = 16  # of an answer that is not streamed: nobody reads it as it grows

# Accepted at these values only, which change nothing.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "use_beam_search": (False,),
}
# Known elsewhere, and why not here.
REFUSED = {
    "audio": "this server makes text only",
    "best_of": "use n and choose yourself",
    "echo": "put the prompt in front of the answer yourself",
    "function_call": "this server calls no functions",
    "functions": "this server calls no functions",
    "include_stop_str_in_output": "add the stop string yourself",
    "length_penalty": "there is no beam search",
    "modalities": "this server makes text only",
    "prediction": "predicted output is not used",
    "reasoning_effort": "the model has no such setting",
    "service_tier": "there is one tier",
    "spaces_between_special_tokens": "tokens are joined as the tokenizer joins them",
    "store": "nothing is stored",
    "suffix": "there is no insertion mode",
    "use_beam_search": "there is no beam search",
    "verbosity": "the model has no such setting",
    "web_search_options": "this server does not search",
}


class ModelFacts(Protocol):
    """What validation must know of the model."""

    model_name: str
    max_context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    defaults: Mapping[str, Any]  # of fields of `Asked`, as the model's publisher wants them


@dataclass(slots=True, kw_only=True)
class Asked:
    """One validated request of either kind; fields as in OpenAI's API where names agree."""

    messages: list[dict[str, Any]] | None = None  # chat
    prompt: str | list[int] = ""  # completion
    max_tokens: int | None = None  # None: the model's default, or what the context allows
    default_max_tokens: int | None = None  # unlike max_tokens, it gives way to the context
    min_tokens: int = 0
    priority: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    n: int = 1
    seed: int | None = None
    num_logprobs: int = -1  # as SamplingParams
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    ignore_eos: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    user: str = ""
    constraint: Constraint | None = None
    tool_use: ToolUse | None = None  # chat

    def sampling(
        self, index: int, seed: int, max_tokens: int, model: ModelFacts, grammar: str = ""
    ) -> SamplingParams:
        """Of choice `index`: choices differ in their seed only."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=(seed + index) & SEED_MASK,
            stop_token_ids=self.all_stop_token_ids(model),
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            num_logprobs=self.num_logprobs,
            min_tokens=self.min_tokens,
            grammar=grammar,
            priority=self.priority,
            tokens_per_word=1 if self.stream or self.stop else WHOLE_TOKENS_PER_WORD,
        )

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        return self.tool_use.tools if self.tool_use is not None else ()

    @property
    def skips_special_tokens(self) -> bool:
        """The marks around calls are special tokens in some vocabularies."""
        return self.skip_special_tokens and self.tool_use is None

    @property
    def grammar_source(self) -> Constraint | ToolUse | None:
        """What the answer is held to; calls that are free are not."""
        if self.tool_use is not None and self.tool_use.forced:
            return self.tool_use
        return self.constraint

    def all_stop_token_ids(self, model: ModelFacts) -> tuple[int, ...]:
        """The client's and, unless it ignores them, the model's."""
        return self.stop_token_ids if self.ignore_eos else model.eos_token_ids + self.stop_token_ids

    def max_new_tokens(self, num_prompt_tokens: int, model: ModelFacts) -> int:
        """How many tokens this prompt leaves room for.  Raises ApiError 400."""
        room = model.max_context - num_prompt_tokens
        wanted = 1 if self.max_tokens is None else self.max_tokens
        if wanted > room:
            param = "prompt" if self.messages is None else "messages"
            asks = "at least 1" if self.max_tokens is None else f"max_tokens {wanted}"
            message = (
                f"the context holds {model.max_context} tokens, and this request needs "
                f"{num_prompt_tokens + wanted}: {num_prompt_tokens} of the prompt (images "
                f"included) and {asks} to generate. Shorten the prompt or ask for fewer tokens"
            )
            raise bad_request(message, param, "context_length_exceeded")
        if self.max_tokens is not None:
            return wanted
        return min(room, self.default_max_tokens or room)


def read_chat(body: dict[str, Any], model: ModelFacts, limits: Limits) -> Asked:
    """POST /v1/chat/completions.  Raises ApiError 400, or 404 for another model's name."""
    asked = _read(body, CHAT, model, limits)
    asked.messages = read_messages(body.get("messages"), read_request_sampling(body))
    asked.num_logprobs = _chat_logprobs(body)
    asked.tool_use = read_tools({k: v for k, v in body.items() if v is not None})
    if asked.tool_use is not None and asked.constraint is not None:
        message = f"tools and {asked.constraint.param} both shape the answer; send one of them"
        raise bad_request(message, "tools")
    return asked


def read_completion(body: dict[str, Any], model: ModelFacts, limits: Limits) -> Asked:
    """POST /v1/completions.  Raises ApiError 400, or 404 for another model's name."""
    asked = _read(body, COMPLETION, model, limits)
    asked.prompt = _prompt(body.get("prompt"), model.vocab_size)
    logprobs = body.get("logprobs")
    if logprobs is not None:
        asked.num_logprobs = fields.integer(logprobs, "logprobs", 0, MAX_TOP_LOGPROBS)
    return asked


# --- parameters -----------------------------------------------------------------------------------

Reader = Callable[[Any, str], Any]


def _int(low: int, high: int | None = None) -> Reader:
    return lambda value, name: fields.integer(value, name, low, high)


def _number(low: float, high: float, *, low_excluded: bool = False) -> Reader:
    return lambda value, name: fields.number(value, name, low, high, low_excluded=low_excluded)


# Read one by one into the field of `Asked` that has their name.
SIMPLE: dict[str, Reader] = {
    "frequency_penalty": _number(-2, 2),
    "ignore_eos": fields.boolean,
    "max_tokens": _int(1),
    "min_p": _number(0, 1),
    "min_tokens": _int(0, 2**31 - 1),
    "presence_penalty": _number(-2, 2),
    "priority": _int(-100, 100),
    "repetition_penalty": _number(0, 10, low_excluded=True),
    "seed": _int(-(2**63), 2**63 - 1),
    "skip_special_tokens": fields.boolean,
    "stop": fields.stops,
    "stream": fields.boolean,
    "temperature": _number(0, 2),
    "top_k": _int(-1, 2**31 - 1),
    "top_p": _number(0, 1, low_excluded=True),
    "user": fields.string,
}
SHARED = {*SIMPLE, "logit_bias", "logprobs", "metadata", "model", "n", "stop_token_ids"}
SHARED |= {"stream_options"}
SHARED |= {"structured_outputs", *(f"guided_{kind}" for kind in GUIDED)}
CHAT = SHARED | {"max_completion_tokens", "messages", "response_format", "top_logprobs"}
CHAT |= {"parallel_tool_calls", "tool_choice", "tools", "media_io_kwargs", "mm_processor_kwargs"}
COMPLETION = SHARED | {"prompt"}


def _read(body: dict[str, Any], known: set[str], model: ModelFacts, limits: Limits) -> Asked:
    """What both kinds of request share."""
    present = {name: value for name, value in body.items() if value is not None}
    for name, value in present.items():
        if name not in known:
            _refuse(name, value)
    _check_model(present, model)
    asked = Asked(**model.defaults)
    for name, value in present.items():
        reader = SIMPLE.get(name)
        if reader is not None:
            setattr(asked, name, reader(value, name))
    asked.n = fields.integer(present.get("n", 1), "n", 1, limits.max_choices)
    asked.top_k = 0 if asked.top_k < 0 else min(asked.top_k, model.vocab_size)
    asked.logit_bias = fields.logit_bias(present.get("logit_bias", {}), model.vocab_size)
    asked.stop_token_ids = fields.token_ids(
        present.get("stop_token_ids", []), "stop_token_ids", model.vocab_size
    )
    asked.include_usage, asked.continuous_usage = _stream_options(present, stream=asked.stream)
    _check_max_completion_tokens(asked, present)
    if asked.max_tokens is not None and asked.min_tokens > asked.max_tokens:
        message = f"min_tokens {asked.min_tokens} is above max_tokens {asked.max_tokens}"
        raise bad_request(message, "min_tokens", "out_of_range")
    fields.mapping(present.get("metadata", {}), "metadata")
    asked.constraint = _constraint(asked, present)
    return asked


def _refuse(name: str, value: Any) -> None:
    for harmless in HARMLESS.get(name, ()):
        if value == harmless and type(value) is type(harmless):
            return
    reason = REFUSED.get(name)
    if reason is None:
        shown = name[:80]
        raise bad_request(f"unknown parameter '{shown}'; remove it", shown, "unknown_parameter")
    raise bad_request(f"{name} is not supported: {reason}", name, "unsupported_parameter")


def _check_model(present: dict[str, Any], model: ModelFacts) -> None:
    name = fields.string(present.get("model", model.model_name), "model")
    if name != model.model_name:
        raise unknown_model(name, model)


def unknown_model(name: str, model: ModelFacts) -> ApiError:
    message = f"model '{name[:200]}' is not served here; the served model is '{model.model_name}'"
    return ApiError(404, message, param="model", code="model_not_found")


def _check_max_completion_tokens(asked: Asked, present: dict[str, Any]) -> None:
    """The newer name of max_tokens: either, or both with one value."""
    value = present.get("max_completion_tokens")
    if value is None:
        return
    name = "max_completion_tokens"
    fields.integer(value, name, 1)
    if asked.max_tokens not in (None, value):
        message = f"{name} {value} and max_tokens {asked.max_tokens} differ; send one of them"
        raise bad_request(message, name)
    asked.max_tokens = value


def _stream_options(present: dict[str, Any], *, stream: bool) -> tuple[bool, bool]:
    """Whether usage is told in a last chunk, and whether in every chunk too."""
    name = "stream_options"
    options = fields.mapping(present.get(name, {}), name)
    if name in present and not stream:
        raise bad_request(f"{name} is only for stream: true", name)
    fields.only(options, name, ("include_usage", "continuous_usage_stats"))
    include, continuous = (
        options.get(key) is not None and fields.boolean(options[key], f"{name}.{key}")
        for key in ("include_usage", "continuous_usage_stats")
    )
    if continuous and not include:
        path = f"{name}.continuous_usage_stats"
        raise bad_request(f"{path} needs include_usage: true", path)
    return include, continuous


def _constraint(asked: Asked, present: dict[str, Any]) -> Constraint | None:
    """What the answer must be; it ends where it is complete."""
    constraint = read_constraint(present)
    if constraint is not None:
        for name, is_set in (("ignore_eos", asked.ignore_eos), ("min_tokens", asked.min_tokens)):
            if is_set:
                message = f"{name} cannot be kept: {constraint.param} says where the answer ends"
                raise bad_request(message, name)
    return constraint


def _chat_logprobs(body: dict[str, Any]) -> int:
    logprobs, top = body.get("logprobs"), body.get("top_logprobs")
    wanted = logprobs is not None and fields.boolean(logprobs, "logprobs")
    num_top = 0 if top is None else fields.integer(top, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top is not None and not wanted:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    return num_top if wanted else -1


def _prompt(value: Any, vocab_size: int) -> str | list[int]:
    """A string, one string in an array, or token ids."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        value = value[0]
    if isinstance(value, str):
        if not value:
            raise bad_request("prompt is empty; send at least one token", "prompt")
        return value
    if not isinstance(value, list):
        raise fields.expected("prompt", "a string or an array of token ids", value)
    if len(value) > 1 and isinstance(value[0], str):
        message = f"prompt holds {len(value)} prompts; send one per request"
        raise bad_request(message, "prompt", "unsupported_parameter")
    return [
        fields.integer(token_id, f"prompt[{i}]", 0, vocab_size - 1)
        for i, token_id in enumerate(fields.array(value, "prompt"))
    ]
