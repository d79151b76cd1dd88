"""`epd bench isolation`: what bursts of images cost people who only read text.

Sixteen users stream text all the time, and a short text request is sent now and then; in every
second phase bursts of requests with four images each come on top.  What counts is how much
longer the gaps between tokens (p99 of ITL) and the first tokens of text (TTFT) become.  Phases
with and without bursts alternate within one run of one cluster, each pair gives its own ratio, and
the median of the ratios is told: a machine that slows down in between slows both.

Stages can only be isolated where they do not share cores: each instance is bound to its own CPUs if
there are enough of them, and the table says so if there are not.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from zlib import crc32

from epd.cli.start.plan import Plan as ClusterPlan
from epd.cli.start.supervisor import running
from epd_lab.bench.openai_load import Sample, Server, connected
from epd_lab.bench.serve_figures import percentile
from epd_lab.bench.workload import Closed, Shape, Stream, Wording, Workload, bodies, chat_body

REQUEST_TIMEOUT_S = 120.0
ANSWER = Shape(64, 256)
PROBE = Shape(64, 2)
BURST = Shape(32, 8, images=4, size=(256, 256))
LAST_ANSWERS_S = 3.0  # bursts go on while the users read their last answers


@dataclass(frozen=True, slots=True)
class Load:
    """Who asks for what."""

    users: int = 16
    answer: Shape = ANSWER
    probe: Shape = PROBE
    probe_every_s: float = 0.15
    burst: Shape = BURST
    burst_size: int = 2
    burst_every_s: float = 1.0
    phase_s: float = 6.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure; `cluster` plans a topology anew for each start."""

    topologies: tuple[str, ...]
    cluster: Callable[[str], ClusterPlan]
    repeats: int = 3
    load: Load = Load()


@dataclass(slots=True)
class Phase:
    """What was seen in one phase."""

    users: list[Sample] = field(default_factory=list)
    probes: list[Sample] = field(default_factory=list)
    bursts: list[Sample] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """Milliseconds, and counts."""
        gaps = [gap for sample in self.users if not sample.error for gap in sample.gaps_s]
        first = [sample.ttft_s for sample in self.probes if not sample.error]
        images = [sample.ttft_s for sample in self.bursts if not sample.error]
        return {
            "itl_ms_p50": 1e3 * percentile(gaps, 50),
            "itl_ms_p99": 1e3 * percentile(gaps, 99),
            "ttft_ms_p50": 1e3 * percentile(first, 50),
            "ttft_ms_mean": 1e3 * statistics.fmean(first) if first else 0.0,
            "ttft_ms_p99": 1e3 * percentile(first, 99),
            "burst_ttft_ms_p50": 1e3 * percentile(images, 50),
            "gaps": len(gaps),
            "texts": len(first),
            "burst_requests": len(images),
        }

    @property
    def errors(self) -> list[str]:
        return [s.error for s in (*self.users, *self.probes, *self.bursts) if s.error]


RATIOS = ("itl_ms_p50", "itl_ms_p99", "ttft_ms_p50", "ttft_ms_mean", "ttft_ms_p99")


@dataclass(frozen=True, slots=True)
class Row:
    """One topology: medians over the repeats."""

    topology: str
    cpus: tuple[str, ...]  # of each instance; empty: shared
    alone: dict[str, float]
    beside: dict[str, float]
    ratios: dict[str, float]
    repeats: int
    errors: tuple[str, ...] = ()


async def measure(plan: Plan) -> list[Row]:
    rows = []
    for topology in plan.topologies:
        cluster = plan.cluster(topology)
        assert cluster.gateway is not None
        url = f"http://{cluster.gateway.host}:{cluster.gateway.port}"
        async with running(cluster), connected(url, REQUEST_TIMEOUT_S) as server:
            found = await _measure_one(server, topology, plan)
        cpus = tuple(instance.engine.cpu_affinity for instance in cluster.instances)
        rows.append(_row(topology, cpus if all(cpus) else (), found))
        print(_line(rows[-1]), file=sys.stderr, flush=True)
    return rows


async def _measure_one(server: Server, topology: str, plan: Plan) -> list[tuple[Phase, Phase]]:
    """Pairs of phases, without bursts and with them."""
    wording = await server.wording()
    warm_up = Load(phase_s=1.0, burst_every_s=0.5)
    await _phase(server, wording, warm_up, f"{topology} warm-up", with_bursts=True)
    pairs = []
    for repeat in range(plan.repeats):
        phases = []
        for with_bursts in (False, True):
            name = f"{topology} {repeat + 1}/{plan.repeats} {'bursts' if with_bursts else 'alone'}"
            phase = await _phase(server, wording, plan.load, name, with_bursts=with_bursts)
            phases.append(phase)
            seen = phase.figures()
            print(
                f"{name}: ITL p99 {seen['itl_ms_p99']:.1f} ms, text's TTFT p50 "
                f"{seen['ttft_ms_p50']:.1f} ms, {len(phase.errors)} failed",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        pairs.append((phases[0], phases[1]))
    return pairs


async def _phase(
    server: Server, wording: Wording, load: Load, name: str, *, with_bursts: bool
) -> Phase:
    """Users, probes, and bursts until the last user has read the last answer."""
    phase, sending = Phase(), list[asyncio.Task[None]]()
    waves = await asyncio.to_thread(_waves, load, wording, name) if with_bursts else []
    zero_s = time.perf_counter()
    end_s = zero_s + load.phase_s

    async def one(body: bytes, samples: list[Sample]) -> None:
        samples.append(await server.ask(body, zero_s))

    async def user(number: int) -> None:
        await asyncio.sleep(0.5 * number / load.users)
        turn = 0
        while time.perf_counter() < end_s:
            text = wording.text(load.answer.text_tokens, f"{name} {number} {turn}")
            await one(chat_body(text, [], load.answer.output_tokens), phase.users)
            turn += 1

    async def probing() -> None:
        for turn in range(round(load.phase_s / load.probe_every_s)):
            await asyncio.sleep(zero_s + turn * load.probe_every_s - time.perf_counter())
            text = wording.text(load.probe.text_tokens, f"{name} probe {turn}")
            body = chat_body(text, [], load.probe.output_tokens)
            sending.append(asyncio.create_task(one(body, phase.probes)))

    async def bursting() -> None:
        for turn, wave in enumerate(waves):
            await asyncio.sleep(zero_s + (turn + 0.5) * load.burst_every_s - time.perf_counter())
            sending.extend(asyncio.create_task(one(body, phase.bursts)) for body in wave)

    waving = asyncio.create_task(bursting())
    await asyncio.gather(probing(), *(user(number) for number in range(load.users)))
    waving.cancel()
    await asyncio.gather(waving, return_exceptions=True)
    await asyncio.gather(*sending)  # nothing of this phase runs into the next one
    return phase


def _waves(load: Load, wording: Wording, name: str) -> list[list[bytes]]:
    """Bodies of the bursts, each with images of its own."""
    count = round((load.phase_s + LAST_ANSWERS_S) / load.burst_every_s)
    stream = Stream(name, load.burst, Closed(1), count * load.burst_size)
    serial = crc32(name.encode())  # numbers the images: no cache has seen them
    made = bodies(Workload(name, (stream,)), stream, wording, serial, lambda n: None)
    size = load.burst_size
    return [made[n : n + size] for n in range(0, len(made), size)]


def _row(topology: str, cpus: tuple[str, ...], pairs: Sequence[tuple[Phase, Phase]]) -> Row:
    figures = [(alone.figures(), beside.figures()) for alone, beside in pairs]
    errors = sorted({error for pair in pairs for phase in pair for error in phase.errors})
    return Row(
        topology,
        cpus,
        _medians([alone for alone, _ in figures]),
        _medians([beside for _, beside in figures]),
        {
            name: statistics.median(b[name] / a[name] if a[name] else 0.0 for a, b in figures)
            for name in RATIOS
        },
        len(pairs),
        tuple(errors[:5]),
    )


def _medians(repeats: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in repeats) for name in repeats[0]}


# --- for people -----------------------------------------------------------------------------------

HEAD = (
    "| topology | CPUs | ITL p50 / p99 ms | with bursts | p99 ratio | text's TTFT p50 / p99 ms | "
    "with bursts | p50 ratio | bursts: TTFT p50 ms |\n|---|---|---|---|---|---|---|---|---|"
)


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    return "\n".join([HEAD, *map(_line, rows)])


def _line(row: Row) -> str:
    def pair(figures: dict[str, float], what: str) -> str:
        return f"{figures[f'{what}_ms_p50']:.1f} / {figures[f'{what}_ms_p99']:.1f}"

    alone, beside = row.alone, row.beside
    return (
        f"| {row.topology} | {' + '.join(row.cpus) or 'shared'} | {pair(alone, 'itl')} | "
        f"{pair(beside, 'itl')} | {row.ratios['itl_ms_p99']:.2f} | {pair(alone, 'ttft')} | "
        f"{pair(beside, 'ttft')} | {row.ratios['ttft_ms_p50']:.2f} | "
        f"{beside['burst_ttft_ms_p50']:.0f} |"
    )


def as_objects(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]
