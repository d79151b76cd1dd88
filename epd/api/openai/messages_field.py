"""The `messages` of a chat request: roles and content parts; each fault has its path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from epd.api.asked.chat_message import ChatMessage, MessagePart
from epd.api.http.errors import bad_request
from epd.api.http.faults import Codes, missing
from epd.api.http.shapes import JsonValue, Shape, json_text
from epd.api.openai.video_field import Video, VideoFile, read_video_part
from epd.frontend import JsonObject
from epd.media_files.video import Sampling
from epd.messages import PixelBounds

# What clients of chat know from OpenAI's.
CHAT_CODES = Codes(missing="invalid_type", empty=None, choice="out_of_range")
Hint = dict[str, JsonValue]


class Hinted(Shape):
    """Without effect: names and hints of clients, in messages and parts."""

    cache_control: Hint | None = None
    id: str | None = None
    uuid: str | None = None


class TextPart(Hinted, tag="text", tag_field="type", kw_only=True):
    text: str


class ImageUrl(Shape, kw_only=True):
    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None  # every image is read in full


class ImagePart(Hinted, tag="image_url", tag_field="type", kw_only=True):
    image_url: str | ImageUrl


class CalledFunction(Shape):
    name: str
    arguments: str


class Call(Shape, kw_only=True):
    function: CalledFunction
    id: JsonValue = None
    index: JsonValue = None
    type: JsonValue = None
    uuid: JsonValue = None
    cache_control: JsonValue = None


Part = TextPart | ImagePart | VideoFile | Video
Content = str | Annotated[list[Part], Meta(min_length=1)]


class Message(Hinted):
    name: str | None = None
    type: str | None = None


class SystemMessage(Message, tag="system", tag_field="role", kw_only=True):
    content: Content


class DeveloperMessage(Message, tag="developer", tag_field="role", kw_only=True):
    """OpenAI's newer word for it; templates have `system`."""

    content: Content


class UserMessage(Message, tag="user", tag_field="role", kw_only=True):
    content: Content


class AssistantMessage(Message, tag="assistant", tag_field="role"):
    """An answer of ours, as it came: templates have the older name of reasoning."""

    content: Content | None = None
    tool_calls: list[Call] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ToolMessage(Message, tag="tool", tag_field="role", kw_only=True):
    content: Content
    tool_call_id: str | None = None


AnyMessage = Annotated[
    SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage,
    Meta(extra={"code": None}),
]
Messages = Annotated[list[AnyMessage], Meta(min_length=1)]


class Asks(NamedTuple):
    """What a request asks for all its videos, and for all its images."""

    sampling: Sampling
    bounds: PixelBounds | None


def read_messages(messages: Sequence[AnyMessage], asks: Asks) -> list[ChatMessage]:
    """Plain dicts of `role` and `content`, a string or a list of text, image_url and video parts.

    An answer may carry `tool_calls`, whose arguments become objects, as templates take them; a
    message of role `tool` names the call that it answers.  A message's name, and an answer's
    reasoning, are there for templates that show them.  Raises ApiError 400.
    """
    return [_message(message, f"messages[{i}]", asks) for i, message in enumerate(messages)]


def _message(message: AnyMessage, name: str, asks: Asks) -> ChatMessage:
    role = "system" if isinstance(message, DeveloperMessage) else message.__struct_config__.tag
    content = message.content
    read: ChatMessage = {"role": str(role), "content": ""}
    if isinstance(content, str):
        read["content"] = content
    elif content is not None:
        read["content"] = [*_parts(message, content, f"{name}.content", asks)]
    if message.name is not None:
        read["name"] = message.name
    if isinstance(message, ToolMessage) and message.tool_call_id is not None:
        read["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        if message.tool_calls:
            path = f"{name}.tool_calls"
            calls = [_call(call, f"{path}[{i}]") for i, call in enumerate(message.tool_calls)]
            read["tool_calls"] = calls
        elif content is None:
            raise missing(f"{name}.content", CHAT_CODES.missing)
        for reasoning in (message.reasoning_content, message.reasoning):
            if reasoning is not None:
                read["reasoning_content"] = reasoning
    return read


def _call(call: Call, name: str) -> JsonObject:
    function = call.function
    arguments = json_text(function.arguments or "{}", f"{name}.function.arguments")
    said = {"name": function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": said}


def _parts(
    message: AnyMessage, parts: Sequence[Part], name: str, asks: Asks
) -> Iterator[MessagePart]:
    for i, part in enumerate(parts):
        if isinstance(part, TextPart):
            yield {"type": "text", "text": part.text}
            continue
        path = f"{name}[{i}]"
        is_image = isinstance(part, ImagePart)
        if isinstance(message, AssistantMessage):
            what = "images" if is_image else "videos"
            raise bad_request(f"{path}: {what} are not taken in messages of role assistant", path)
        if not isinstance(part, ImagePart):
            yield read_video_part(part, path, asks.sampling)
            continue
        url = part.image_url if isinstance(part.image_url, str) else part.image_url.url
        read: MessagePart = {"type": "image_url", "image_url": {"url": url}}
        if asks.bounds is not None:
            read["bounds"] = asks.bounds
        yield read
