"""Constrained output as clients ask for it, turned into one grammar text.

OpenAI's `response_format`; vLLM's `structured_outputs` (`json`, `regex`, `choice`, `grammar`,
`json_object`) and its older spelling `guided_json`, `guided_regex`, `guided_choice`,
`guided_grammar`.  One of them per request.  Nothing is relaxed silently: a keyword that cannot be
enforced is an error that names its place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from epd.api.http.errors import ApiError, bad_request
from epd.api.http.faults import expected
from epd.api.http.shapes import JsonValue, Shape, json_text
from epd.api.schema.complement import MANY
from epd.api.schema.rewrite import exact
from epd.frontend import JsonObject
from epd.model_files.finite import SPACING

MAX_CHARS = 64 << 10  # of what is compiled: that is work that any client could ask for
MAX_RAW_CHARS = 512 << 10  # of a schema with its descriptions
ANY_OBJECT = {"type": "object"}
Watch = Callable[[str | ApiError], None]

GUIDED = ("json", "regex", "choice", "grammar")
SPELLINGS = {f"guided_{kind}": kind for kind in GUIDED} | {
    "ebnf": "grammar", "json_schema": "json", "regex": "regex",  # SGLang's
}  # fmt: skip
JsonSchema = dict[str, JsonValue] | bool | str
Choices = Annotated[list[str], Meta(min_length=1)]
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_ONE = ("items", "additionalProperties", "not", "contains", "if", "then", "else")


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


def unwatched(_: str | ApiError) -> None:
    """Of nobody's interest."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer must be; `value` is checked for its JSON type only."""

    kind: str  # json, regex, choice, grammar
    value: object
    param: str  # where it stood, for complaints

    def checked_grammar(
        self, fault: Callable[[str], str], watch: Watch = unwatched, closes: bool = True
    ) -> str:
        """llguidance's text, if an answer can follow it; `fault` says why none can.  Slow for large
        schemas, and native code may end its process.  `watch` hears what is to be said then: the
        field that is compiled, or an error whose place is still looked for.  `closes`: see
        `schema.exact`.  Raises ApiError 400.
        """
        watch(self.param)
        try:
            grammar = to_grammar(self, closes)
        except (ValueError, RecursionError) as error:  # no Unicode, no JSON, too deep
            raise self._refused("", str(error)) from None
        reason = fault(grammar)
        if not reason:
            return grammar
        refused = self._refused("", reason)
        if self.kind == "json":
            watch(refused)
            root = self.value
            place = _place(root, root, lambda part: _part_fault(part, fault, closes))
            refused = self._refused(place, reason)
        raise refused

    def exact_schema(self, closes: bool) -> JsonObject:
        """What is compiled of a schema.  Raises ValueError, RecursionError."""
        schema = exact(self.value, closes=closes)
        if len(json.dumps(schema)) > MAX_CHARS:
            raise ValueError(f"it has more than {MAX_CHARS} characters without its descriptions")
        return schema if isinstance(schema, dict) else {} if schema else {"not": {}}

    def _refused(self, place: str, reason: str) -> ApiError:
        """`place`: within the field."""
        first_line, *rest = reason.strip().splitlines()
        told = " ".join([first_line, *(line.strip() for line in rest[:3])])[:300]
        message = f"{self.param}{place} cannot be followed: {told}"
        message = message.encode("utf-8", "backslashreplace").decode()  # halves of a surrogate
        return bad_request(message, self.param, "invalid_schema")


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


# --- to a grammar ---------------------------------------------------------------------------------


def to_grammar(constraint: Constraint, closes: bool = True) -> str:
    """llguidance's text.  Slow for large schemas; not for the loop."""
    from llguidance import LLMatcher

    kind, value = constraint.kind, constraint.value
    if kind == "json":
        schema = constraint.exact_schema(closes)
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=SPACING)
    if kind == "choice":
        return LLMatcher.grammar_from_lark(f"start: {_choice(value)}")
    if kind == "regex":
        return LLMatcher.grammar_from_regex(str(value))
    return LLMatcher.grammar_from_lark(_as_lark(str(value), constraint.param))


def _choice(value: object) -> str:
    """Of one terminal: thousands of rules compile four times as long."""
    assert isinstance(value, list)  # as it was read
    return f"CHOICE\nCHOICE: {' | '.join(map(json.dumps, value))}"


def _as_lark(text: str, param: str) -> str:
    """Lark as it is; EBNF as xgrammar and llama.cpp write it (`root ::= …`) is converted."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except Exception as error:  # whatever a converter makes of any text
        message = f"{param} is no Lark grammar, and as EBNF it cannot be converted: {error}"
        raise bad_request(message[:400], param, "invalid_schema") from None


def compiled_schema(grammar: str) -> JsonObject:
    """What a grammar is made of whose constraint is a schema."""
    (whole,) = json.loads(grammar)["grammars"]
    schema: JsonObject = whole["json_schema"]
    return schema


def as_rule(constraint: Constraint, grammar: str) -> str:
    """The right side of a Lark rule, and lines behind it.  `grammar`: the constraint's own.  Raises
    ApiError 400 for what cannot be one."""
    kind = constraint.kind
    if kind == "json":
        return f"%json {json.dumps(compiled_schema(grammar))}"
    if kind == "choice":
        return _choice(constraint.value)
    if kind == "regex":
        (whole,) = json.loads(grammar)["grammars"]
        return str(whole["lark_grammar"]).removeprefix("start: ")
    name = constraint.param
    raise bad_request(f"{name} is a whole grammar, which tools cannot stand beside", name)


def _part_fault(part: object, fault: Callable[[str], str], closes: bool) -> str:
    try:
        return fault(to_grammar(Constraint("json", part, ""), closes))
    except ValueError as error:
        return str(error)


def _place(root: object, part: object, fault: Callable[[object], str]) -> str:
    """Path below `part` to the smallest schema that is refused by itself."""
    for path, child in _children(part):
        shared = {name: at for name, at in _members(root).items() if name in _DEFINING}
        alone = shared | child if isinstance(child, dict) and path[0] not in _DEFINING else child
        if fault(alone):
            return "".join(f".{step}" for step in path) + _place(root, child, fault)
    return ""


_DEFINING = ("$defs", "definitions")


def _members(schema: object) -> JsonObject:
    return schema if isinstance(schema, dict) else {}


def _children(schema: object) -> Iterator[tuple[tuple[str, ...], object]]:
    members = _members(schema)
    for name in _NAMED:
        for key, child in _members(members.get(name)).items():
            yield (name, key), child
    for name in MANY:
        if isinstance(several := members.get(name), list):
            for index, child in enumerate(several):
                yield (name, str(index)), child
    for name in _ONE:
        if isinstance(child := members.get(name), dict):
            yield (name,), child
