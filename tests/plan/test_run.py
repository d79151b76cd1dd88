"""A plan runs the roles on virtual time: the same twice, and by the cost file."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from epd.engine.base import StepSequence
from epd.scheduling import slice_cost
from epd_lab.bench.workload import NAMED, Bursts, Closed, Shape, Stream, Workload
from epd_lab.plan.costs import BUNDLED, read
from epd_lab.plan.device import CallPart
from epd_lab.plan.engines import PlannedLanguage
from epd_lab.plan.run import ForecastPlan, gpu_settings, run

COSTS = read(BUNDLED)
SETTINGS = gpu_settings()
TINY = Workload("tiny", (Stream("tiny", Shape(64, 8, 2), Closed(2), 6),))


def predict(topology: str, workload: Workload = TINY, **changes: Any) -> list[dict[str, Any]]:
    return run(replace(ForecastPlan(COSTS, topology, workload, SETTINGS), **changes))


@pytest.mark.parametrize("topology", ["1epd", "1e1pd", "1ep1d", "1ep1ed", "1e1p1d"])
def test_all_is_answered_and_the_same_twice(topology: str) -> None:
    first, again = predict(topology), predict(topology)
    assert first == again
    (row,) = first
    assert not row["errors"]
    assert row["figures"]["requests"] == 6
    assert row["figures"]["failed"] == 0
    assert row["figures"]["prompt_tokens"] == 64 + 5 + 2 * 324


def test_one_user_waits_for_the_parts_of_the_cost_file() -> None:
    """An image is decoded, encoded, then the prompt is computed; each further token is a step."""
    stream = Stream("one", Shape(64, 8, 1, (1920, 1080)), Closed(1), 3)
    (row,) = predict("1epd", Workload("one", (stream,)))
    told = row["figures"]
    tower_ms = 1e3 * COSTS.tower_s([8160])
    prompt_ms = 1e3 * COSTS.step_s(2109, 0, 2109**2 / 2, mixed=False)
    host = COSTS.host
    pixel_ns = host.pixel_ns + host.gateway_pixel_ns + host.way_pixel_ns
    host_ms = host.request_ms + 8160 * 256 * pixel_ns / 1e6
    alone_ms = host_ms + tower_ms + prompt_ms
    assert alone_ms < told["ttft_ms_p50"] < 1.1 * alone_ms
    step_ms = 1e3 * COSTS.step_s(1, 2109, 0, mixed=False)
    assert told["itl_ms_p50"] == pytest.approx(step_ms, rel=0.05)


@pytest.mark.parametrize(("decodes", "tokens", "captured"), [
    (0, 4096, True), (0, 4097, False), (1, 2047, True), (1, 2048, False), (3000, 0, True),
])  # fmt: skip
def test_a_step_is_captured_as_far_as_its_engine_captures(
    decodes: int, tokens: int, captured: bool
) -> None:
    """With decodes beside prompts less far; decodes alone always."""
    launched: list[CallPart] = []
    device: Any = SimpleNamespace(launch=lambda pieces, **_: launched.extend(pieces))
    language = PlannedLanguage(COSTS, device, SETTINGS.engine, kv_in_place=False)
    batch = [StepSequence(str(n), (7,), 9, (), None) for n in range(decodes)]
    batch += [StepSequence("prompt", range(tokens), 0, (), None)] * bool(tokens)
    language.step(batch)
    (piece,) = launched
    assert piece.at_once == captured
    assert piece.host_s == COSTS.step.launch.host_s(captured=captured)


def test_a_slower_hop_is_waited_for() -> None:
    fast, slow = (predict("1ep1d", transport=name)[0]["figures"] for name in ("cuda", "shm"))
    assert slow["ttft_ms_p50"] > fast["ttft_ms_p50"] + 4, "decode tells the first token"


def test_quanta_bound_what_images_cost_streams() -> None:
    streams = (
        Stream("chat", Shape(64, 64), Closed(4), 8),
        Stream("burst", Shape(64, 4, 4, (1920, 1080)), Bursts(2, 1.0), 4),
    )
    workload = Workload("both", streams)
    cut = predict("1epd", workload)[0]["figures"]["itl_ms_p99"]
    whole = predict("1epd", workload, settings=gpu_settings(["engine.max_quantum_ms=0"]))
    assert cut < 0.5 * whole[0]["figures"]["itl_ms_p99"]


def test_quanta_are_kept_from_the_first_prompt_on() -> None:
    """Rows come from elsewhere, so that a prompt is always there and no step has decodes alone."""
    (stream,) = NAMED["4x1080p"].streams
    start = Workload("start", (replace(stream, count=16),))
    assert predict("2e1pd", start)[0]["figures"]["itl_ms_p99"] < 30


@pytest.mark.long
def test_streams_are_as_even_as_is_asked_for() -> None:
    """Also in steps that are no longer than a GPU's quantum allows anyway."""
    (stream,) = NAMED["text"].streams
    text = Workload("text", (replace(stream, count=96),))
    even = predict("1epd", text, settings=gpu_settings(["engine.max_itl_impact=2"]))[0]["figures"]
    usual = predict("1epd", text)[0]["figures"]
    assert even["itl_ms_p99"] < 0.7 * usual["itl_ms_p99"]
    assert even["req_per_s"] > 0.5 * usual["req_per_s"]


@pytest.mark.long
def test_replicas_keep_their_images() -> None:
    """Four of them; a third of all images went elsewhere once, for 3% of the requests."""
    (stream,) = NAMED["1x1080p"].streams
    busy = Workload("busy", (replace(stream, arrival=Closed(64), count=192),))
    auto, fixed = (
        predict("4epd", busy, settings=gpu_settings([f"placement={rule}"]))[0]["figures"]
        for rule in ("auto", "fixed")
    )
    assert auto["req_per_s"] > 0.99 * fixed["req_per_s"]


@pytest.mark.long
def test_streams_leave_who_computes_prompts_and_images() -> None:
    """Of `1epd1d`, too; where a step alone was counted, the decode instance was half idle."""
    chat = Stream("chat", Shape(512, 128), Closed(24), 60)
    heavy = Stream("images", Shape(64, 16, 2, (1920, 1080)), Closed(6), 24)
    both = Workload("both", (chat, heavy))
    auto, fixed = (
        predict("1epd1d", both, settings=gpu_settings([f"placement={rule}"]))
        for rule in ("auto", "fixed")
    )
    for ours, theirs in zip(auto, fixed, strict=True):
        assert ours["figures"]["req_per_s"] > 0.95 * theirs["figures"]["req_per_s"]


def test_repeated_images_are_encoded_once() -> None:
    (new,), (again,) = (
        predict("1epd", Workload(name, (Stream(name, shape, Closed(4), 16),)))
        for name, shape in (
            ("new", Shape(16, 2, 1, (1920, 1080))),
            ("again", Shape(16, 2, 1, (1920, 1080), repeated=0.9)),
        )
    )
    assert again["figures"]["req_per_s"] > 1.2 * new["figures"]["req_per_s"]


def test_what_the_gateway_refuses_is_told() -> None:
    settings = gpu_settings(["limits.max_open_requests=1"])
    (row,) = predict("1epd", settings=settings)
    assert row["figures"]["failed"] > 0
    assert row["errors"]


def test_images_have_a_share_where_steps_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model whose steps take twelve times as long; a slice of a quantum after each had images
    wait for three steps."""
    (stream,) = NAMED["1x1080p"].streams
    some = Workload("some", (replace(stream, arrival=Closed(8), count=24),))
    step = msgspec.structs.replace(
        COSTS.step, tokens_ms=tuple((size, 12 * ms) for size, ms in COSTS.step.tokens_ms)
    )
    large = msgspec.structs.replace(COSTS, step=step)
    shared = predict("1epd", some, costs=large)[0]["figures"]
    monkeypatch.setattr(slice_cost, "SHARE", 0.0)
    one_each = predict("1epd", some, costs=large)[0]["figures"]
    assert shared["ttft_ms_p50"] < 0.9 * one_each["ttft_ms_p50"]
    assert shared["itl_ms_p99"] < 1.25 * one_each["itl_ms_p99"]
