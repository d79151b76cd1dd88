"""What a client of Anthropic's Messages API may ask, and what it means as a chat request.

Names that Anthropic does not have (`seed`, `min_p`, ...) are taken as in chat completions.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from epd.api.asked.asked import Asked, ModelFacts, facts_of
from epd.api.asked.offered_tools import NAME
from epd.api.asked.parameters import Parameters, Stop, Tokens
from epd.api.asked.template_flags import CONTINUED
from epd.api.http.data_url import DataUrl
from epd.api.http.errors import bad_request
from epd.api.http.shapes import JsonValue, NotRead, Shape, bounded, read_shape
from epd.api.openai.translation import Parts, TranslatedChat, as_json, image_part, text_part
from epd.config import Limits
from epd.frontend import JsonObject

# Chat's, under their own names.
PASSED = {*Parameters.__struct_fields__, "include_reasoning", "model"}
NOTHING: tuple[object, ...] = (False, [], {}, "", 0)
REFUSED = {
    "container": NotRead("this server runs no code", NOTHING),
    "mcp_servers": NotRead("this server calls no other", NOTHING),
}
NOT_EMPTY = Meta(min_length=1)
Hint = dict[str, JsonValue]  # cache_control: prompts are found in the cache by their content


class Cached(Shape):
    cache_control: Hint | None = None


class Text(Cached, kw_only=True, tag="text", tag_field="type"):
    text: str
    citations: JsonValue = None


class Base64(Shape, tag="base64", tag_field="type"):
    data: str
    media_type: str


class Url(Shape, tag="url", tag_field="type"):
    url: str


class Image(Cached, kw_only=True, tag="image", tag_field="type"):
    source: Base64 | Url


class ToolUse(Cached, kw_only=True, tag="tool_use", tag_field="type"):
    id: str
    name: str
    input: dict[str, JsonValue]
    caller: JsonValue = None


class ToolResult(Cached, kw_only=True, tag="tool_result", tag_field="type"):
    tool_use_id: str
    content: str | list[Text | Image] | None = None
    is_error: bool | None = None


class Thinking(Shape, tag="thinking", tag_field="type"):
    thinking: str
    signature: str | None = None


class UserMessage(Shape, tag="user", tag_field="role"):
    content: str | Annotated[list[Text | Image | ToolResult], NOT_EMPTY]


class AssistantMessage(Shape, tag="assistant", tag_field="role"):
    content: str | Annotated[list[Text | ToolUse | Thinking], NOT_EMPTY]


class SystemMessage(Shape, tag="system", tag_field="role"):
    content: str | Annotated[list[Text], NOT_EMPTY]


class Tool(Cached, kw_only=True):
    name: Annotated[str, Meta(pattern=NAME)]
    input_schema: dict[str, JsonValue]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[dict[str, JsonValue]] | None = None  # hints, which templates do not show
    defer_loading: bool | None = None


class ToolChoice(Shape):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Metadata(Shape):
    user_id: str | None = None


class ThinkingConfig(Shape):
    """`disabled` goes to chat templates that have such a switch; else the model decides."""

    type: Literal["adaptive", "disabled", "enabled"]
    budget_tokens: int | None = None
    display: str | None = None


class Format(Shape):
    type: Literal["json_schema"]
    schema: dict[str, JsonValue]


class OutputConfig(Shape):
    format: Format | None = None
    effort: str | None = None  # a hint to other models


class KeepThinking(Shape):
    """The one edit that changes nothing: thinking is left to the chat template."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Shape):
    edits: list[KeepThinking] | None = None


Messages = Annotated[list[UserMessage | AssistantMessage | SystemMessage], NOT_EMPTY]
System = str | list[Text]


class Prompt(Cached, kw_only=True):
    """What makes the prompt: all that `count_tokens` takes."""

    refused = REFUSED

    messages: Messages
    model: str | None = None
    system: System | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: Format | None = None  # its older name
    context_management: ContextManagement | None = None


class Request(Parameters, kw_only=True):
    """A prompt, and how it is answered."""

    refused = REFUSED

    messages: Messages
    max_tokens: Tokens
    model: str | None = None
    system: System | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: Format | None = None
    context_management: ContextManagement | None = None
    cache_control: Hint | None = None
    include_reasoning: bool = True
    stop_sequences: list[Stop] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


def read_message(body: JsonObject, model: ModelFacts, limits: Limits) -> Asked:
    """POST /v1/messages.  Raises ApiError."""
    request = read_shape(body, bounded(Request, facts_of(model, limits)))
    chat = {name: body[name] for name in body if name in PASSED}
    chat["max_tokens"] = request.max_tokens
    if request.stop_sequences:
        chat["stop"] = request.stop_sequences
    if request.metadata is not None and request.metadata.user_id is not None:
        chat["user"] = request.metadata.user_id
    asked = _read(request, chat, model, limits)
    # Clients ask for as many as any model takes: the context is another end of an answer.
    asked.default_max_tokens, asked.max_tokens = asked.max_tokens, None
    asked.max_context = model.max_context
    return asked


def read_counted(body: JsonObject, model: ModelFacts, limits: Limits) -> Asked:
    """POST /v1/messages/count_tokens.  Raises ApiError."""
    request = read_shape(body, Prompt)
    return _read(request, {"model": request.model}, model, limits)


def _read(request: Prompt | Request, chat: JsonObject, model: ModelFacts, limits: Limits) -> Asked:
    talk = TranslatedChat()
    talk.names.paths |= {"stop": "stop_sequences", "user": "metadata.user_id"}
    if request.system is not None:
        talk.say("system", _content(request.system, "system"), "system")
    for i, message in enumerate(request.messages):
        path = f"messages[{i}]"
        if isinstance(message, UserMessage):
            _user(talk, message, path)
        elif isinstance(message, AssistantMessage):
            _assistant(talk, message, path)
        else:
            talk.say("system", _content(message.content, f"{path}.content"), path)
    if isinstance(request.messages[-1], AssistantMessage):  # it goes on
        chat[CONTINUED] = True
        talk.names.paths[CONTINUED] = path
    if request.tools:
        talk.names.paths |= _tool_names(len(request.tools))
        chat["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)]
    if request.tool_choice is not None:
        chat |= _tool_choice(request.tool_choice)
    if request.thinking is not None and request.thinking.type == "disabled":
        chat["reasoning_effort"] = "none"
    if (named := _format(request)) is not None:
        name, form = named
        schema = {"name": "answer", "schema": form.schema}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
        talk.names.paths |= dict.fromkeys(("response_format", "response_format.json_schema"), name)
    return talk.read(chat, model, limits)


def _format(request: Prompt | Request) -> tuple[str, Format] | None:
    """What the answer must be, and under which name it was sent."""
    config = request.output_config
    if config is not None and config.format is not None:
        if request.output_format is not None:
            message = "output_format and output_config.format are one thing; send the latter"
            raise bad_request(message, "output_format")
        return "output_config.format", config.format
    return ("output_format", request.output_format) if request.output_format is not None else None


def _content(content: str | list[Text], path: str) -> Parts | str:
    if isinstance(content, str):
        return content
    return [(text_part(block.text), f"{path}[{i}]") for i, block in enumerate(content)]


def _image(image: Image, path: str) -> tuple[JsonObject, str]:
    source = image.source
    if isinstance(source, Url):
        return image_part(source.url), f"{path}.source"
    head = f"data:{source.media_type};base64,"
    data = source.data
    url = data.under(head) if isinstance(data, DataUrl) else head + data
    return image_part(url), f"{path}.source"


def _user(talk: TranslatedChat, message: UserMessage, path: str) -> None:
    """Results of tools become messages of their own; they come first."""
    if isinstance(message.content, str):
        talk.say("user", message.content, path)
        return
    said: Parts = []
    for i, block in enumerate(message.content):
        place = f"{path}.content[{i}]"
        if isinstance(block, Text):
            said.append((text_part(block.text), place))
        elif isinstance(block, Image):
            said.append(_image(block, place))
        elif said:
            raise bad_request(f"{place}: tool_result blocks come before all others", place)
        else:
            talk.result(block.tool_use_id, _result(block, place), place)
    if said:
        talk.say("user", said, path)


def _result(block: ToolResult, path: str) -> Parts | str:
    if block.content is None or isinstance(block.content, str):
        return block.content or ""
    return [
        _image(part, f"{path}.content[{i}]")
        if isinstance(part, Image)
        else (text_part(part.text), f"{path}.content[{i}]")
        for i, part in enumerate(block.content)
    ]


def _assistant(talk: TranslatedChat, message: AssistantMessage, path: str) -> None:
    if isinstance(message.content, str):
        talk.say("assistant", message.content, path)
        return
    texts: Parts = []
    calls = []
    for i, block in enumerate(message.content):
        place = f"{path}.content[{i}]"
        if isinstance(block, Thinking):
            talk.think(block.thinking)
        elif isinstance(block, Text):
            texts.append((text_part(block.text), place))
        else:
            calls.append((block, place))
    talk.say("assistant", texts or "", path)
    for block, place in calls:
        talk.call(block.id, block.name, as_json(block.input), place)


def _tool(tool: Tool, path: str) -> JsonObject:
    if tool.defer_loading:
        path += ".defer_loading"
        message = f"{path} is not supported: this server searches no tools; send false"
        raise bad_request(message, path, "unsupported_parameter")
    function = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _tool_names(count: int) -> dict[str, str]:
    names = {"tool_choice.function": "tool_choice", "parallel_tool_calls": "tool_choice"}
    for i in range(count):
        names[f"tools[{i}].function"] = f"tools[{i}]"
        names[f"tools[{i}].function.parameters"] = f"tools[{i}].input_schema"
    return names


def _tool_choice(choice: ToolChoice) -> JsonObject:
    chat: JsonObject = {}
    if choice.type == "tool":
        if choice.name is None:
            raise bad_request("tool_choice.name is missing", "tool_choice.name")
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        chat["tool_choice"] = "required" if choice.type == "any" else choice.type
    if choice.disable_parallel_tool_use is not None:
        chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return chat
