"""JSON schemas of bodies and answers: bodies are those of the shapes that read them.

`tests/api/document/test_openapi.py` holds all of it against the server.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from epd.api import adapters, tokenizing
from epd.api.anthropic import request as anthropic_request
from epd.api.asked.asked import ModelFacts, facts_of
from epd.api.http.shapes import Shape, bounded, names_of
from epd.api.openai.request import ChatRequest, CompletionRequest
from epd.api.responses import request as response_request
from epd.config import Limits
from epd.frontend import JsonObject

SHAPES: dict[type[Shape], str] = {  # and what stands ahead of the names of all their parts
    ChatRequest: "",
    CompletionRequest: "",
    tokenizing.TokenizeRequest: "",
    tokenizing.DetokenizeRequest: "",
    anthropic_request.Request: "Message",
    anthropic_request.Prompt: "Message",
    response_request.Request: "Response",
}
KNOWN = names_of(
    *SHAPES, adapters.LoadRequest, adapters.UnloadRequest
)  # what the top of some body may have, or has a reason not to
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


def array(items: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": items, **bounds}


STRING: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
ANYTHING: Schema = {}
OBJECT: Schema = {"type": "object"}
NULL: Schema = {"type": "null"}


def components(model: ModelFacts, limits: Limits) -> dict[str, Schema]:
    """All that the document refers to, by name."""
    found: dict[str, Schema] = {}
    for shape, prefix in SHAPES.items():
        own = bounded(shape, facts_of(model, limits))
        _, parts = msgspec.json.schema_components([own], ref_template=REF + prefix + "{name}")
        found |= {prefix + name: schema for name, schema in parts.items()}
        top = found[prefix + shape.__name__]
        top["properties"] = _properties(top, model) | {
            name: {"enum": [*refusal.harmless, None]}
            for name, refusal in shape.refused.items()
            if refusal.harmless
        }
    found["ResponseMessage"]["required"] = ["role", "content"]  # its type may be absent
    found["TokenizeRequest"]["oneOf"] = [{"required": ["prompt"]}, {"required": ["messages"]}]
    return found | _answers()


def _properties(top: Schema, model: ModelFacts) -> JsonObject:
    """What may be sent; null is the same as absence, but for what must be there."""
    properties, required = top["properties"], top.get("required", ())
    assert isinstance(properties, dict)
    assert isinstance(required, list | tuple)
    properties["model"] = {"enum": [*model.served_names, *model.adapters]}
    return {
        name: schema if name in required or NULL in schema.get("anyOf", ()) else _or_null(schema)
        for name, schema in properties.items()
    }


def _or_null(schema: object) -> Schema:
    return {"anyOf": [schema, NULL]}


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
