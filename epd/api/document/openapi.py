"""The document that describes the HTTP API to programs: OpenAPI 3.1, at `/openapi.json`.

Made once, when somebody asks first; it names the model that is served.  Each operation has an
example that can be sent as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from epd import __version__
from epd.api.asked.asked import ModelFacts
from epd.api.document.schemas import (
    BOOLEAN,
    COUNT,
    OBJECT,
    STRING,
    Schema,
    array,
    components,
    record,
    ref,
)
from epd.api.http.access import OPEN
from epd.api.watching.cluster import MAX_LIMIT, MAX_OVER_S
from epd.api.watching.cluster_view import ClusterView
from epd.config import Limits
from epd.frontend import JsonObject

ERRORS = {
    "400": "a parameter, an image or the context length is wrong; `param` names it",
    "401": "the server wants an API key",
    "404": "another model",
    "408": "the body did not arrive in time",
    "413": "the body is too large",
    "415": "the body is not JSON",
    "422": "instances ended while they computed it; do not try again",
    "429": "too many requests are open; try again",
    "500": "a fault of the server",
    "503": "no instance can take the request now; try again",
    "504": "the request did not end in time",
}
LOOKING = {
    "400": ERRORS["400"],
    "403": "strangers reach this server, and no API key says who may look",
    "429": "too many look at the cluster; try again",
}
# a white square
IMAGE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAEAAAABAAQAAAACCEkxzAAAAFElEQVR42mP8zwABTAyjjFEG"
    "yQwAzx8Bf7QK4E8AAAAASUVORK5CYII="
)
LOOK = [
    {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": IMAGE}},
            {"type": "text", "text": "What is this?"},
        ],
    }
]
HELLO = [{"role": "user", "content": "Say hello."}]
HTML = "text/html; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that can be asked of the server."""

    path: str
    method: str
    tag: str
    summary: str
    answer: Schema
    body: str = ""  # the name of its schema
    examples: dict[str, JsonObject] = field(default_factory=dict)
    streams: bool = False
    error: str = "Error"
    content_type: str = "application/json"
    others: tuple[str, ...] = ()  # statuses of an answer of the same form
    query: Mapping[str, Schema] = field(default_factory=dict)


_STRINGS = {"anyOf": [array(STRING), {"type": "null"}]}
_TOKENS = {
    "count": COUNT,
    "max_model_len": COUNT,
    "tokens": array(COUNT),
    "token_strings": _STRINGS,
    "token_strs": _STRINGS,
}
_EVENT = {"data": STRING, "event?": STRING}
SECONDS: Schema = {"type": "number", "minimum": 0}
_STATE = {"model": STRING, "version": STRING, "uptime_s": SECONDS, "no_answer": array(STRING)}
_STATE |= {name: array(OBJECT) for name in ClusterView.__struct_fields__ if name not in _STATE}
QUERY = {
    "machine": STRING,
    "state": STRING,
    "older_s": SECONDS,
    "late": {"type": "integer", "minimum": 0, "maximum": 1},
    "key": STRING,
    "instance": STRING,
    "limit": {"type": "integer", "minimum": 0, "maximum": MAX_LIMIT},
    "over_s": {"type": "number", "minimum": 0, "maximum": MAX_OVER_S},
}
_READY = {"ready": BOOLEAN, "reason": STRING, "stages": OBJECT, "instances": array(OBJECT)}

OPERATIONS = (
    Operation(
        "/v1/chat/completions",
        "post",
        "OpenAI",
        "A chat completion, whole or streamed",
        ref("ChatCompletion"),
        "ChatRequest",
        {
            "text": {"messages": HELLO, "max_tokens": 16},
            "image": {"messages": LOOK, "max_tokens": 16},
            "stream": {"messages": HELLO, "max_tokens": 16, "stream": True},
        },
        streams=True,
    ),
    Operation(
        "/encode/v1/chat/completions",
        "post",
        "Stages",
        "The images of a chat completion are encoded, and nothing else",
        ref("ChatCompletion"),
        "ChatRequest",
        {"image": {"messages": LOOK}},
        streams=True,
    ),
    Operation("/encode/v1/models", "get", "Stages", "The served model", ref("ModelList")),
    Operation("/encode/health", "get", "Stages", "200 while the process lives", OBJECT),
    Operation(
        "/v1/completions",
        "post",
        "OpenAI",
        "A plain completion, whole or streamed",
        ref("Completion"),
        "CompletionRequest",
        {"text": {"prompt": "Once upon a time", "max_tokens": 16}},
        streams=True,
    ),
    Operation(
        "/v1/responses",
        "post",
        "OpenAI",
        "A response, whole or streamed; nothing is stored",
        ref("Response"),
        "ResponseRequest",
        {
            "text": {"input": "Say hello.", "max_output_tokens": 16},
            "items": {"input": HELLO, "instructions": "Be brief.", "max_output_tokens": 16},
        },
        streams=True,
    ),
    Operation(
        "/v1/messages",
        "post",
        "Anthropic",
        "A message, whole or streamed",
        ref("Message"),
        "MessageRequest",
        {"text": {"messages": HELLO, "max_tokens": 16}},
        streams=True,
        error="MessageError",
    ),
    Operation(
        "/v1/messages/count_tokens",
        "post",
        "Anthropic",
        "How many tokens a prompt has",
        record({"input_tokens": COUNT}),
        "MessagePrompt",
        {"text": {"messages": HELLO}},
        error="MessageError",
    ),
    Operation(
        "/tokenize",
        "post",
        "Tokens",
        "The tokens of a prompt",
        record(_TOKENS),
        "TokenizeRequest",
        {"prompt": {"prompt": "Hello"}, "messages": {"messages": HELLO}},
    ),
    Operation(
        "/detokenize",
        "post",
        "Tokens",
        "The text of tokens",
        record({"prompt": STRING}),
        "DetokenizeRequest",
        {"tokens": {"tokens": [1, 2, 3]}},
    ),
    Operation("/v1/models", "get", "OpenAI", "The served model", ref("ModelList")),
    Operation("/v1/models/{id}", "get", "OpenAI", "The served model by its name", ref("Model")),
    Operation("/health", "get", "State", "200 while the process lives", OBJECT),
    Operation("/ping", "get", "State", "The same, under SageMaker's name", OBJECT),
    Operation(
        "/ready",
        "get",
        "State",
        "Whether a request would find its instances",
        record(_READY),
        others=("503",),
    ),
    Operation(
        "/state",
        "get",
        "State",
        "The machines of all processes: counts of states and edges, and the oldest machines",
        record(_STATE),
        query=QUERY,
    ),
    Operation(
        "/metrics",
        "get",
        "State",
        "Prometheus' text exposition",
        STRING,
        content_type="text/plain; version=0.0.4; charset=utf-8",
    ),
    Operation("/version", "get", "State", "The version", record({"version": STRING})),
    Operation("/openapi.json", "get", "Pages", "This document", OBJECT),
    Operation(
        "/docs", "get", "Pages", "This document, to read and to try", STRING, content_type=HTML
    ),
    Operation("/ui", "get", "Pages", "The machines at work", STRING, content_type=HTML),
    Operation("/", "get", "Pages", "What runs here", STRING, content_type=HTML),
)


def document(model: ModelFacts, limits: Limits) -> JsonObject:
    """The whole of it, of a server with this model."""
    schemas = components(model, limits)
    if limits.unknown_parameters == "warn":
        for body in {operation.body for operation in OPERATIONS if operation.body}:
            schemas[body].pop("additionalProperties")
    paths: dict[str, JsonObject] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation, model)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "epd",
            "version": __version__,
            "description": f"The HTTP API of a gateway that serves {model.model_name}.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(operation: Operation, model: ModelFacts) -> JsonObject:
    content: JsonObject = {operation.content_type: {"schema": operation.answer}}
    if operation.streams:
        content["text/event-stream"] = {"schema": record(_EVENT, closed=False)}
    answers: JsonObject = {"200": {"description": "the answer", "content": content}}
    described: JsonObject = {
        "tags": [operation.tag],
        "summary": operation.summary,
        "operationId": f"{operation.method} {operation.path}",
        "responses": answers,
    }
    for status in operation.others:
        answers[status] = {"description": "the answer is no", "content": content}
    refusal = {"application/json": {"schema": ref(operation.error)}}
    if operation.body:
        examples = {
            name: {"value": {"model": model.model_name, **value}}
            for name, value in operation.examples.items()
        }
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": ref(operation.body), "examples": examples}},
        }
        for status, why in ERRORS.items():
            answers[status] = {"description": why, "content": refusal}
    if operation.path not in OPEN:
        described["security"] = [{}, {"key": []}]  # the operator decides
        answers["401"] = {"description": ERRORS["401"], "content": refusal}
    if operation.query:
        described["parameters"] = [
            {"name": name, "in": "query", "schema": schema}
            for name, schema in operation.query.items()
        ]
        for status, why in LOOKING.items():
            answers[status] = {"description": why, "content": refusal}
    if "{id}" in operation.path:
        described["parameters"] = [
            {
                "name": "id",
                "in": "path",
                "required": True,
                "schema": STRING,
                "example": model.model_name,
            }
        ]
        answers["404"] = {"description": ERRORS["404"], "content": refusal}
    return described
