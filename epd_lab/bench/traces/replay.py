"""A trace, open loop: each request when it is due, whatever the server does.

Bodies are made by threads, `AHEAD` of them before they are due: of an hour they would not fit in
memory.  How late the client itself is stands beside what it measures.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from epd_lab.bench.servers.figures import Slo, figures, percentile
from epd_lab.bench.servers.openai_load import Answerer, Sample, Server, connected
from epd_lab.bench.servers.serve import ServeProgress, Target
from epd_lab.bench.traces.form import BLOCK_TOKENS, Trace, TraceRequest
from epd_lab.bench.workload import Wording, chat_body, image_url

T = TypeVar("T")
AHEAD = 64
TIMEOUT_S = 600.0  # of a request
COUNTED, COUNT_TIMEOUT_S = "epd_encodes_total", 5.0  # heartbeats carry the count
TWO_BEATS_S = 1.5
SEED_STEP = 1 << 40  # between the numbers of pictures of two seeds
MOST_NUMBER = 1 << 63


async def replay(
    server: Answerer[T],
    trace: Trace,
    requests: AsyncIterator[T],
    done: Callable[[Sample], None],
    clock: Callable[[], float] = time.perf_counter,
) -> list[Sample]:
    """Samples in the order of the trace; times are since the first request was made."""
    tasks: list[asyncio.Task[Sample]] = []
    zero_s = 0.0

    async def one(request: T) -> Sample:
        sample = await server.ask(request, zero_s)
        done(sample)
        return sample

    async for request in requests:
        zero_s = zero_s or clock()
        due_s = zero_s + trace[len(tasks)].arrival_s
        await asyncio.sleep(max(0.0, due_s - clock()))
        tasks.append(asyncio.create_task(one(request)))
    return list(await asyncio.gather(*tasks))


async def against(
    target: Target, name: str, trace: Trace, seed: int
) -> tuple[list[Sample], dict[str, int]]:
    """A server; another seed has other texts and pictures.  Also pictures sent, those of them that
    differ, and how many it encoded, where it counts them.  Raises ServerError."""
    progress = ServeProgress(name, len(trace))
    async with target.up() as url, connected(url, TIMEOUT_S) as server:
        wording, before = await server.wording(), await _encoded(server)
        samples = await replay(server, trace, _bodies(trace, wording, seed), progress.done)
        pictures = [one for asked in trace for one in asked.pictures]
        if before is None or not pictures:
            return samples, {}
        found = {"sent": len(pictures), "distinct": len(set(pictures))}
        return samples, {**found, "encoded": await _settled(server, before, found["distinct"])}


async def _settled(server: Server, before: int, expected: int) -> int:
    """Encodes since `before`, when as many as expected are reported, and no more."""
    give_up_s = time.perf_counter() + COUNT_TIMEOUT_S
    while (  # noqa: ASYNC110 (the count lies behind HTTP)
        (await _encoded(server) or 0) - before < expected and time.perf_counter() < give_up_s
    ):
        await asyncio.sleep(0.1)
    await asyncio.sleep(TWO_BEATS_S)  # one encode too many would show
    return (await _encoded(server) or 0) - before


async def _encoded(server: Server) -> int | None:
    """Of all encoders, since they began."""
    lines = (await server.text("/metrics")).splitlines()
    counts = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(COUNTED)]
    return int(sum(counts)) if counts else None


async def _bodies(trace: Trace, wording: Wording, seed: int) -> AsyncIterator[bytes]:
    loop, waiting = asyncio.get_running_loop(), deque[asyncio.Future[bytes]]()
    with ThreadPoolExecutor() as pool:
        for index, asked in enumerate(trace):
            waiting.append(loop.run_in_executor(pool, body_of, asked, index, wording, seed))
            if len(waiting) > AHEAD:
                yield await waiting.popleft()
        while waiting:
            yield await waiting.popleft()


def body_of(asked: TraceRequest, index: int, wording: Wording, seed: int) -> bytes:
    """A chat completion as long as that."""
    blocks = [wording.text(BLOCK_TOKENS, f"block {seed} {block}") for block in asked.blocks]
    key = f"session {seed} {asked.session}" if asked.session else f"own {seed} {index}"
    urls = [
        image_url((one.width, one.height), (one.number + seed * SEED_STEP) % MOST_NUMBER)
        for one in asked.pictures
    ]
    text = wording.text(asked.own_tokens, key)
    return chat_body(text, urls, asked.tokens_out, before=" ".join(blocks))


def lateness_ms(trace: Trace, samples: Sequence[Sample]) -> tuple[float, float, float]:
    """By which the client sent: p50, p99, the most."""
    late = [1e3 * (s.sent_s - a.arrival_s) for a, s in zip(trace, samples, strict=True)]
    return percentile(late, 50), percentile(late, 99), percentile(late, 100)


def rows(
    name: str, server: str, trace: Trace, samples: Sequence[Sample], slos: Mapping[str, Slo]
) -> list[dict[str, Any]]:
    """As those of `epd bench serve`, one for each kind; `slos` by kind, "" of all others."""
    found = []
    for kind in dict.fromkeys(asked.kind for asked in trace):
        pairs = [(a, s) for a, s in zip(trace, samples, strict=True) if a.kind == kind]
        own, slo = [sample for _, sample in pairs], slos.get(kind, slos[""])
        late_s = [sample.sent_s - asked.arrival_s for asked, sample in pairs]
        good = sum(map(slo.kept_by, own)) / len(own)
        found.append(
            {
                "workload": name,
                "stream": kind,
                "server": server,
                "figures": figures(own, slo, late_s) | {"good_share": good},
                "errors": sorted({sample.error for sample in own if sample.error})[:5],
            }
        )
    return found
