"""From the body of a request to what is asked (`Asked`), or to the reason why not.

`null` is the same as absence.  All that can be refused before any work is refused here (fault F33);
the context length is checked once the prompt's tokens are known (`max_new_tokens`).
`epd.api.openai.parameters` lists the names; what several parameters say together is checked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from epd.api.asked.asked import Asked, ModelFacts
from epd.api.asked.pixel_bounds import read_bounds
from epd.api.asked.staged import Staged, read_staged
from epd.api.asked.structured import Constraint, read_constraint
from epd.api.asked.template_flags import read_flags
from epd.api.asked.tools import read_tools
from epd.api.http import fields
from epd.api.http.errors import ApiError, bad_request
from epd.api.openai.messages_field import read_messages
from epd.api.openai.parameters import (
    CHAT,
    CHAT_HARMLESS,
    COMPLETION,
    COMPLETION_HARMLESS,
    check_names,
    read_simple,
)
from epd.api.openai.video_field import read_request_sampling
from epd.api.prompts.continued import check_continued
from epd.config import Limits
from epd.frontend import JsonObject

MAX_TOP_LOGPROBS = 20
MAX_ALLOWED = 1024  # token ids
MAX_NAMED = 128  # likewise, whose log-probabilities are asked for


def read_chat(body: JsonObject, model: ModelFacts, limits: Limits) -> Asked:
    """POST /v1/chat/completions.  Raises ApiError 400, or 404 for another model's name."""
    present = _present(body)
    check_names(present, CHAT, CHAT_HARMLESS)
    asked = _read(present, model, limits)
    asked.messages = read_messages(
        present.get("messages"), read_request_sampling(present), read_bounds(present, limits)
    )
    asked.num_logprobs = _chat_logprobs(present)
    asked.logprob_token_ids = _logprob_token_ids(present, asked, model)
    asked.include_reasoning = _include_reasoning(present, asked, model)
    asked.tool_use = read_tools(present)
    asked.template_flags = read_flags(present)
    if asked.template_flags.is_continued:
        check_continued(asked.messages, finds_calls=asked.tool_use is not None)
    if asked.tool_use is not None:
        asked.tool_use = replace(asked.tool_use, otherwise=asked.constraint)
        if asked.tool_use.forced:
            _check_unshaped(asked, "tool_choice")
    return asked


def read_encode(body: JsonObject, model: ModelFacts, limits: Limits) -> Asked:
    """POST /encode/v1/chat/completions: a chat request of which only its images are wanted."""
    asked = read_chat(body, model, limits)
    _take_stage(asked, Staged("encode"))
    return asked


def read_completion(body: JsonObject, model: ModelFacts, limits: Limits) -> Asked:
    """POST /v1/completions.  Raises ApiError 400, or 404 for another model's name."""
    present = _present(body)
    check_names(present, COMPLETION, COMPLETION_HARMLESS)
    echo = fields.boolean(present.get("echo", False), "echo")
    no_tokens = echo and present.get("max_tokens") == 0 and present["max_tokens"] is not False
    if no_tokens:
        present["max_tokens"] = 1  # the step that reads the prompt ends with one anyway
    asked = _read(present, model, limits)
    asked.tells_prompt, asked.no_tokens = echo, no_tokens
    asked.prompts = _prompts(present.get("prompt"), model.vocab_size)
    if asked.staged.stage and len(asked.prompts) > 1:
        raise bad_request("with do_remote_decode send one prompt at a time", "prompt")
    if asked.num_choices > limits.max_choices:
        message = (
            f"{len(asked.prompts)} prompts with n {asked.n} are {asked.num_choices} choices; at "
            f"most {limits.max_choices} are taken: send fewer, or raise limits.max_choices"
        )
        raise bad_request(message, "prompt", "out_of_range")
    logprobs = present.get("logprobs")
    if logprobs is not None:
        asked.num_logprobs = fields.integer(logprobs, "logprobs", 0, MAX_TOP_LOGPROBS)
    asked.logprob_token_ids = _logprob_token_ids(present, asked, model)
    return asked


# --- parameters -----------------------------------------------------------------------------------


def _present(body: Mapping[str, object]) -> JsonObject:
    return {name: value for name, value in body.items() if value is not None}


def _read(present: Mapping[str, object], model: ModelFacts, limits: Limits) -> Asked:
    """What both kinds of request share."""
    check_model(present, model)
    asked = Asked()
    for name, value in {**model.defaults, **read_simple(present)}.items():
        setattr(asked, name, value)
    asked.n = fields.integer(present.get("n", 1), "n", 1, limits.max_choices)
    asked.top_k = 0 if asked.top_k < 0 else min(asked.top_k, model.vocab_size)
    asked.logit_bias = fields.logit_bias(present.get("logit_bias", {}), model.vocab_size)
    asked.stop_token_ids = fields.token_ids(
        present.get("stop_token_ids", []), "stop_token_ids", model.vocab_size
    )
    asked.allowed_token_ids = fields.token_ids(
        present.get("allowed_token_ids", []), "allowed_token_ids", model.vocab_size, MAX_ALLOWED
    )
    asked.num_prompt_logprobs = _prompt_logprobs(present, stream=asked.stream)
    asked.include_usage, asked.continuous_usage = _stream_options(present, stream=asked.stream)
    _check_max_completion_tokens(asked, present)
    if asked.max_tokens is not None and asked.min_tokens > asked.max_tokens:
        message = f"min_tokens {asked.min_tokens} is above max_tokens {asked.max_tokens}"
        raise bad_request(message, "min_tokens", "out_of_range")
    asked.constraint = _constraint(asked, present)
    _take_stage(asked, read_staged(present))
    return asked


def _take_stage(asked: Asked, staged: Staged) -> None:
    """A part of a request has one choice; a prompt alone ends with the token that it gives."""
    asked.staged = staged
    if not staged.stage:
        return
    if asked.n > 1:
        raise bad_request(f"n {asked.n} is for whole requests: send n choices as n requests", "n")
    if staged.stage == "prefill" and asked.max_tokens not in (None, 1):
        message = f"max_tokens {asked.max_tokens} is decode's: with do_remote_decode send 1"
        raise bad_request(message, "max_tokens")
    asked.max_tokens = 1


def check_model(present: Mapping[str, object], model: ModelFacts) -> None:
    """Raises ApiError 404 for another model's name."""
    name = fields.string(present.get("model", model.model_name), "model")
    if name not in model.served_names:
        raise unknown_model(name, model)


def unknown_model(name: str, model: ModelFacts) -> ApiError:
    served = "' or '".join(model.served_names)
    message = f"model '{name[:200]}' is not served here; the served model is '{served}'"
    return ApiError(404, message, param="model", code="model_not_found")


def _check_max_completion_tokens(asked: Asked, present: Mapping[str, object]) -> None:
    """The newer name of max_tokens: either, or both with one value."""
    value = present.get("max_completion_tokens")
    if value is None:
        return
    name = "max_completion_tokens"
    value = fields.integer(value, name, 1)
    if asked.max_tokens not in (None, value):
        message = f"{name} {value} and max_tokens {asked.max_tokens} differ; send one of them"
        raise bad_request(message, name)
    asked.max_tokens = value


def _stream_options(present: Mapping[str, object], *, stream: bool) -> tuple[bool, bool]:
    """Whether usage is told in a last chunk, and whether in every chunk too."""
    name = "stream_options"
    options = fields.mapping(present.get(name, {}), name)
    if name in present and not stream:
        raise bad_request(f"{name} is only for stream: true", name)
    keys = ("include_usage", "continuous_usage_stats", "include_obfuscation")
    fields.only(options, name, keys)
    include, continuous, _ = (
        options.get(key) is not None and fields.boolean(options[key], f"{name}.{key}")
        for key in keys
    )
    if continuous and not include:
        path = f"{name}.continuous_usage_stats"
        raise bad_request(f"{path} needs include_usage: true", path)
    return include, continuous


def _constraint(asked: Asked, present: Mapping[str, object]) -> Constraint | None:
    """What the answer must be; it ends where it is complete."""
    constraint = read_constraint(present)
    if constraint is not None:
        _check_unshaped(asked, constraint.param)
    return constraint


def _check_unshaped(asked: Asked, by: str) -> None:
    """What a grammar admits may be nothing that these admit."""
    for name in ("ignore_eos", "min_tokens", "allowed_token_ids", "bad_words"):
        if getattr(asked, name):
            message = f"{name} cannot be kept: {by} says what the answer is"
            raise bad_request(message, name)


def _chat_logprobs(present: Mapping[str, object]) -> int:
    logprobs, top = present.get("logprobs"), present.get("top_logprobs")
    wanted = logprobs is not None and fields.boolean(logprobs, "logprobs")
    num_top = 0 if top is None else fields.integer(top, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    if num_top and not wanted:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    return num_top if wanted else -1


def _logprob_token_ids(
    present: Mapping[str, object], asked: Asked, model: ModelFacts
) -> tuple[int, ...]:
    """Each once."""
    name = "logprob_token_ids"
    if name not in present:
        return ()
    ids = fields.token_ids(present[name], name, model.vocab_size, MAX_NAMED)
    if not ids:
        raise bad_request(f"{name} must not be an empty list; leave it out", name)
    if asked.num_logprobs < 0:
        raise bad_request(f"send logprobs when using {name}", name)
    if asked.no_tokens:
        raise bad_request(f"{name} has no effect: no output tokens are generated", name)
    return tuple(dict.fromkeys(ids))


def _include_reasoning(present: Mapping[str, object], asked: Asked, model: ModelFacts) -> bool:
    name = "include_reasoning"
    included = fields.boolean(present.get(name, True), name)
    if not included and not model.reasoning_parser:
        message = f"{name} false needs a server that tells reasoning apart: --reasoning-parser"
        raise bad_request(message, name, "unsupported_parameter")
    if not included and asked.num_logprobs >= 0:
        raise bad_request(f"{name} false is without logprobs, which show its tokens", name)
    return included


def _prompt_logprobs(present: Mapping[str, object], *, stream: bool) -> int:
    name = "prompt_logprobs"
    value = present.get(name)
    if value is None:
        return -1
    count = fields.integer(value, name, 0, MAX_TOP_LOGPROBS)
    if stream:
        raise bad_request(f"{name} is only for an answer that is not streamed", name)
    return count


def _prompts(value: object, vocab_size: int) -> tuple[str | list[int], ...]:
    """A string, token ids, or several of either."""
    name = "prompt"
    if isinstance(value, str):
        return (_text(value, name),)
    if not isinstance(value, list):
        raise fields.expected(name, "a string or an array of token ids, or of prompts", value)
    prompts = fields.array(value, name)
    if isinstance(prompts[0], str):
        return tuple(_text(text, f"{name}[{i}]") for i, text in enumerate(prompts))
    if isinstance(prompts[0], list):
        return tuple(_ids(ids, f"{name}[{i}]", vocab_size) for i, ids in enumerate(prompts))
    return (_ids(prompts, name, vocab_size),)


def _text(value: object, name: str) -> str:
    if not fields.string(value, name):
        raise bad_request(f"{name} is empty; send at least one token", name)
    return str(value)


def _ids(value: object, name: str, vocab_size: int) -> list[int]:
    return [
        fields.integer(token_id, f"{name}[{i}]", 0, vocab_size - 1)
        for i, token_id in enumerate(fields.array(value, name))
    ]
