"""`epd bench gateway`: what the gateway, the bus and the roles cost without a model.

One gateway process on one core, one worker process of all three roles with null engines on another,
and a load generator that shares the worker's core.  Both sides of every ratio run in one process
run: added latency is the full path against an echo by the same server, one request at a time.
A burst is many different images of 1920x1080 at once, and beside it somebody who asks short
questions, one after the other.  Medians of several repeats.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from epd.cli.start.ports import any_free
from epd.config import (
    DecodeConfig,
    EncodeConfig,
    GatewayConfig,
    InstanceConfig,
    Limits,
    PrefillConfig,
)
from epd.tiny import CHECKPOINT
from epd_lab.bench.gateway.image import noise_png
from epd_lab.bench.gateway.load import ConstantLoad, LoadResult, post
from epd_lab.bench.gateway.process import Spec
from epd_lab.bench.workload import FULL_HD, image_url

HOST = "127.0.0.1"
PATH = "/v1/chat/completions"
START_TIMEOUT_S = 30.0
STREAM_TOKENS = 512


@dataclass(frozen=True, slots=True)
class GatewayPlan:
    """How much load, and how often."""

    repeats: int = 3
    text_requests: int = 4000
    image_requests: int = 800
    streams: int = 128
    latency_requests: int = 500
    concurrency: int = 64
    burst: int = 64  # images


@dataclass(slots=True)
class GatewayPair:
    """A running pair of processes."""

    port: int
    echo_port: int
    endings: list[dict[str, Any]]


@asynccontextmanager
async def running(*, time_machines: bool) -> AsyncIterator[GatewayPair]:
    """The two processes, serving; what they used is in `endings` afterwards."""
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="epd-bench-") as directory:
        os.chmod(directory, 0o700)
        cluster = GatewayPair(any_free(HOST), any_free(HOST), [])
        gateway_endpoint = f"ipc://{directory}/gateway.sock"
        gateway = Spec(
            cores[0],
            gateway=GatewayConfig(
                model_dir=str(CHECKPOINT),
                host=HOST,
                port=cluster.port,
                endpoint=gateway_endpoint,
                limits=Limits(max_open_requests=4096),
            ),
            echo_port=cluster.echo_port,
            time_machines=time_machines,
        )
        worker = Spec(
            cores[-1],
            instance=InstanceConfig(
                instance_id="null",
                roles=("encode", "prefill", "decode"),
                model_dir=str(CHECKPOINT),
                gateway_endpoint=gateway_endpoint,
                endpoint=f"ipc://{directory}/null.sock",
                encode=EncodeConfig(max_queue=4096),
                prefill=PrefillConfig(max_queue=4096),
                decode=DecodeConfig(max_queue=4096),
            ),
            time_machines=time_machines,
        )
        processes = [await _start(spec) for spec in (gateway, worker)]
        try:
            await asyncio.wait_for(_until_serving(processes[0]), START_TIMEOUT_S)
            yield cluster
        finally:
            for process in reversed(processes):
                process.terminate()
                output, _ = await process.communicate()
                lines = [json.loads(line) for line in output.splitlines()]
                cluster.endings[:0] = [line for line in lines if line["state"] == "ended"]


async def _start(spec: Spec) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "epd_lab.bench.gateway.process",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(spec) + b"\n")
    return process


async def _until_serving(process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None
    while line := await process.stdout.readline():
        if json.loads(line)["state"] == "serving":
            return
    raise RuntimeError("the gateway of the benchmark did not start; see its message above")


# --- requests -------------------------------------------------------------------------------------


def text_request(port: int, max_tokens: int, *, stream: bool = False) -> bytes:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Repeat: hello"}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }
    return post(PATH, f"{HOST}:{port}", json.dumps(body).encode())


def image_request(port: int, url: str) -> bytes:
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What does the image say?"},
    ]
    body = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 1,
        "temperature": 0,
        "ignore_eos": True,
    }
    return post(PATH, f"{HOST}:{port}", json.dumps(body).encode())


async def burst(port: int, requests: Sequence[bytes]) -> tuple[list[float], LoadResult]:
    """Milliseconds until each of `requests`, sent at once, was answered, and what somebody saw who
    asked beside them."""
    over = asyncio.Event()

    async def ask() -> LoadResult:
        one, seen = text_request(port, 1), LoadResult()
        while not over.is_set():
            seen.latencies_s += (await _load(port, one, 1, 1)).latencies_s
        return seen

    asking = asyncio.create_task(ask())
    answered = await asyncio.gather(*(_load(port, request, 1, 1) for request in requests))
    over.set()
    return sorted(1e3 * result.latencies_s[0] for result in answered), await asking


async def _load(port: int, request: bytes, total: int, concurrency: int) -> LoadResult:
    result = await ConstantLoad(HOST, port, request, total, concurrency).run()
    if result.failures:
        raise RuntimeError(f"{result.failures} of {total} benchmark requests failed")
    return result


# --- the benchmark --------------------------------------------------------------------------------


async def measure(plan: GatewayPlan, progress: Callable[[str], None]) -> dict[str, Any]:
    """All figures, by the names of docs/architecture.md section 9."""
    rounds: list[dict[str, float]] = []
    async with running(time_machines=False) as cluster:
        await _load(cluster.port, text_request(cluster.port, 1), 200, 8)  # warm
        for number in range(plan.repeats):
            progress(f"round {number + 1} of {plan.repeats}")
            rounds.append(await _round(cluster, plan, number))
    progress("share of the state machines")
    async with running(time_machines=True) as timed:
        await _load(timed.port, text_request(timed.port, 16), plan.text_requests // 4, 64)
    gateway, worker = timed.endings
    middle = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    return {
        "req_per_s": {
            "text": round(middle["text"], 1),
            "image_200kb": round(middle["image"], 1),
            "echo": round(middle["echo"], 1),
        },
        "stream_tokens_per_s": round(middle["tokens"], 1),
        "added_latency_ms": {
            "p50": round(middle["full_p50"] - middle["echo_p50"], 3),
            "p99": round(middle["full_p99"] - middle["echo_p99"], 3),
        },
        "burst_ms": {name: round(middle[f"burst_{name}"], 1) for name in ("first", "p50", "last")},
        "beside_burst_ms": {name: round(middle[f"beside_{name}"], 1) for name in ("p50", "p99")},
        "fsm_cpu_share": round(gateway["fire_s"] / gateway["cpu_s"], 4),
        "fsm_cpu_share_worker": round(worker["fire_s"] / worker["cpu_s"], 4),
        "repeats": plan.repeats,
        "cores": len(os.sched_getaffinity(0)),
    }


async def _round(cluster: GatewayPair, plan: GatewayPlan, number: int) -> dict[str, float]:
    """Each kind of load once, the echo between them, so that drift hits all alike."""
    port, echo_port = cluster.port, cluster.echo_port
    one = text_request(port, 1)
    echo = await _load(echo_port, one, plan.text_requests, plan.concurrency)
    text = await _load(port, one, plan.text_requests, plan.concurrency)
    png = "data:image/png;base64," + base64.b64encode(noise_png()).decode()
    image = await _load(port, image_request(port, png), plan.image_requests, 16)
    streams = await _load(
        port, text_request(port, STREAM_TOKENS, stream=True), plan.streams, plan.concurrency
    )
    alone_echo = await _load(echo_port, one, plan.latency_requests, 1)
    alone = await _load(port, one, plan.latency_requests, 1)
    images = [image_url(FULL_HD, number * plan.burst + i) for i in range(plan.burst)]
    in_burst, beside = await burst(port, [image_request(port, url) for url in images])
    return {
        "echo": echo.per_s,
        "text": text.per_s,
        "image": image.per_s,
        "tokens": plan.streams * STREAM_TOKENS / streams.elapsed_s,
        "echo_p50": alone_echo.percentile_ms(0.5),
        "echo_p99": alone_echo.percentile_ms(0.99),
        "full_p50": alone.percentile_ms(0.5),
        "full_p99": alone.percentile_ms(0.99),
        "burst_first": in_burst[0],
        "burst_p50": statistics.median(in_burst),
        "burst_last": in_burst[-1],
        "beside_p50": beside.percentile_ms(0.5),
        "beside_p99": beside.percentile_ms(0.99),
    }


def table(figures: dict[str, Any]) -> str:
    """For people."""
    rate, added = figures["req_per_s"], figures["added_latency_ms"]
    burst, beside = figures["burst_ms"], figures["beside_burst_ms"]
    rows = [
        ("echo by the same server", f"{rate['echo']:10.0f} req/s"),
        ("text, one token", f"{rate['text']:10.0f} req/s"),
        ("a 200 KB image, one token", f"{rate['image_200kb']:10.0f} req/s"),
        ("streamed tokens", f"{figures['stream_tokens_per_s']:10.0f} tokens/s"),
        ("added latency, p50", f"{added['p50']:10.3f} ms"),
        ("added latency, p99", f"{added['p99']:10.3f} ms"),
        ("images of 1080p at once: first", f"{burst['first']:10.0f} ms"),
        ("  half of them; the last", f"{burst['p50']:10.0f} ms {burst['last']:.0f} ms"),
        ("text beside them, p50", f"{beside['p50']:10.1f} ms"),
        ("text beside them, p99", f"{beside['p99']:10.1f} ms"),
        ("state machines, gateway", f"{100 * figures['fsm_cpu_share']:10.1f} % of its CPU"),
        ("state machines, worker", f"{100 * figures['fsm_cpu_share_worker']:10.1f} % of its CPU"),
    ]
    return "\n".join(f"{name:30}{value}" for name, value in rows)


def run(plan: GatewayPlan, *, as_json: bool) -> int:
    def progress(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    figures = asyncio.run(measure(plan, progress))
    print(json.dumps(figures) if as_json else table(figures))
    return 0
