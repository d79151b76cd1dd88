"""From the body of a request to what is asked (`Asked`), or to the reason why not.

All that can be refused before any work is refused here (fault F33); the context length is checked
once the prompt's tokens are there (`max_new_tokens`).  `epd.api.openai.request` has what each
parameter may be; what several of them are together is checked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar, cast

from epd.api.asked.asked import Asked, ModelFacts, facts_of
from epd.api.asked.offered_tools import read_tools
from epd.api.asked.parameters import NoRepeatNgram, Spoken
from epd.api.asked.staged import Staged, read_staged
from epd.api.asked.structured import read_constraint
from epd.api.asked.template_flags import read_flags
from epd.api.http.errors import ApiError, bad_request
from epd.api.http.faults import expected
from epd.api.http.shapes import bounded, read_shape
from epd.api.openai.messages_field import CHAT_CODES, Asks, read_messages
from epd.api.openai.request import ChatRequest, CompletionRequest, Completions, StreamOptions
from epd.api.openai.video_field import read_bounds, read_request_sampling
from epd.api.prompts.continued import check_continued
from epd.config import Limits
from epd.frontend import NO_ADAPTER, JsonObject

C = TypeVar("C", bound=Completions)
_KINDS: dict[type, str] = {str: "a string", int: "an integer", list: "an array"}


def read_chat(body: JsonObject, model: ModelFacts, limits: Limits) -> Asked:
    """POST /v1/chat/completions.  Raises ApiError 400, or 404 for another model's name."""
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and "type" not in choice:
        body = {**body, "tool_choice": {"type": "function", **choice}}
    request = _request(body, ChatRequest, model, limits)
    _join_limits(request)
    asked = _asked(request, body, model, _chat_logprobs(request))
    sampling = read_request_sampling(request.media_io_kwargs, request.mm_processor_kwargs)
    asks = Asks(sampling, read_bounds(request.mm_processor_kwargs))
    asked.messages = read_messages(request.messages, asks)
    asked.include_reasoning = _include_reasoning(request, asked, model)
    said = cast("list[JsonObject]", body.get("tools") or [])
    use = read_tools(said, request.tool_choice, parallel=request.parallel_tool_calls)
    if use is not None:
        # A template without one refuses tools.
        use = replace(use, form=model.call_form or use.form, otherwise=asked.constraint)
    asked.tool_use = use
    asked.template_flags = read_flags(
        request.chat_template_kwargs,
        request.reasoning_effort,
        request.add_generation_prompt,
        is_continued=request.continue_final_message,
    )
    if asked.template_flags.is_continued:
        check_continued(asked.messages, asked.tool_use)
    if use is not None and use.forced:
        _check_unshaped(asked, "tool_choice")
    return asked


def read_encode(body: JsonObject, model: ModelFacts, limits: Limits) -> Asked:
    """POST /encode/v1/chat/completions: a chat request of which only its images are encoded."""
    asked = read_chat(body, model, limits)
    _take_stage(asked, Staged("encode"))
    return asked


def read_completion(body: JsonObject, model: ModelFacts, limits: Limits) -> Asked:
    """POST /v1/completions.  Raises ApiError 400, or 404 for another model's name."""
    most = body.get("max_tokens")
    no_tokens = body.get("echo") is True and most == 0 and most is not False
    if no_tokens:
        body = {**body, "max_tokens": 1}  # the step that reads the prompt ends with one anyway
    request = _request(body, CompletionRequest, model, limits)
    num_logprobs = -1 if request.logprobs is None else request.logprobs
    asked = _asked(request, body, model, num_logprobs, no_tokens=no_tokens)
    asked.tells_prompt = request.echo
    asked.prompts = _prompts(request.prompt)
    if asked.staged.stage and len(asked.prompts) > 1:
        raise bad_request("with do_remote_decode send one prompt at a time", "prompt")
    if asked.num_choices > limits.max_choices:
        message = (
            f"{len(asked.prompts)} prompts with n {asked.n} are {asked.num_choices} choices; at "
            f"most {limits.max_choices} are taken: send fewer, or raise limits.max_choices"
        )
        raise bad_request(message, "prompt", "out_of_range")
    return asked


# --- parameters -----------------------------------------------------------------------------------


def _request(body: JsonObject, shape: type[C], model: ModelFacts, limits: Limits) -> C:
    request = read_shape(body, bounded(shape, facts_of(model, limits)), CHAT_CODES)
    check_model(request.model, model)
    return request


def _asked(
    request: Completions,
    body: JsonObject,
    model: ModelFacts,
    num_logprobs: int,
    *,
    no_tokens: bool = False,
) -> Asked:
    """What both kinds of request share; what `body` has not is as the model's publisher has it."""
    asked = Asked(**{name: getattr(request, name) for name in Spoken.__struct_fields__})
    for name, value in model.defaults.items():
        if body.get(name) is None:
            setattr(asked, name, value)
    asked.top_k = 0 if asked.top_k < 0 else min(asked.top_k, model.vocab_size)
    asked.num_logprobs, asked.no_tokens = num_logprobs, no_tokens
    asked.adapter = model.adapters.get(request.model or "", NO_ADAPTER)
    asked.logprob_token_ids = _logprob_token_ids(request.logprob_token_ids, asked)
    _take_no_repeat(asked, request.vllm_xargs)
    if request.prompt_logprobs is not None:
        asked.num_prompt_logprobs = request.prompt_logprobs
        if asked.stream:
            name = "prompt_logprobs"
            raise bad_request(f"{name} is only for an answer that is not streamed", name)
    if request.stream_options is not None:
        _take_options(asked, request.stream_options)
    if asked.max_tokens is not None and asked.min_tokens > asked.max_tokens:
        message = f"min_tokens {asked.min_tokens} is above max_tokens {asked.max_tokens}"
        raise bad_request(message, "min_tokens", "out_of_range")
    form = request.response_format if isinstance(request, ChatRequest) else None
    asked.constraint = read_constraint(form, request.structured_outputs, request)
    if asked.constraint is not None:  # the answer ends where it is complete
        _check_unshaped(asked, asked.constraint.param)
    _take_stage(asked, read_staged(request.kv_transfer_params, request.ec_transfer_params))
    return asked


def _take_no_repeat(asked: Asked, other: NoRepeatNgram | None) -> None:
    """Under either name."""
    name = "vllm_xargs" if other is not None else "no_repeat_ngram"
    if None not in (other, asked.no_repeat_ngram):
        raise bad_request(f"{name} is another name of no_repeat_ngram; send one of them", name)
    rule = asked.no_repeat_ngram = other or asked.no_repeat_ngram
    if rule is not None and rule.window_size < rule.ngram_size:
        message = (
            f"{name}.window_size {rule.window_size} is below ngram_size {rule.ngram_size}: no run "
            "fits into it"
        )
        raise bad_request(message, f"{name}.window_size", "out_of_range")


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


def check_model(name: str | None, model: ModelFacts) -> None:
    """Raises ApiError 404 for another model's name."""
    if name is not None and name not in model.served_names and name not in model.adapters:
        raise unknown_model(name, model)


def unknown_model(name: str, model: ModelFacts) -> ApiError:
    served = "' or '".join((*model.served_names, *model.adapters))
    message = f"model '{name[:200]}' is not served here; the served model is '{served}'"
    return ApiError(404, message, param="model", code="model_not_found")


def _join_limits(request: ChatRequest) -> None:
    """Two names of one limit: either, or both with one value."""
    newer, older = request.max_completion_tokens, request.max_tokens
    if newer is None:
        return
    if older not in (None, newer):
        name = "max_completion_tokens"
        message = f"{name} {newer} and max_tokens {older} differ; send one of them"
        raise bad_request(message, name)
    request.max_tokens = newer


def _take_options(asked: Asked, options: StreamOptions) -> None:
    """Whether usage is sent in a last chunk, and whether in every chunk too."""
    name = "stream_options"
    if not asked.stream:
        raise bad_request(f"{name} is only for stream: true", name)
    asked.include_usage = options.include_usage
    asked.continuous_usage = options.continuous_usage_stats
    if asked.continuous_usage and not asked.include_usage:
        path = f"{name}.continuous_usage_stats"
        raise bad_request(f"{path} needs include_usage: true", path)


def _check_unshaped(asked: Asked, by: str) -> None:
    """What a grammar admits may be nothing that these admit."""
    for name in ("ignore_eos", "min_tokens", "allowed_token_ids", "bad_words", "no_repeat_ngram"):
        if getattr(asked, name):
            message = f"{name} cannot be kept: {by} says what the answer is"
            raise bad_request(message, name)


def _chat_logprobs(request: ChatRequest) -> int:
    if request.top_logprobs and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else -1


def _logprob_token_ids(ids: list[int] | None, asked: Asked) -> tuple[int, ...]:
    """Each once."""
    name = "logprob_token_ids"
    if ids is None:
        return ()
    if not ids:
        raise bad_request(f"{name} must not be an empty list; leave it out", name)
    if asked.num_logprobs < 0:
        raise bad_request(f"send logprobs when using {name}", name)
    if asked.no_tokens:
        raise bad_request(f"{name} has no effect: no output tokens are generated", name)
    return tuple(dict.fromkeys(ids))


def _include_reasoning(request: ChatRequest, asked: Asked, model: ModelFacts) -> bool:
    name = "include_reasoning"
    included = request.include_reasoning
    if not included and not model.reasoning_parser:
        message = f"{name} false needs a server that finds reasoning: --reasoning-parser"
        raise bad_request(message, name, "unsupported_parameter")
    if not included and asked.num_logprobs >= 0:
        raise bad_request(f"{name} false is without logprobs, which show its tokens", name)
    return included


def _prompts(prompt: str | Sequence[str | int | list[int]]) -> tuple[str | list[int], ...]:
    """A string, token ids, or several of either: all are what the first one is."""
    name = "prompt"
    if isinstance(prompt, str):
        return (_text(prompt, name),)
    first = type(prompt[0])
    for i, one in enumerate(prompt):
        if type(one) is not first:
            raise expected(f"{name}[{i}]", _KINDS[first], one)
    if first is int:
        return (cast("list[int]", prompt),)
    several = cast("list[str | list[int]]", prompt)
    return tuple(
        _text(one, f"{name}[{i}]") if isinstance(one, str) else one for i, one in enumerate(several)
    )


def _text(text: str, name: str) -> str:
    if not text:
        raise bad_request(f"{name} is empty; send at least one token", name)
    return text
