"""A message of a conversation as it was read: plain dicts, since templates of models take those."""

from __future__ import annotations

from typing import Required, TypedDict

from epd.frontend import JsonObject
from epd.media_files.video import Sampling
from epd.messages import PixelBounds


class MessagePart(TypedDict, total=False):
    """A text, an image, or (`field` to `sampling`) a video."""

    type: Required[str]
    text: str
    image_url: dict[str, str]
    bounds: PixelBounds
    field: str
    urls: list[str]
    is_file: bool
    sampling: Sampling


class ChatMessage(TypedDict, total=False):
    role: Required[str]
    content: Required[str | list[MessagePart]]
    name: str
    reasoning_content: str
    tool_calls: list[JsonObject]
    tool_call_id: str
