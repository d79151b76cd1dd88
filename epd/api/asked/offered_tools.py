"""The tools that a request offers, and which of them its answer may or must call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, cast

from msgspec import Meta

from epd.api.asked.structured import MAX_RAW_CHARS, num_chars
from epd.api.asked.tools import Function, Tool, ToolUse
from epd.api.http.errors import bad_request
from epd.api.http.shapes import JsonValue, Shape
from epd.frontend import JsonObject

MAX_TOOLS = 128
NAME = "^[A-Za-z0-9_.-]{1,64}$"  # of a function


class ChatFunction(Shape):
    name: Annotated[str, Meta(pattern=NAME, extra={"code": None})]
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class ChatTool(Shape):
    type: Annotated[Literal["function"], Meta(extra={"code": None})]
    function: ChatFunction
    cache_control: dict[str, JsonValue] | None = None


class NamedFunction(Shape):
    name: str


class NamedTool(Shape):
    function: NamedFunction
    type: str = "function"


class FunctionChoice(Shape, tag="function", tag_field="type"):
    function: NamedFunction


class AllowedTools(Shape):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1)]


class AllowedChoice(Shape, tag="allowed_tools", tag_field="type"):
    """Of tools that are shown and may be called."""

    allowed_tools: AllowedTools


Tools = Annotated[list[ChatTool], Meta(max_length=MAX_TOOLS, extra={"code": None})]
Mode = Annotated[Literal["none", "auto", "required"], Meta(extra={"code": None})]
Choice = Mode | FunctionChoice | AllowedChoice


def read_tools(
    said: Sequence[JsonObject], choice: Choice | None, *, parallel: bool
) -> ToolUse | None:
    """`said`: the tools in the words of the client, which templates show.  Raises ApiError 400."""
    tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(said))
    names = [tool["function"]["name"] for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            path = f"tools[{i}].function.name"
            raise bad_request(f"{path} '{name}' is there twice", path)
    if choice is None:
        choice = "auto" if tools else "none"
    if choice == "none":
        return None
    if not tools:
        raise bad_request("tool_choice needs tools; send them or leave it out", "tool_choice")
    if isinstance(choice, FunctionChoice):
        called = _among(choice.function.name, "tool_choice.function.name", names)
        return ToolUse(tools, (called,), parallel, is_named=True)
    if isinstance(choice, AllowedChoice):
        path = "tool_choice.allowed_tools.tools"
        allowed = [
            _among(tool.function.name, f"{path}[{i}].function.name", names)
            for i, tool in enumerate(choice.allowed_tools.tools)
        ]
        tools = tuple(tool for tool in tools if tool["function"]["name"] in allowed)
        names = [tool["function"]["name"] for tool in tools]
        choice = choice.allowed_tools.mode
    return ToolUse(tools, tuple(names) if choice == "required" else (), parallel)


def _among(name: str, path: str, names: Sequence[str]) -> str:
    if name not in names:
        raise bad_request(f"{path} '{name[:64]}' is not among the tools", path)
    return name


def _tool(tool: JsonObject, name: str) -> Tool:
    path = f"{name}.function"
    function = cast("Function", tool["function"])
    if num_chars(function, path) > MAX_RAW_CHARS:
        raise bad_request(f"{path} has more than {MAX_RAW_CHARS} characters; shorten it", path)
    return {"type": "function", "function": function}
