"""JSON schemas of bodies and answers, made of what reads them wherever that can say it.

Parameters are those of `epd.api.openai.parameters`, bodies of the other APIs those of their
shapes.  Only what is read by hand (messages, tools) is described by hand, of the same constants;
`tests/api/test_openapi.py` holds all of it against the server.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from epd.api import tokenizing
from epd.api.anthropic import request as anthropic_request
from epd.api.asked.asked import ModelFacts
from epd.api.asked.pixel_bounds import PIXELS
from epd.api.asked.structured import GUIDED, SPELLINGS
from epd.api.asked.template_flags import ANSWERED, CONTINUED, EFFORTS
from epd.api.asked.tools import MAX_TOOLS, NAME
from epd.api.http import fields
from epd.api.http.fields import MAX_STOPS
from epd.api.openai.messages_field import DETAILS, REASONING
from epd.api.openai.messages_field import INERT as MESSAGE_INERT
from epd.api.openai.parameters import (
    CHAT,
    CHAT_HARMLESS,
    COMPLETION,
    COMPLETION_HARMLESS,
    INERT,
    REFUSED,
    SIMPLE,
)
from epd.api.openai.validation import MAX_ALLOWED, MAX_NAMED, MAX_TOP_LOGPROBS
from epd.api.openai.video_field import SAMPLING
from epd.api.responses import request as response_request
from epd.config import Limits
from epd.frontend import JsonObject

SHAPES = (
    anthropic_request.Request,
    response_request.Request,
    tokenizing.TokenizeRequest,
    tokenizing.DetokenizeRequest,
)
# What the top of some body may have, or has a reason not to.
KNOWN = frozenset(
    {*CHAT, *CHAT_HARMLESS, *COMPLETION, *COMPLETION_HARMLESS, *REFUSED}
    | {*anthropic_request.PASSED, *anthropic_request.REFUSED}
    | {*response_request.PASSED, *response_request.REFUSED}
    | {name for shape in SHAPES for name in shape.__struct_fields__}
)
Schema = JsonObject
Fields = Mapping[str, object]  # by name
REF = "#/components/schemas/"


def ref(name: str) -> Schema:
    return {"$ref": REF + name}


def record(fields: Fields, *, closed: bool = True) -> Schema:
    """An object; a name that ends in `?` may be absent.  `closed`: there are no other names."""
    schema: Schema = {
        "type": "object",
        "properties": {name.removesuffix("?"): field for name, field in fields.items()},
    }
    if required := [name for name in fields if not name.endswith("?")]:
        schema["required"] = required
    if closed:
        schema["additionalProperties"] = False
    return schema


def optional(fields: Fields) -> JsonObject:
    """The same, all of which may be absent."""
    return {f"{name}?": field for name, field in fields.items()}


def array(items: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": items, **bounds}


STRING: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
ANYTHING: Schema = {}
OBJECT: Schema = {"type": "object"}
HINTS: dict[object, Schema] = {fields.mapping: OBJECT, fields.string: STRING}
LOGPROBS: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS}


def _token_id(model: ModelFacts) -> Schema:
    return {"type": "integer", "minimum": 0, "maximum": model.vocab_size - 1}


def _names(model: ModelFacts) -> Schema:
    return {"enum": [*model.served_names]}


# --- chat and plain completions -------------------------------------------------------------------


def _shared(model: ModelFacts, limits: Limits) -> dict[str, Schema]:
    """By name, what is more than one value."""
    token_id = _token_id(model)
    constraints: dict[str, Schema] = {
        "json": {"type": ["object", "boolean", "string"]},
        "regex": STRING,
        "choice": array(STRING, minItems=1),
        "grammar": STRING,
    }
    return {
        "model": _names(model),
        "n": {"type": "integer", "minimum": 1, "maximum": limits.max_choices},
        "logit_bias": {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,11}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        },
        "stop_token_ids": array(token_id, maxItems=MAX_STOPS),
        "allowed_token_ids": array(token_id, maxItems=MAX_ALLOWED),
        "logprob_token_ids": array(token_id, minItems=1, maxItems=MAX_NAMED),
        "ec_transfer_params": OBJECT,
        "kv_transfer_params": OBJECT,
        "prompt_logprobs": LOGPROBS,
        "stream_options": record(
            {
                "include_usage?": BOOLEAN,
                "continuous_usage_stats?": BOOLEAN,
                "include_obfuscation?": BOOLEAN,
            }
        ),
        "structured_outputs": record(
            {"json_object?": BOOLEAN} | optional({kind: constraints[kind] for kind in GUIDED})
        ),
        **{name: constraints[kind] for name, kind in SPELLINGS.items()},
    }


def _chat(model: ModelFacts, limits: Limits) -> dict[str, Schema]:
    sampling = optional({name: {"type": "number"} for name in SAMPLING})
    area = {"type": "integer", "minimum": 1, "maximum": limits.max_pixels}
    pixels = optional(dict.fromkeys(PIXELS, area))
    function = record({"name": STRING})
    named = record({"type": {"const": "function"}, "function": function})
    allowed = record({"mode": {"enum": ["auto", "required"]}, "tools": array(named, minItems=1)})
    some = record({"type": {"const": "allowed_tools"}, "allowed_tools": allowed})
    json_schema = record({"schema": OBJECT, "name?": STRING}, closed=False)
    return _shared(model, limits) | {
        "messages": array(ref("ChatMessage"), minItems=1),
        "max_completion_tokens": _of("max_tokens"),
        "logprobs": BOOLEAN,
        "top_logprobs": LOGPROBS,
        "tools": array(ref("ChatTool"), maxItems=MAX_TOOLS),
        "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, named, some]},
        "parallel_tool_calls": BOOLEAN,
        "chat_template_kwargs": OBJECT,
        "include_reasoning": BOOLEAN,
        **dict.fromkeys((ANSWERED, CONTINUED), BOOLEAN),
        "reasoning_effort": {"enum": [*EFFORTS]},
        "response_format": {
            "anyOf": [
                record({"type": {"enum": ["text", "json_object"]}}),
                record({"type": {"const": "json_schema"}, "json_schema": json_schema}),
            ]
        },
        "media_io_kwargs": record({"video?": record(sampling)}),
        "mm_processor_kwargs": record({**sampling, **pixels, "do_sample_frames?": BOOLEAN}),
    }


def _completion(model: ModelFacts, limits: Limits) -> dict[str, Schema]:
    ids = array(_token_id(model), minItems=1)
    text = {"type": "string", "minLength": 1}
    several = [array(one, minItems=1) for one in (text, ids)]
    return _shared(model, limits) | {
        "prompt": {"anyOf": [text, ids, *several]},
        "echo": BOOLEAN,
        "logprobs": LOGPROBS,
    }


def _body(
    names: set[str],
    harmless: dict[str, tuple[object, ...]],
    described: dict[str, Schema],
    required: str,
) -> Schema:
    """All names that are taken; null is the same as absence, but for what must be there."""
    properties = {name: _one(name, described) for name in sorted(names)}
    properties |= {name: {"enum": _unique(values)} for name, values in sorted(harmless.items())}
    needed = {required: properties.pop(required)}
    return record(needed | optional({k: _or_null(v) for k, v in properties.items()}))


def _one(name: str, described: Mapping[str, Schema]) -> Schema:
    is_read = name in SIMPLE or name in INERT
    return _of(name) if is_read else described.get(name, ANYTHING)


def _of(name: str) -> Schema:
    return msgspec.json.schema((SIMPLE | INERT)[name])


def _unique(values: tuple[object, ...]) -> list[object]:
    """To JSON 1 and 1.0 are one value."""
    return [value for i, value in enumerate(values) if value not in values[:i]]


def _or_null(schema: object) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _messages() -> dict[str, Schema]:
    """What is read by hand."""
    image = record({"url": STRING, "detail?": _or_null({"enum": [*DETAILS]})})
    frames = {"anyOf": [STRING, array(STRING, minItems=1)]}
    sampling = optional({name: {"type": "number"} for name in SAMPLING})

    hints = optional({name: HINTS[read] for name, read in MESSAGE_INERT.items() if name != "type"})
    hints = {name: _or_null(schema) for name, schema in hints.items()}

    def part(kind: str, value: object, more: Fields) -> Schema:
        return record({"type": {"const": kind}, kind: value, **more, **hints})

    text = part("text", STRING, {})
    media = [
        part("image_url", image, {}),
        part("video_url", record({"url": STRING}), sampling),
        part("video", frames, sampling),
    ]
    called = record(
        {"name": STRING, "arguments": {"type": "string", "contentMediaType": "application/json"}}
    )
    call = record({"function": called, "type?": STRING, **hints})

    def message(roles: list[str], content: Fields, more: Fields) -> Schema:
        fields = {"role": {"enum": roles}, **content, "name?": _or_null(STRING), **more, **hints}
        return record(fields)

    def said(*parts: Schema) -> Fields:
        return {"content": {"anyOf": [STRING, array({"anyOf": [*parts]}, minItems=1)]}}

    thought = optional({name: _or_null(STRING) for name in REASONING})
    messages = [
        message(["user"], said(text, *media), {}),
        message(["system", "developer"], said(text, *media), {}),
        message(["assistant"], said(text), thought),
        message(
            ["assistant"],
            {"tool_calls": array(call, minItems=1), "content?": {"type": "null"}},
            thought,
        ),
        message(["tool"], said(text, *media), {"tool_call_id?": _or_null(STRING)}),
    ]
    function = {
        "name": {"type": "string", "pattern": NAME},
        "description?": _or_null(STRING),
        "parameters?": _or_null(OBJECT),
        "strict?": _or_null(BOOLEAN),
    }
    tool = {"type": {"const": "function"}, "function": record(function), "cache_control?": OBJECT}
    return {"ChatMessage": {"anyOf": messages}, "ChatTool": record(tool)}


# --- the other APIs -------------------------------------------------------------------------------


def _of_shapes(prefix: str, passed: Fields, *shapes: type[object]) -> dict[str, Schema]:
    """Components of these shapes; the first one takes what is passed on to chat as well."""
    _, components = msgspec.json.schema_components(shapes, ref_template=REF + prefix + "{name}")
    components[shapes[0].__name__]["properties"] |= {k: _or_null(v) for k, v in passed.items()}
    return {prefix + name: schema for name, schema in components.items()}


def _properties(schema: Schema) -> dict[str, Schema]:
    properties = schema["properties"]
    assert isinstance(properties, dict)
    return properties


def _passed(names: set[str], model: ModelFacts, limits: Limits) -> Fields:
    described = _chat(model, limits)
    return {name: _one(name, described) for name in sorted(names)}


def components(model: ModelFacts, limits: Limits) -> dict[str, Schema]:
    """All that the document refers to, by name."""
    message = _of_shapes(
        "Message",
        _passed(anthropic_request.PASSED - {"max_tokens"}, model, limits),
        anthropic_request.Request,
        anthropic_request.Prompt,
    )
    _properties(message["MessagePrompt"])["model"] = _or_null(_names(model))
    response = _of_shapes(
        "Response", _passed(response_request.PASSED, model, limits), response_request.Request
    )
    said = response["ResponseMessage"]
    required = said["required"]
    assert isinstance(required, list)
    required.remove("type")
    tokens = _of_shapes("", {}, tokenizing.TokenizeRequest, tokenizing.DetokenizeRequest)
    for shape in tokens.values():
        _properties(shape)["model"] = _or_null(_names(model))
    tokens["TokenizeRequest"]["oneOf"] = [{"required": ["prompt"]}, {"required": ["messages"]}]
    _properties(tokens["DetokenizeRequest"])["tokens"] = array(_token_id(model))
    return {
        "ChatRequest": _body(CHAT, CHAT_HARMLESS, _chat(model, limits), "messages"),
        "CompletionRequest": _body(
            COMPLETION, COMPLETION_HARMLESS, _completion(model, limits), "prompt"
        ),
        **_messages(),
        **message,
        **response,
        **tokens,
        **_answers(),
    }


# --- answers --------------------------------------------------------------------------------------


def _answers() -> dict[str, Schema]:
    maybe = _or_null(STRING)
    error = record({"message": STRING, "type": STRING, "param": maybe, "code": maybe})
    told = {"type": {"const": "error"}, "error": error, "request_id?": STRING}
    model = {"id": STRING, "object": {"const": "model"}, "created": COUNT, "owned_by": STRING}
    model |= {"root": STRING, "max_model_len": COUNT}
    common = {"id": STRING, "model": STRING, "usage": OBJECT}
    response = {
        "object": {"const": "response"},
        "status": {"enum": ["completed", "incomplete"]},
        "output": array(OBJECT),
    }
    ends = ["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    message = {
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "content": array(OBJECT),
        "stop_reason": {"enum": ends},
    }
    prompt = {"prompt_token_ids?": array(COUNT)}  # of all choices of chat, of each of completions
    return {
        "Error": record({"error": error}),
        "MessageError": record(told),
        "ChatCompletion": _completed("chat.completion", {"message": OBJECT}, prompt),
        "Completion": _completed("text_completion", {"text": STRING, **prompt}),
        "Response": record(common | response, closed=False),
        "Message": record(common | message, closed=False),
        "Model": record(model),
        "ModelList": record({"object": {"const": "list"}, "data": array(ref("Model"))}),
    }


def _completed(kind: str, said: Fields, more: Fields | None = None) -> Schema:
    usage = {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": record({"cached_tokens": COUNT}),
    }
    choice = {
        "index": COUNT,
        "finish_reason": STRING,
        "logprobs": ANYTHING,
        "stop_reason": {"anyOf": [STRING, COUNT, {"type": "null"}]},
        "matched_stop": {"anyOf": [STRING, COUNT, {"type": "null"}]},
        "token_ids?": array(COUNT),
        **said,
    }
    answer = {
        "id": STRING,
        "object": {"const": kind},
        "created": COUNT,
        "model": STRING,
        "choices": array(record(choice, closed=False), minItems=1),
        "usage": record(usage, closed=False),
        **(more or {}),
    }
    return record(answer, closed=False)
