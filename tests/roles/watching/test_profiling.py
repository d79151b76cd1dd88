"""Profiling from outside: every instance of a cluster writes what it did."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from epd.api.prompts.prepare import Preparer
from epd.api.server import ApiServer
from epd.config import GatewayConfig
from epd.engine.base import EngineError
from epd.engine.device.profiling import TorchProfiler
from epd.engine.factory import build_executor, build_language, build_vision
from epd.roles.compose import Engines, Gateway
from epd.roles.watching import profiling
from epd.tiny import CHECKPOINT, SAMPLES
from tests.api.fakes import serving
from tests.api.wire import HI, Wire, request
from tests.e2e.client import data_url, question
from tests.patience import PATIENCE_S
from tests.roles.topologies.cluster import SMALL, Cluster

LAG_S = 0.05
ATTEMPTS = 3  # a machine may be slow for a moment
IMAGE = data_url((SAMPLES / "receipt-cafe.png").read_bytes())


class Stuck:
    """A profiler that fails to start, or is not there at all."""

    async def start(self) -> None:
        raise EngineError("it cannot")

    async def stop(self) -> str:
        raise OSError(28, "No space left on device")


async def post(server: ApiServer, raw: bytes) -> tuple[int, Any]:
    wire = await Wire.to(server)
    wire.writer.write(raw)
    status, _, body = await wire.answer()
    wire.drop()
    return status, json.loads(body)


def told(body: Any) -> dict[str, Any]:
    return {name: entry["detail"] for name, entry in body["instances"].items()}


async def test_each_instance_writes_a_trace(tmp_path: Path) -> None:
    cluster, executor = Cluster(), build_executor(SMALL)
    vision = build_vision(CHECKPOINT, SMALL, executor)
    language = build_language(CHECKPOINT, SMALL, executor)
    traces = tmp_path / "traces"  # is made when it is needed
    profiler = TorchProfiler(executor, str(traces), "epd0")
    roles = ("encode", "prefill", "decode")
    engines = Engines(vision=vision, language=language, profiler=profiler)
    cluster.add("epd0", roles, engines, engine=SMALL)
    config = GatewayConfig(model_dir=str(CHECKPOINT), port=0, profile_dir=str(traces))
    start, stop = (request(path=f"/{what}_profile") for what in ("start", "stop"))
    async with cluster.running() as gateway:
        server = ApiServer(gateway.role, config, Preparer(config))
        await server.start()
        assert await post(server, stop) == (
            500,
            {"instances": {"epd0": {"ok": False, "detail": await reason(profiler)}}},
        )
        for number in (1, 2):
            status, body = await post(server, start)
            assert (status, told(body)) == (200, {"epd0": "recording"})
            assert (await post(server, start))[0] == 500
            assert (await post(server, request(question("total?", IMAGE))))[0] == 200
            status, body = await post(server, stop)
            assert status == 200
            path = Path(told(body)["epd0"])
            assert path.parent == traces and path.name.endswith(f"-{number}.trace.json.gz")
            events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
            names = {event.get("name") for event in events}
            assert {"aten::embedding", "aten::addmm"} <= names or {"aten::mm"} <= names
        await cluster.settle()
        await server.close()


async def test_all_threads_are_seen(tmp_path: Path) -> None:
    executor = build_executor(SMALL)
    profiler = TorchProfiler(executor, str(tmp_path), "p0")
    await profiler.start()
    await executor.launch(torch.randn(3, 3).logdet)
    await executor.compute(torch.randn(3, 3).erfinv)
    events = json.loads(gzip.decompress(Path(await profiler.stop()).read_bytes()))["traceEvents"]
    threads = {e["name"]: e["tid"] for e in events if e.get("cat") == "cpu_op"}
    assert threads["aten::logdet"] != threads["aten::erfinv"]
    await executor.close()


def many_operations() -> None:
    tensor = torch.ones(4)
    for _ in range(10_000):
        tensor.add(1).mul(2)


async def test_the_loop_turns_while_a_trace_is_made(tmp_path: Path) -> None:
    """Whoever holds the interpreter meanwhile leaves no more than a turn or two."""
    executor = build_executor(SMALL)
    profiler = TorchProfiler(executor, str(tmp_path), "p0")
    for _ in range(ATTEMPTS):
        await profiler.start()
        await executor.launch(many_operations)
        stopping = asyncio.ensure_future(profiler.stop())
        began_s = last_s = time.perf_counter()
        held_s = 0.0
        while not stopping.done():
            await asyncio.sleep(0.001)
            now_s = time.perf_counter()
            held_s, last_s = held_s + max(0.0, now_s - last_s - LAG_S), now_s
        assert Path(await stopping).stat().st_size > 10_000
        if held_s < (last_s - began_s) / 4:
            break
    else:
        pytest.fail(f"the loop stood still for {held_s:.2f} of {last_s - began_s:.2f} s")
    await executor.close()


async def reason(profiler: TorchProfiler) -> str:
    with pytest.raises(EngineError) as caught:
        await profiler.stop()
    return str(caught.value)


@asynccontextmanager
async def joined(cluster: Cluster) -> AsyncIterator[Gateway]:
    """Running, if not complete: nobody encodes."""
    for part in (cluster.gateway, *cluster.instances.values()):
        part.start()
    async with asyncio.timeout(PATIENCE_S):
        while len(cluster.gateway.role.ready().instances) < len(cluster.instances):
            await asyncio.sleep(0.01)
    yield cluster.gateway
    for part in (*cluster.instances.values(), cluster.gateway):
        await part.close()


async def test_who_cannot_says_why_and_who_is_silent_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(profiling, "ANSWER_TIMEOUT_S", 0.2)
    cluster, executor = Cluster(), build_executor(SMALL)
    for name, profiler in (("pd0", Stuck()), ("pd1", None)):
        language = build_language(CHECKPOINT, SMALL, executor)
        engines = Engines(language=language, profiler=profiler)
        cluster.add(name, ("prefill", "decode"), engines, engine=SMALL)
    async with joined(cluster) as gateway:
        late = (False, "no answer within 0.2 s")
        assert await gateway.role.profile(starts=True) == {"pd0": (False, "it cannot"), "pd1": late}
        stopped = await gateway.role.profile(starts=False)
        assert stopped["pd0"][0] is False and "No space left" in stopped["pd0"][1]


async def test_a_recording_that_nobody_ends_is_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(profiling, "MAX_PROFILE_S", 0.1)
    cluster, executor = Cluster(), build_executor(SMALL)
    language = build_language(CHECKPOINT, SMALL, executor)
    profiler = TorchProfiler(executor, str(tmp_path), "pd0")
    engines = Engines(language=language, profiler=profiler)
    cluster.add("pd0", ("prefill", "decode"), engines, engine=SMALL)
    async with joined(cluster) as gateway:
        await gateway.role.profile(starts=True)
        while not list(tmp_path.glob("pd0-*.trace.json.gz")) or "nobody ended" not in caplog.text:
            await asyncio.sleep(0.01)
        assert (await gateway.role.profile(starts=False))["pd0"][0] is False


async def test_without_a_directory_there_are_no_such_paths() -> None:
    async with serving() as (server, _, _):
        assert (await post(server, request(HI, path="/start_profile")))[0] == 404
