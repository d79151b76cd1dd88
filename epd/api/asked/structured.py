"""Constrained output as clients ask for it.

OpenAI's `response_format`; vLLM's `structured_outputs` (`json`, `regex`, `choice`, `grammar`,
`json_object`) and its older spelling `guided_json`, `guided_regex`, `guided_choice`,
`guided_grammar`.  One of them per request.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from epd.api.http.errors import bad_request
from epd.api.http.faults import expected
from epd.api.http.shapes import JsonValue, Shape, json_text

MAX_CHARS = 64 << 10  # of what is compiled: that is work that any client could ask for
MAX_RAW_CHARS = 512 << 10  # of a schema with its descriptions
ANY_OBJECT = {"type": "object"}

GUIDED = ("json", "regex", "choice", "grammar")
SPELLINGS = {f"guided_{kind}": kind for kind in GUIDED} | {
    "ebnf": "grammar", "json_schema": "json", "regex": "regex",  # SGLang's
}  # fmt: skip
JsonSchema = dict[str, JsonValue] | bool | str
Choices = Annotated[list[str], Meta(min_length=1)]


class NamedSchema(Shape, kw_only=True):
    schema: JsonSchema
    name: JsonValue = None
    description: JsonValue = None
    strict: JsonValue = None


class TextFormat(Shape, tag="text", tag_field="type"):
    """Any text."""


class JsonObjectFormat(Shape, tag="json_object", tag_field="type"):
    """Any object."""


class JsonSchemaFormat(Shape, tag="json_schema", tag_field="type"):
    json_schema: NamedSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(Shape):
    json: JsonSchema | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool = False


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer must be; `value` is checked for its JSON type only."""

    kind: str  # json, regex, choice, grammar
    value: object
    param: str  # where it stood, for complaints


def read_constraint(
    form: ResponseFormat | None, outputs: StructuredOutputs | None, request: object
) -> Constraint | None:
    """The one constraint of a request, which has all `SPELLINGS`, if any.  Raises ApiError 400."""
    found = [*_response_format(form), *_structured(outputs)]
    for name, kind in SPELLINGS.items():
        if (value := getattr(request, name)) is not None:
            found.append(_of(kind, value, name))
    if len(found) > 1:
        names = " and ".join(constraint.param for constraint in found)
        raise bad_request(f"{names} both constrain the answer; send one", found[1].param)
    return found[0] if found else None


def _response_format(form: ResponseFormat | None) -> Iterator[Constraint]:
    name = "response_format"
    if isinstance(form, JsonSchemaFormat):
        yield _of("json", form.json_schema.schema, f"{name}.json_schema.schema")
    elif isinstance(form, JsonObjectFormat):
        yield Constraint("json", ANY_OBJECT, name)


def _structured(outputs: StructuredOutputs | None) -> Iterator[Constraint]:
    if outputs is None:
        return
    name = "structured_outputs"
    for kind in GUIDED:
        if (value := getattr(outputs, kind)) is not None:
            yield _of(kind, value, f"{name}.{kind}")
    if outputs.json_object:
        yield Constraint("json", ANY_OBJECT, f"{name}.json_object")


def _of(kind: str, value: object, param: str) -> Constraint:
    if kind == "json" and isinstance(value, str):
        value = json_text(value, param)
        if not isinstance(value, dict | bool):
            raise expected(param, "an object", value)
    most = MAX_RAW_CHARS if kind == "json" else MAX_CHARS
    if num_chars(value, param) > most:
        raise bad_request(f"{param} has more than {most} characters; simplify it", param)
    return Constraint(kind, value, param)


def num_chars(value: object, param: str) -> int:
    """Of its JSON text.  Raises ApiError 400."""
    try:
        return len(json.dumps(value))
    except RecursionError:
        raise bad_request(f"{param} nests too deeply; simplify it", param) from None
