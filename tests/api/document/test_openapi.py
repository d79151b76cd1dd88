"""/openapi.json against the server that it describes: what may be sent, and what is answered."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from epd.api.asked.asked import facts_of
from epd.api.asked.parameters import Spoken
from epd.api.document.openapi import OPERATIONS, document
from epd.api.http.errors import ApiError
from epd.api.http.shapes import bounded, names_of, read_shape
from epd.api.openai.request import ChatRequest
from epd.api.prompts.prepare import Preparer
from epd.api.server import ApiServer
from epd.config import GatewayConfig, Limits
from epd.tiny import CHECKPOINT
from tests.api.fakes import FakeFrontend, FakePreparer, said, serving
from tests.api.openai.test_validation import INERT_VALUES
from tests.api.wire import exchange, request
from tests.patience import PATIENCE_S

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
)
NULL = {"type": "null"}
WITH_BODY = [operation for operation in OPERATIONS if operation.body]
HELLO = [said("h"), said("ello", "stop")]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The bundled model's tokenizer and template behind a real port, with answers that are made up;
    on a loop of its own, because the client of these tests blocks."""
    loop = asyncio.new_event_loop()
    config = GatewayConfig(port=0, model_dir=str(CHECKPOINT))
    server = ApiServer(FakeFrontend(HELLO), config, Preparer(config))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(30)
    yield f"http://127.0.0.1:{server.port}"
    asyncio.run_coroutine_threadsafe(server.close(), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def test_every_path_is_described_and_no_other():
    async with serving() as (server, _, preparer):
        told = document(preparer, Limits())["paths"]
        known = {path: set(methods) for path, methods in server._routes.items()}
        _, _, body = await exchange(server, request(method="GET", path="/openapi.json"))
        assert json.loads(body)["paths"] == told
    for path in ("/drain", "/role"):
        known.pop(path)  # as /reload, adapters and profiles: verbs of operators are docs/api.md's
    known["/v1/models/{id}"] = {"GET"}
    known["/ping"] -= {"POST"}
    assert {path: {m.upper() for m in methods} for path, methods in told.items()} == known


async def test_it_is_made_once_and_not_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may ask for it, as often as they like."""
    threads: list[threading.Thread] = []

    def made(*facts: Any) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return {"openapi": "3.1.0"}

    monkeypatch.setattr("epd.api.document.openapi.document", made)
    async with serving() as (server, _, _):
        for _ in range(3):
            answer = await exchange(server, request(method="GET", path="/openapi.json"))
            assert (answer[0], json.loads(answer[2])) == (200, {"openapi": "3.1.0"})
    assert len(threads) == 1 and threads[0] is not threading.main_thread()


@pytest.mark.parametrize("operation", WITH_BODY, ids=lambda operation: operation.path)
async def test_examples_can_be_sent_as_they_are(operation: Any):
    config = GatewayConfig(port=0, model_dir=str(CHECKPOINT))
    server = ApiServer(FakeFrontend(HELLO), config, Preparer(config))
    await server.start()
    told = document(server._preparer, config.limits)["paths"][operation.path]["post"]
    examples = told["requestBody"]["content"]["application/json"]["examples"]
    assert examples
    for example in examples.values():
        raw = request(example["value"], path=operation.path)
        status, _, body = await exchange(server, raw)
        assert status == 200, body
    await server.close()


async def test_every_name_has_a_schema():
    told = document(FakePreparer(), Limits())["components"]["schemas"]
    for name in ("ChatRequest", "CompletionRequest", "ResponseRequest", "MessageRequest"):
        properties = told[name]["properties"]
        blank = [key for key, value in properties.items() if value in ({}, {"anyOf": [{}, NULL]})]
        assert not blank, f"{name}: these have no type"


def edges(schema: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """What the schema allows at its bounds, and what it does not allow just beyond."""
    if "enum" in schema:
        return schema["enum"], ["none of these"]
    if "anyOf" in schema:
        both = [edges(one) for one in schema["anyOf"] if one != NULL]
        if len(both) == 1:
            return both[0]
        return [v for inside, _ in both for v in inside], [3]
    kind = schema["type"]
    if kind == "string" and "pattern" in schema:
        return ["x"], [" "]
    if kind == "string":
        low, high = schema.get("minLength", 0), schema.get("maxLength", 50)
        outside = ["x" * (low - 1)] if low else []
        outside += ["x" * (high + 1)] if "maxLength" in schema else []
        return ["x" * low, "x" * high], [*outside, 3]
    if kind == "array":
        (one, *_), (bad, *_) = edges(schema["items"])
        return [[one] * schema["maxItems"]], [[one] * (schema["maxItems"] + 1), [bad]]
    if kind in ("boolean", "object"):
        return ([True, False], [1]) if kind == "boolean" else ([{}, {"a": "b"}], [[]])
    step = 1 if kind == "integer" else 1e-3
    inside, outside = [], ["1", True]
    for name, by in (("minimum", -step), ("maximum", step)):
        if name in schema:
            inside.append(schema[name])
            outside.append(schema[name] + by)
    if "exclusiveMinimum" in schema:
        inside.append(schema["exclusiveMinimum"] + step)
        outside.append(schema["exclusiveMinimum"])
    return inside, outside


@pytest.mark.parametrize(
    "name", sorted({*names_of(Spoken), *INERT_VALUES} - {"logit_bias", "no_repeat_ngram"})
)
def test_a_parameter_is_what_its_schema_says(name: str):
    model, limits = FakePreparer(), Limits()
    told = document(model, limits)["components"]["schemas"]["ChatRequest"]["properties"]
    inside, outside = edges(told[name])
    assert inside and outside
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    shape = bounded(ChatRequest, facts_of(model, limits))
    for value in inside:
        read_shape({**body, name: value}, shape)
    for value in outside:
        with pytest.raises(ApiError) as caught:
            read_shape({**body, name: value}, shape)
        assert caught.value.param is not None and caught.value.param.startswith(name)


def test_no_body_breaks_the_server(url: str, monkeypatch: pytest.MonkeyPatch):
    """Bodies as the document allows them and as it does not; what comes back is as described."""
    sleep = asyncio.sleep  # rates may be asked over a minute
    monkeypatch.setattr(asyncio, "sleep", lambda delay_s: sleep(min(delay_s, 0.01)))
    api = schemathesis.openapi.from_url(f"{url}/openapi.json")
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=40,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=api.as_strategy())
    def ask(case: Any) -> None:
        statuses[case.call_and_validate(checks=CHECKS, timeout=PATIENCE_S).status_code] += 1

    ask()
    assert statuses[200] > 3 and statuses[400] > 3, statuses
