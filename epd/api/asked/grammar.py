"""From what an answer must be to one grammar text, which llguidance compiles.

Nothing is relaxed silently: a keyword that cannot be enforced is an error that names its place.
Slow for large schemas, and native code may end its process: not for a gateway's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping

from llguidance import LLMatcher

from epd.api.asked.calls.registry import form_named
from epd.api.asked.structured import MAX_CHARS, Constraint
from epd.api.asked.tools import ToolUse
from epd.api.http.errors import ApiError, bad_request
from epd.api.schema.complement import MANY
from epd.api.schema.references import moved
from epd.api.schema.rewrite import exact
from epd.frontend import JsonObject
from epd.model_files.finite import SPACING

Fault = Callable[[str], str]
Watch = Callable[[str | ApiError], None]

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_ONE = ("items", "additionalProperties", "not", "contains", "if", "then", "else")
_DEFINING = ("$defs", "definitions")


def unwatched(_: str | ApiError) -> None:
    """Of nobody's interest."""


def checked_grammar(
    source: Constraint | ToolUse, fault: Fault, watch: Watch = unwatched, closes: bool = True
) -> str:
    """llguidance's text, if an answer can follow it; `fault` gives the reason why none can.

    `watch` gets what the answer to the client is if the process ends then: the field that is
    compiled, or an error whose place is still looked for.  `closes`: see `exact`.  Raises ApiError
    400.
    """
    if isinstance(source, ToolUse):
        return _of_tools(source, fault, watch, closes)
    watch(source.param)
    try:
        grammar = to_grammar(source, closes)
    except (ValueError, RecursionError) as error:  # no Unicode, no JSON, too deep
        raise _refused(source, "", str(error)) from None
    reason = fault(grammar)
    if not reason:
        return grammar
    refused = _refused(source, "", reason)
    if source.kind == "json":
        watch(refused)
        root = source.value
        place = _place(root, root, lambda part: _part_fault(part, fault, closes))
        refused = _refused(source, place, reason)
    raise refused


def _refused(constraint: Constraint, place: str, reason: str) -> ApiError:
    """`place`: within the field."""
    first_line, *rest = reason.strip().splitlines()
    told = " ".join([first_line, *(line.strip() for line in rest[:3])])[:300]
    message = f"{constraint.param}{place} cannot be followed: {told}"
    message = message.encode("utf-8", "backslashreplace").decode()  # halves of a surrogate
    return bad_request(message, constraint.param, "invalid_schema")


def to_grammar(constraint: Constraint, closes: bool = True) -> str:
    """llguidance's text.  Raises ApiError 400, ValueError, RecursionError."""
    kind, value = constraint.kind, constraint.value
    if kind == "json":
        schema = _exact_schema(value, closes)
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=SPACING)
    if kind == "choice":
        return LLMatcher.grammar_from_lark(f"start: {_choice(value)}")
    if kind == "regex":
        return LLMatcher.grammar_from_regex(str(value))
    return LLMatcher.grammar_from_lark(_as_lark(str(value), constraint.param))


def _exact_schema(value: object, closes: bool) -> JsonObject:
    schema = exact(value, closes=closes)
    if len(json.dumps(schema)) > MAX_CHARS:
        raise ValueError(f"it has more than {MAX_CHARS} characters without its descriptions")
    return schema if isinstance(schema, dict) else {} if schema else {"not": {}}


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


def _schema_of(grammar: str) -> JsonObject:
    """What a grammar is made of whose constraint is a schema."""
    (whole,) = json.loads(grammar)["grammars"]
    schema: JsonObject = whole["json_schema"]
    return schema


def _as_rule(constraint: Constraint, grammar: str) -> str:
    """The right side of a Lark rule, and lines behind it.  `grammar`: the constraint's own.  Raises
    ApiError 400 for what cannot be one."""
    kind = constraint.kind
    if kind == "json":
        return f"%json {json.dumps(_schema_of(grammar))}"
    if kind == "choice":
        return _choice(constraint.value)
    if kind == "regex":
        (whole,) = json.loads(grammar)["grammars"]
        return str(whole["lark_grammar"]).removeprefix("start: ")
    name = constraint.param
    raise bad_request(f"{name} is a whole grammar, which tools cannot stand beside", name)


# --- where a fault is -----------------------------------------------------------------------------


def _part_fault(part: object, fault: Fault, closes: bool) -> str:
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


# --- of tools -------------------------------------------------------------------------------------


def _of_tools(use: ToolUse, fault: Fault, watch: Watch, closes: bool) -> str:
    """Of a shaped answer."""
    callees = use.forced or tuple(tool["function"]["name"] for tool in use.tools)
    bodies: list[JsonObject] = []
    for index, tool in enumerate(use.tools):
        function = tool["function"]
        if function["name"] in callees:
            parameters = function.get("parameters") or NO_PARAMETERS
            param = f"tools[{index}].function.parameters"
            constraint = Constraint("json", parameters, param)
            schema = _schema_of(checked_grammar(constraint, fault, watch, closes))
            at = f"#/anyOf/{len(bodies)}"
            bodies.append(_call_schema(function["name"], schema, at))
    text = json.dumps({"anyOf": bodies, "x-guidance": SPACING})
    more = ' ("\\n" call)*' if use.parallel and not use.is_named else ""
    text_rule = ""
    if not use.forced and use.otherwise is not None:
        own = checked_grammar(use.otherwise, fault, watch, closes)
        text_rule = f" | {_as_rule(use.otherwise, own)}"
    rules = f"start: call{more}{text_rule}\nbody: %json {text}\n"
    # As one token where the vocabulary has it, else spelled out.
    form = form_named(use.form)
    special = f'{rules}call: {form.open} "\\n" body "\\n" {form.close}\n'
    spelled = (
        f"{rules}call: {json.dumps(form.open + chr(10))} body {json.dumps(chr(10) + form.close)}\n"
    )
    watch("tools")
    grammar = spelled if fault(special) else special
    return checked_grammar(Constraint("grammar", grammar, "tools"), fault, watch)


def _call_schema(name: str, parameters: Mapping[str, object], at: str) -> JsonObject:
    """`at`: where it stands in its document, as a reference."""
    arguments = moved(parameters, f"{at}/properties/arguments")
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
