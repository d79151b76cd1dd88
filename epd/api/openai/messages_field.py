"""The `messages` of a chat request: roles and content parts; each fault is told with its path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from epd.api.asked.chat_message import ChatMessage, MessagePart
from epd.api.http import fields
from epd.api.http.errors import bad_request
from epd.api.openai.video_field import read_video_part
from epd.frontend import JsonObject
from epd.media_files.video import DEFAULT_SAMPLING, Sampling
from epd.messages import PixelBounds

# Templates know `system`; `developer` is OpenAI's newer word for it.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
REASONING = ("reasoning_content", "reasoning")  # of an answer of ours, sent back as it came
# Without effect: names and hints of clients, in messages and parts.
INERT: dict[str, Callable[[object, str], object]] = {
    "cache_control": fields.mapping,
    "id": fields.string,
    "type": fields.string,
    "uuid": fields.string,
}
DETAILS = ("auto", "low", "high", "original")  # hints: every image is read in full


class Asks(NamedTuple):
    """What a request asks for all its videos, and for all its images."""

    sampling: Sampling
    bounds: PixelBounds | None


def read_messages(
    value: object, sampling: Sampling = DEFAULT_SAMPLING, bounds: PixelBounds | None = None
) -> list[ChatMessage]:
    """Plain dicts of `role` and `content`, a string or a list of text, image_url and video parts.

    `sampling`: what the request asks for all its videos (`video_field` tells a part's form);
    `bounds`: for all its images.

    An answer may carry `tool_calls`, whose arguments become objects, as templates want them; a
    message of role `tool` names the call that it answers.  A message's name, and an answer's
    reasoning, are there for templates that show them.
    """
    return [
        _message(message, f"messages[{i}]", Asks(sampling, bounds))
        for i, message in enumerate(fields.array(value, "messages"))
    ]


def _message(value: object, name: str, asks: Asks) -> ChatMessage:
    message = fields.mapping(value, name)
    role = fields.string(message.get("role"), f"{name}.role")
    if role not in ROLES:
        allowed = ", ".join(ROLES)
        path = f"{name}.role"
        raise bad_request(f"{path} must be one of {allowed}, not '{role[:40]}'", path)
    # An answer of ours, sent back as it came, carries these empty.
    present = {k: v for k, v in message.items() if v is not None and v != []}
    more = {"assistant": ("tool_calls", *REASONING), "tool": ("tool_call_id",)}.get(role, ())
    fields.only(present, name, ("role", "content", "name", *INERT, *more))
    _check_inert(present, name)
    read: ChatMessage = {"role": ROLES[role], "content": ""}
    if "tool_calls" in present:
        path = f"{name}.tool_calls"
        calls = fields.array(present["tool_calls"], path)
        read["tool_calls"] = [_call(call, f"{path}[{i}]") for i, call in enumerate(calls)]
    if "tool_call_id" in present:
        read["tool_call_id"] = fields.string(present["tool_call_id"], f"{name}.tool_call_id")
    if "name" in present:
        read["name"] = fields.string(present["name"], f"{name}.name")
    for key in REASONING:
        if key in present:  # templates know the older name
            read["reasoning_content"] = fields.string(present[key], f"{name}.{key}")
    is_call = "tool_calls" in read and message.get("content") is None
    if not is_call:
        read["content"] = _content(message.get("content"), f"{name}.content", role, asks)
    return read


def _check_inert(present: Mapping[str, object], name: str) -> None:
    for key, read in INERT.items():
        if present.get(key) is not None:
            read(present[key], f"{name}.{key}")


def _content(content: object, path: str, role: str, asks: Asks) -> str | list[MessagePart]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise fields.expected(path, "a string or an array of parts", content)
    return [
        _part(part, f"{path}[{i}]", role, asks)
        for i, part in enumerate(fields.array(content, path))
    ]


def _call(value: object, name: str) -> JsonObject:
    call = fields.mapping(value, name)
    fields.only(call, name, ("function", "index", *INERT))
    path = f"{name}.function"
    function = fields.mapping(call.get("function"), path)
    fields.only(function, path, ("name", "arguments"))
    text = fields.string(function.get("arguments"), f"{path}.arguments")
    arguments = fields.json_text(text or "{}", f"{path}.arguments")
    read = {"name": fields.string(function.get("name"), f"{path}.name"), "arguments": arguments}
    return {"id": call.get("id"), "type": "function", "function": read}


def _part(value: object, name: str, role: str, asks: Asks) -> MessagePart:
    part = fields.mapping(value, name)
    kind = fields.string(part.get("type"), f"{name}.type")
    _check_inert(part, name)
    if kind == "text":
        fields.only(part, name, ("text", *INERT))
        return {"type": "text", "text": fields.string(part.get("text"), f"{name}.text")}
    if kind not in ("image_url", "video_url", "video"):
        path = f"{name}.type"
        message = f"{path} '{kind[:40]}' is not supported: parts are text, image_url or video_url"
        raise bad_request(message, path, "unsupported_parameter")
    if role == "assistant":
        what = "images" if kind == "image_url" else "videos"
        raise bad_request(f"{name}: {what} are not taken in messages of role {role}", name)
    if kind != "image_url":
        return read_video_part(part, name, asks.sampling, (*INERT,))
    fields.only(part, name, ("image_url", *INERT))
    read: MessagePart = {
        "type": "image_url",
        "image_url": {"url": _url(part, f"{name}.image_url")},
    }
    if asks.bounds is not None:
        read["bounds"] = asks.bounds
    return read


def _url(part: JsonObject, name: str) -> str:
    image = part.get("image_url")
    if isinstance(image, str):
        return image
    if not isinstance(image, dict):
        raise fields.expected(name, 'an object {"url": ...} or a URL', image)
    fields.only(image, name, ("url", "detail"))
    detail = image.get("detail")
    if detail is not None:
        fields.one_of(detail, f"{name}.detail", DETAILS)
    return fields.string(image.get("url"), f"{name}.url")
