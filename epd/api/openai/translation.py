"""Another API's request as a chat request: there is one way to an answer, under several names.

The other API's own shape is checked first.  Its content is then written as the body of a chat
completion, which is validated and served like any.  Each field that is moved is noted, so that an
error names it as its client does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from epd.api.asked.asked import Asked, ModelFacts
from epd.api.http.errors import ApiError
from epd.api.openai.validation import read_chat
from epd.config import Limits
from epd.frontend import JsonObject

Parts = list[tuple[JsonObject, str]]


@dataclass(slots=True)
class Names:
    """What the other API calls the fields of a chat request, by their paths there."""

    paths: dict[str, str] = field(default_factory=dict)

    def told(self, error: ApiError) -> ApiError:
        """The error under the client's name of the field."""
        param = error.param or ""
        known = [p for p in self.paths if param == p or param.startswith((f"{p}.", f"{p}["))]
        if not known:
            return error
        prefix = max(known, key=len)
        own = self.paths[prefix] + param.removeprefix(prefix)
        message = error.message
        if "." in param or "[" in param or message.startswith(param):  # else it is also a word
            message = message.replace(param, own)
        return ApiError(error.status, message, param=own, code=error.code)


class TranslatedChat:
    """Messages of a chat request, written one after the other."""

    def __init__(self) -> None:
        self.messages: list[JsonObject] = []
        self.names = Names()
        self._images: Parts = []  # of results of tools
        self._reasoning = ""

    def say(self, role: str, content: Parts | str, path: str) -> None:
        """A message; parts in the form of chat, each with its path in the other API."""
        if role == "user" and self._images:
            own = [(text_part(content), path)] if isinstance(content, str) else content
            content, self._images = [*self._images, *own], []
        self.flush()
        name = f"messages[{len(self.messages)}]"
        self.names.paths[name] = path
        message: JsonObject = {"role": role, "content": content}
        if not isinstance(content, str):
            message["content"] = [part for part, _ in content]
            for i, (part, own_path) in enumerate(content):
                self.names.paths[f"{name}.content[{i}]"] = own_path
                if part["type"] == "image_url":
                    place = f"{name}.content[{i}].image_url"
                    self.names.paths[place] = self.names.paths[f"{place}.url"] = own_path
        if role == "assistant" and self._reasoning:
            message["reasoning_content"], self._reasoning = self._reasoning, ""
        self.messages.append(message)

    def think(self, text: str) -> None:
        """Reasoning ahead of the answer that comes next."""
        self._reasoning += text

    def call(self, call_id: str, name: str, arguments: str, path: str) -> None:
        """A call, which belongs to the answer before it."""
        if not self.messages or self.messages[-1]["role"] != "assistant" or self._reasoning:
            self.say("assistant", "", path)
        calls = self.messages[-1].setdefault("tool_calls", [])
        assert isinstance(calls, list)  # by this very line
        place = f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"
        self.names.paths[place] = self.names.paths[f"{place}.function"] = path
        function = {"name": name, "arguments": arguments}
        calls.append({"id": call_id, "type": "function", "function": function})

    def result(self, call_id: str, content: Parts | str, path: str) -> None:
        """The result of a call.  Templates take text there; its images open the next message."""
        images, self._images = self._images, []
        if not isinstance(content, str):
            images += [part for part in content if part[0]["type"] != "text"]
            content = "\n".join(str(part["text"]) for part, _ in content if part["type"] == "text")
        self.say("tool", content, path)
        self.messages[-1]["tool_call_id"] = call_id
        self._images = images

    def flush(self) -> None:
        """Images of results that no message of the user took."""
        if self._images:
            images, self._images = self._images, []
            self.say("user", images, images[0][1])

    def read(self, body: Mapping[str, object], model: ModelFacts, limits: Limits) -> Asked:
        """`body`: the other fields of the chat request.  Raises ApiError."""
        self.flush()
        try:
            asked = read_chat({**body, "messages": self.messages}, model, limits)
        except ApiError as error:
            raise self.names.told(error) from None
        asked.told = self.names.told
        return asked


def text_part(text: str) -> JsonObject:
    return {"type": "text", "text": text}


def image_part(url: str) -> JsonObject:
    return {"type": "image_url", "image_url": {"url": url}}


def as_json(value: object) -> str:
    """Arguments of a call, as a model writes them."""
    return json.dumps(value, ensure_ascii=False)
