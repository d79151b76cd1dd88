"""`epd bench reuse`: images seen before, over each transport: how many encodes, and the TTFT.

The workload of the published report on a mooncake connector for encoder caches: 400 text tokens and
three images of 560 x 560, of which a share was sent before.  A topology of the bundled model is
started per transport, and each share gets images of its own.  Every image has to be encoded
once in the cluster, however often and however close together it is sent; any other number fails.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from epd.cli.start.plan import StartPlan as ClusterPlan
from epd.cli.start.supervisor import running
from epd_lab.bench.machine import describe, sentence
from epd_lab.bench.servers.figures import SHARES, percentile
from epd_lab.bench.servers.openai_load import Sample, Server, connected, send_all
from epd_lab.bench.workload import Closed, Shape, Stream, Wording, Workload, bodies, image_numbers

OUTPUT_TOKENS = 8
COUNTED = "epd_encodes_total"
COUNT_TIMEOUT_S = 5.0  # heartbeats carry the count


@dataclass(frozen=True, slots=True)
class ReusePlan:
    """What to measure; `cluster`: a topology that moves rows over this transport."""

    transports: tuple[str, ...]
    cluster: Callable[[str, str], ClusterPlan]  # transport and a directory for it
    requests: int = 100
    concurrency: int = 2
    shares: tuple[float, ...] = (0.0, 0.5, 0.9)
    request_timeout_s: float = 120.0


@dataclass(frozen=True, slots=True)
class ReuseRow:
    """One cell of the table."""

    transport: str
    reuse: float
    images: int
    distinct: int
    encodes: int
    ttft_ms: dict[str, float]
    failed: int
    errors: tuple[str, ...] = ()  # some of them

    @property
    def holds(self) -> bool:
        """Each image was encoded exactly once, and every request was answered."""
        return self.encodes == self.distinct and not self.failed


async def measure(plan: ReusePlan) -> list[ReuseRow]:
    rows = []
    for transport in plan.transports:
        with tempfile.TemporaryDirectory(prefix="epd-bench-") as directory:
            cluster = plan.cluster(transport, directory)
            assert cluster.gateway is not None
            url = f"http://{cluster.gateway.host}:{cluster.gateway.port}"
            async with running(cluster), connected(url, plan.request_timeout_s) as server:
                wording = await server.wording()
                await _one(server, wording, plan, transport, -1, 0.0, warm_up=True)
                for turn, share in enumerate(plan.shares):
                    rows.append(await _one(server, wording, plan, transport, turn, share))
                    print(_line(rows[-1]), file=sys.stderr, flush=True)
    return rows


async def _one(
    server: Server,
    wording: Wording,
    plan: ReusePlan,
    transport: str,
    turn: int,
    share: float,
    *,
    warm_up: bool = False,
) -> ReuseRow:
    """One share; `turn` makes its images unlike those of the others."""
    count = 4 if warm_up else plan.requests
    shape = Shape(400, OUTPUT_TOKENS, images=3, repeated=share)
    stream = Stream("reuse", shape, Closed(plan.concurrency), count)
    workload = Workload("reuse", (stream,))
    requests = await asyncio.to_thread(bodies, workload, stream, wording, turn + 1, lambda n: None)
    numbers = [number for wanted in image_numbers(stream, turn + 1) for number in wanted]
    before = await _encodes(server)
    samples = await send_all(
        server, requests, stream.arrival, time.perf_counter(), lambda sample: None
    )
    distinct = len(set(numbers))
    encodes = await _settled(server, before, distinct)
    return ReuseRow(
        transport, share, len(numbers), distinct, encodes, _ttft_ms(samples),
        sum(bool(sample.error) for sample in samples),
        tuple(sorted({sample.error for sample in samples if sample.error})[:5]),
    )  # fmt: skip


async def _settled(server: Server, before: int, expected: int) -> int:
    """Encodes since `before`, when heartbeats have reported as many as expected, and no more."""
    give_up_s = time.perf_counter() + COUNT_TIMEOUT_S
    while (  # noqa: ASYNC110 (the count lies behind HTTP)
        await _encodes(server) - before < expected and time.perf_counter() < give_up_s
    ):
        await asyncio.sleep(0.1)
    await asyncio.sleep(1.5)  # two heartbeats: one encode too many would show
    return await _encodes(server) - before


async def _encodes(server: Server) -> int:
    """Of all encoders, since they began."""
    lines = (await server.text("/metrics")).splitlines()
    return int(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(COUNTED)))


def _ttft_ms(samples: Sequence[Sample]) -> dict[str, float]:
    found = [sample.ttft_s * 1e3 for sample in samples if not sample.error]
    return {f"p{share}": round(percentile(found, share), 1) for share in SHARES if found}


def table(rows: Sequence[ReuseRow]) -> str:
    """Markdown, TTFT in milliseconds."""
    head = [
        "| Transport | Reused | Images | Distinct | Encodes | TTFT p50 | p90 | p99 | Failed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *map(_line, rows)])


def _line(row: ReuseRow) -> str:
    times = " | ".join(f"{row.ttft_ms.get(name, 0):.0f}" for name in ("p50", "p90", "p99"))
    return (
        f"| {row.transport} | {row.reuse:.0%} | {row.images} | {row.distinct} | {row.encodes} | "
        f"{times} | {row.failed} |"
    )


def run(plan: ReusePlan, *, as_json: bool, save: Path | None) -> int:
    """Measure and print; 1 if an image was not encoded exactly once."""
    machine = describe()
    rows = asyncio.run(measure(plan))
    found: dict[str, Any] = {"machine": machine, "rows": [asdict(row) for row in rows]}
    if save is not None:
        save.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found) if as_json else f"{table(rows)}\n\n{sentence(machine)}")
    wrong = [row for row in rows if not row.holds]
    for row in wrong:
        said = "; ".join(row.errors) or "not one encode per image"
        print(f"{_line(row)} {said}", file=sys.stderr)
    return 1 if wrong else 0
