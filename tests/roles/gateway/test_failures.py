"""Requests that fail: the client gets a sentence, the operator a line with the reason."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from epd.api.prompts.prepare import Preparer
from epd.api.server import ApiServer
from epd.config import GatewayConfig
from epd.engine.factory import build_executor, build_language, build_vision
from epd.failure import Failure, FailureKind
from epd.frontend import TimeLimits
from epd.fsm.generation import Generation
from epd.roles.compose import Engines
from epd.roles.gateway.failures import MAX_LINES_PER_S, FailureLog, error_of
from epd.runtime.logs import JsonFormatter, TextFormatter
from epd.tiny import CHECKPOINT, SAMPLES
from tests.api.wire import Wire, request
from tests.e2e.client import data_url, question
from tests.roles.topologies.cluster import SMALL, Cluster

PATH = "/srv/epd/private/weights.py"
IMAGE = data_url((SAMPLES / "receipt-cafe.png").read_bytes())


def broken(*_: Any, **__: Any) -> Any:
    raise OSError(f"{PATH} line 7")


class Broken:
    """A library whose every function fails."""

    def __getattr__(self, name: str) -> Any:
        return broken


Plant = Callable[[pytest.MonkeyPatch, Preparer, Cluster], None]
STAGES: dict[str, tuple[Plant, int, str]] = {
    "preparation": (lambda patch, p, c: patch.setattr(p, "chat", broken), 500, "failed"),
    "template": (
        lambda patch, p, c: patch.setattr("jinja2.Template.render", broken),
        400,
        "rejected",
    ),
    "header": (
        lambda patch, p, c: patch.setattr("epd.media_files.image_opening.load_pillow", Broken),
        400,
        "rejected",
    ),
    "pixels": (
        lambda patch, p, c: patch.setattr("PIL.ImageFile.ImageFile.load", broken),
        400,
        "rejected",
    ),
    "image's thread": (
        lambda patch, p, c: patch.setattr(vision(c), "preprocess", broken),
        500,
        "failed",
    ),
    "vision tower": (lambda patch, p, c: patch.setattr(vision(c), "encode", broken), 500, "failed"),
    "prefill": (lambda patch, p, c: patch.setattr(steps(c, "p0"), "step", broken), 500, "failed"),
    "decode": (lambda patch, p, c: patch.setattr(steps(c, "d0"), "step", broken), 500, "failed"),
    "rows": (lambda patch, p, c: patch.setattr(writer(c, "e0"), "write", broken), 503, "failed"),
    "KV": (lambda patch, p, c: patch.setattr(writer(c, "p0"), "write", broken), 503, "failed"),
}


def vision(cluster: Cluster) -> Any:
    return cluster.engines["e0"].vision


def steps(cluster: Cluster, name: str) -> Any:
    return cluster.engines[name].language


def writer(cluster: Cluster, name: str) -> Any:
    return cluster.instances[name].actor.ports.transfers


def cluster() -> Cluster:
    made = Cluster()
    executor = build_executor(SMALL)
    made.add("e0", ("encode",), Engines(vision=build_vision(CHECKPOINT, SMALL, executor)))
    for name, role in (("p0", "prefill"), ("d0", "decode")):
        language = build_language(CHECKPOINT, SMALL, executor)
        made.add(name, (role,), Engines(language=language), engine=SMALL)
    return made


@pytest.mark.parametrize("stage", STAGES)
async def test_no_error_tells_what_a_library_said(
    stage: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plant, status, outcome = STAGES[stage]
    config = GatewayConfig(model_dir=str(CHECKPOINT), port=0)
    preparer, made = Preparer(config), cluster()
    async with made.running() as gateway:
        server = ApiServer(gateway.role, config, preparer)
        await server.start()
        plant(monkeypatch, preparer, made)
        wire = await Wire.to(server)
        wire.writer.write(request(question("total?", IMAGE), x_request_id="mine-7"))
        answered, headers, body = await wire.answer()
        wire.drop()
        await made.settle()
        await server.close()
    assert answered == status, body
    assert "private" not in body.decode() and "OSError" not in body.decode(), body
    assert gateway.role.outcomes == {outcome: 1}
    lines = [r for r in caplog.records if r.getMessage() == "request failed"]
    assert len(lines) == (status >= 500)
    if lines:
        check_line(lines[0], headers["x-request-id"])


def check_line(record: logging.LogRecord, request_id: str) -> None:
    """Both forms name the request, as both sides do, and have the reason, in one line."""
    text = TextFormatter("gateway").format(record)
    assert "\n" not in text and PATH in text
    assert " request=gateway-" in text and f" client_request={request_id}" in text
    line = json.loads(JsonFormatter("gateway").format(record))
    assert line["client_request"] == request_id and PATH in line["reason"] + line.get("after", "")
    assert set(line) >= {"kind", "attempts", "instances", "output_tokens"}


class Actor:
    """Time and a log."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self.timers = SimpleNamespace(
            will_call=self.calls.__contains__,
            call_later=lambda delay_s, callback: self.calls.append(callback),
        )
        self.lines: list[tuple[str, dict[str, Any]]] = []
        self.log = SimpleNamespace(warning=lambda text, **f: self.lines.append((text, f)))

    def let_pass(self) -> None:
        while self.calls:
            self.calls.pop()()


def failure(kind: str = "engine", reason: str = "because") -> Generation:
    limits, stream = TimeLimits(1.0, 1.0, 1.0), SimpleNamespace(client_request_id="")
    made = Generation("g-1", 2, limits, stream)
    made.failure = Failure(FailureKind(kind), reason)
    return made


def test_when_all_fail_at_once_the_log_says_so_and_is_not_drowned() -> None:
    actor = Actor()
    log = FailureLog(actor)  # type: ignore[arg-type]
    for _ in range(MAX_LINES_PER_S + 7):
        log.tell(failure())
    assert len(actor.lines) == MAX_LINES_PER_S
    actor.let_pass()
    assert actor.lines[-1] == ("more requests failed", {"count": 7})
    assert not actor.calls
    log.tell(failure())
    assert actor.lines[-1][0] == "request failed"
    actor.let_pass()
    assert len(actor.lines) == MAX_LINES_PER_S + 2


@pytest.mark.parametrize(
    ("kind", "status", "is_told"),
    [
        ("media", 400, True),
        ("capacity", 400, True),
        ("deadline", 504, True),
        ("lost", 503, True),
        ("unavailable", 503, True),
        ("busy", 503, True),
        ("away", 503, True),
        ("transfer", 503, False),
        ("contract", 500, False),
        ("engine", 500, False),
        ("internal", 500, False),
    ],
)
def test_only_sentences_of_ours_are_told(kind: str, status: int, *, is_told: bool) -> None:
    error = error_of(failure(kind, PATH))
    assert (error.kind, error.status, PATH in error.message) == (kind, status, is_told)
    assert is_told or "log" in error.message
