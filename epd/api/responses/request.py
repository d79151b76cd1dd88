"""What a client of OpenAI's Responses API may ask, and what it means as a chat request.

Nothing is stored, so whatever would need an earlier answer is refused: clients send the items of
the conversation instead.  Names that chat completions have besides (`seed`, `min_p`, ...) are
taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

from epd.api.asked.asked import Asked, ModelFacts, facts_of
from epd.api.asked.offered_tools import NAME
from epd.api.asked.parameters import Metadata, NumLogprobs, Parameters, ServiceTier, Stops, Tokens
from epd.api.http.shapes import JsonValue, NotRead, Shape, bounded, read_shape
from epd.api.openai.translation import Parts, TranslatedChat, image_part, text_part
from epd.config import Limits
from epd.frontend import JsonObject

# Chat's, under their own names.
PASSED = {*Parameters.__struct_fields__, "include_reasoning", "model", "stop", "user"}
PASSED |= {"chat_template_kwargs", "parallel_tool_calls"}
NOT_EMPTY = Meta(min_length=1)
NOTHING: tuple[object, ...] = (False, [])
LOGPROBS = "message.output_text.logprobs"


class InputText(Shape, tag="input_text", tag_field="type"):
    text: str


class OutputText(Shape, tag="output_text", tag_field="type"):
    text: str
    annotations: list[JsonValue] | None = None
    logprobs: list[JsonValue] | None = None


class Refusal(Shape, tag="refusal", tag_field="type"):
    refusal: str


class InputImage(Shape, tag="input_image", tag_field="type"):
    image_url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


Content = InputText | InputImage | OutputText | Refusal


class Returned(Shape):
    """What items of an answer have, which come back as they were."""

    id: str | None = None
    status: str | None = None


class Message(Returned, kw_only=True, tag="message", tag_field="type"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[InputText | InputImage | OutputText | Refusal], NOT_EMPTY]
    phase: str | None = None


class FunctionCall(Returned, kw_only=True, tag="function_call", tag_field="type"):
    call_id: str
    name: str
    arguments: str


class FunctionCallOutput(Returned, kw_only=True, tag="function_call_output", tag_field="type"):
    call_id: str
    output: str | Annotated[list[InputText | InputImage], NOT_EMPTY]


class ReasoningText(Shape, tag="reasoning_text", tag_field="type"):
    text: str


class ReasoningItem(Returned, kw_only=True, tag="reasoning", tag_field="type"):
    summary: list[JsonValue] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


class TextFormat(Shape):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, JsonValue] | None = None
    strict: bool | None = None


class TextConfig(Shape):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # a hint to other models


class Reasoning(Shape):
    """Nothing is summarized: reasoning is sent as it is, where the server separates it."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class Tool(Shape):
    type: Literal["function"]
    name: Annotated[str, Meta(pattern=NAME)]
    parameters: dict[str, JsonValue] | None = None
    description: str | None = None
    strict: bool | None = None


class NamedTool(Shape, tag="function", tag_field="type"):
    name: str


class AllowedTools(Shape, tag="allowed_tools", tag_field="type"):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], NOT_EMPTY]


class StreamOptions(Shape):
    include_obfuscation: bool | None = None  # events are never padded


Item = Message | FunctionCall | FunctionCallOutput | ReasoningItem


STORED = "nothing is stored; send "


REFUSED = {
    "background": NotRead("nothing is stored; stream the answer instead", NOTHING),
    "context_management": NotRead(
        "nothing is stored, and nothing is left out of what is sent", NOTHING
    ),
    "conversation": NotRead(f"{STORED}the whole conversation as input", NOTHING),
    "max_tool_calls": NotRead("calls are made by the client", NOTHING),
    "previous_response_id": NotRead(f"{STORED}the items of the conversation as input", NOTHING),
    "prompt": NotRead(f"{STORED}the prompt as input", NOTHING),
}


class Request(Parameters, kw_only=True):
    input: Annotated[
        str | Annotated[list[Item], NOT_EMPTY], Meta(extra={"missing": "invalid_type"})
    ]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Tokens | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool = True
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = (
        None
    )
    include_reasoning: bool = True
    top_logprobs: NumLogprobs | None = None
    stream_options: StreamOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None  # nothing is left out by either
    chat_template_kwargs: dict[str, JsonValue] = field(default_factory=dict)
    stop: Stops = ()
    user: str = ""
    # Without effect: they name, tag or cache.
    metadata: Metadata | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    request_id: str | None = None
    safety_identifier: str | None = None
    service_tier: ServiceTier | None = None
    store: bool | None = None
    refused = REFUSED


def read_response(body: JsonObject, model: ModelFacts, limits: Limits) -> Asked:
    """POST /v1/responses.  Raises ApiError."""
    typed = {**body, "input": _typed(body.get("input"))}
    request = read_shape(typed, bounded(Request, facts_of(model, limits)))
    talk = TranslatedChat()
    if request.instructions is not None:
        talk.say("system", request.instructions, "instructions")
    if isinstance(request.input, str):
        talk.say("user", request.input, "input")
    else:
        for i, item in enumerate(request.input):
            _add(talk, item, f"input[{i}]")
    chat = {name: value for name, value in body.items() if name in PASSED} | _chat(request)
    talk.names.paths |= _names(request)
    asked = talk.read(chat, model, limits)
    asked.echo = _echo(request, asked)
    return asked


def _typed(items: object) -> object:
    """A message may come without its type."""
    if not isinstance(items, list):
        return items
    return [
        {"type": "message", **item} if isinstance(item, dict) and "role" in item else item
        for item in items
    ]


def _add(talk: TranslatedChat, item: Item, path: str) -> None:
    if isinstance(item, Message):
        talk.say(item.role, _content(item.content, f"{path}.content"), path)
    elif isinstance(item, FunctionCall):
        talk.call(item.call_id, item.name, item.arguments, path)
    elif isinstance(item, FunctionCallOutput):
        talk.result(item.call_id, _content(item.output, f"{path}.output"), path)
    else:
        talk.think("".join(part.text for part in item.content or ()))


def _content(content: str | Sequence[Content], path: str) -> Parts | str:
    if isinstance(content, str):
        return content
    return [(_part(part), f"{path}[{i}]") for i, part in enumerate(content)]


def _part(part: Content) -> JsonObject:
    if isinstance(part, InputImage):
        return image_part(part.image_url)
    return text_part(part.refusal if isinstance(part, Refusal) else part.text)


def _chat(request: Request) -> JsonObject:
    """The fields besides its messages."""
    chat: JsonObject = {"max_tokens": request.max_output_tokens}
    if request.reasoning is not None:
        chat["reasoning_effort"] = request.reasoning.effort
    if request.tools:
        chat["tools"] = [
            {"type": "function", "function": {k: v for k, v in _said(tool).items() if k != "type"}}
            for tool in request.tools
        ]
    if request.tools or request.tool_choice != "auto":  # agents send it with no tools, too
        chat["tool_choice"] = _tool_choice(request.tool_choice)
    if request.text is not None and request.text.format is not None:
        told = _said(request.text.format)
        kind = told.pop("type")
        chat["response_format"] = {"type": kind}
        if kind == "json_schema":
            chat["response_format"] = {"type": kind, "json_schema": told}
    if LOGPROBS in (request.include or ()) or request.top_logprobs:
        chat |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    return chat


def _tool_choice(choice: str | NamedTool | AllowedTools | None) -> object:
    if isinstance(choice, NamedTool):
        return {"type": "function", "function": {"name": choice.name}}
    if isinstance(choice, AllowedTools):
        tools = [_tool_choice(tool) for tool in choice.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    return choice


def _said(shape: Shape) -> JsonObject:
    """Its fields that were sent."""
    return {k: v for k, v in msgspec.structs.asdict(shape).items() if v is not None}


def _names(request: Request) -> dict[str, str]:
    names = {
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
        "response_format.json_schema": "text.format",
        "tool_choice.function": "tool_choice",
        "tool_choice.allowed_tools": "tool_choice",
    }
    for i in range(len(request.tools or ())):
        names[f"tools[{i}].function"] = f"tools[{i}]"
    return names


def _echo(request: Request, asked: Asked) -> JsonObject:
    """What the object of an answer repeats."""
    form = request.text.format if request.text is not None else None
    choice = request.tool_choice
    return {
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": None,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {
            "effort": request.reasoning.effort if request.reasoning is not None else None,
            "summary": None,
        },
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": asked.temperature,
        "text": {"format": _said(form) if form is not None else {"type": "text"}},
        "tool_choice": msgspec.to_builtins(choice) or "auto",
        "tools": [
            {"parameters": None, "strict": None, **_said(tool)} for tool in request.tools or ()
        ],
        "top_logprobs": max(asked.num_logprobs, 0),
        "top_p": asked.top_p,
        "truncation": request.truncation or "disabled",
        "user": asked.user or None,
    }
