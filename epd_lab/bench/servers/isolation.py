"""`epd bench isolation`: what bursts of images cost people who only read text.

Sixteen users stream text all the time, and a short text request is sent now and then.  In every
second phase bursts of requests with four images each come on top.  What counts is how much longer
the gaps between tokens (p99 of ITL) and the first tokens of text (TTFT) become.  Phases with and
without bursts alternate within one run of one cluster.  Each pair gives a ratio, and the median is
reported: a machine that slows down in between slows both.

Stages can only be isolated where they do not share cores.  Each instance is bound to its own CPUs
if there are enough of them; the table notes it if there are not.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from epd.cli.start.plan import StartPlan as ClusterPlan
from epd.cli.start.supervisor import running
from epd_lab.bench.servers.figures import median_of, percentile
from epd_lab.bench.servers.openai_load import Sample, Server, connected
from epd_lab.bench.servers.serve import run_once
from epd_lab.bench.workload import Bursts, Closed, Shape, Stream, Workload

REQUEST_TIMEOUT_S = 120.0
ANSWER = Shape(64, 256)
PROBE = Shape(64, 2)
BURST = Shape(32, 8, images=4, size=(256, 256))
BURST_SIZE = 2
LAST_ANSWERS_S = 3.0  # bursts go on while the users read their last answers
MOST_PER_S = 4  # answers of one user


@dataclass(frozen=True, slots=True)
class IsolationLoad:
    """Who asks how often."""

    users: int = 16
    probe_every_s: float = 0.15
    burst_every_s: float = 1.0
    phase_s: float = 6.0

    def workload(self, name: str, *, with_bursts: bool) -> Workload:
        """Of one phase; its name makes its texts and images unlike those of the others."""
        num_answers = math.ceil(self.users * self.phase_s * MOST_PER_S)
        num_probes = round(self.phase_s / self.probe_every_s)
        num_bursts = round((self.phase_s + LAST_ANSWERS_S) / self.burst_every_s)
        streams = (
            Stream(f"{name} users", ANSWER, Closed(self.users, self.phase_s), num_answers),
            Stream(f"{name} probes", PROBE, Bursts(1, self.probe_every_s), num_probes),
            Stream(
                f"{name} bursts", BURST, Bursts(BURST_SIZE, self.burst_every_s),
                num_bursts * BURST_SIZE,
            ),
        )  # fmt: skip
        return Workload(name, streams if with_bursts else streams[:2])


@dataclass(frozen=True, slots=True)
class IsolationPlan:
    """What to measure; `cluster` plans a topology anew for each start."""

    topologies: tuple[str, ...]
    cluster: Callable[[str], ClusterPlan]
    repeats: int = 3
    load: IsolationLoad = IsolationLoad()


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
class IsolationRow:
    """One topology: medians over the repeats."""

    topology: str
    cpus: tuple[str, ...]  # of each instance; empty: shared
    alone: dict[str, float]
    beside: dict[str, float]
    ratios: dict[str, float]
    repeats: int
    errors: tuple[str, ...] = ()


async def measure(plan: IsolationPlan) -> list[IsolationRow]:
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


async def _measure_one(
    server: Server, topology: str, plan: IsolationPlan
) -> list[tuple[Phase, Phase]]:
    """Pairs of phases, without bursts and with them."""
    await phase(server, IsolationLoad(phase_s=1.0, burst_every_s=0.5), f"{topology} warm-up")
    names = [f"{topology} {repeat + 1}/{plan.repeats}" for repeat in range(plan.repeats)]
    return [
        (
            await phase(server, plan.load, f"{name} alone", with_bursts=False),
            await phase(server, plan.load, f"{name} bursts"),
        )
        for name in names
    ]


async def phase(
    server: Server, load: IsolationLoad, name: str, *, with_bursts: bool = True
) -> Phase:
    """Users and probes, and bursts beside them; nothing of it runs into the next one."""
    workload = load.workload(name, with_bursts=with_bursts)
    samples, _ = await run_once(server, name, workload, 0)
    return Phase(*samples.values())


def _row(
    topology: str, cpus: tuple[str, ...], pairs: Sequence[tuple[Phase, Phase]]
) -> IsolationRow:
    figures = [(alone.figures(), beside.figures()) for alone, beside in pairs]
    errors = sorted({error for pair in pairs for phase in pair for error in phase.errors})
    return IsolationRow(
        topology,
        cpus,
        median_of([alone for alone, _ in figures]),
        median_of([beside for _, beside in figures]),
        {
            name: statistics.median(b[name] / a[name] if a[name] else 0.0 for a, b in figures)
            for name in RATIOS
        },
        len(pairs),
        tuple(errors[:5]),
    )


# --- for people -----------------------------------------------------------------------------------

HEAD = (
    "| topology | CPUs | ITL p50 / p99 ms | with bursts | p99 ratio | text's TTFT p50 / p99 ms | "
    "with bursts | p50 ratio | bursts: TTFT p50 ms |\n|---|---|---|---|---|---|---|---|---|"
)


def table(rows: Sequence[IsolationRow]) -> str:
    """Markdown."""
    return "\n".join([HEAD, *map(_line, rows)])


def _line(row: IsolationRow) -> str:
    def pair(figures: dict[str, float], what: str) -> str:
        return f"{figures[f'{what}_ms_p50']:.1f} / {figures[f'{what}_ms_p99']:.1f}"

    alone, beside = row.alone, row.beside
    return (
        f"| {row.topology} | {' + '.join(row.cpus) or 'shared'} | {pair(alone, 'itl')} | "
        f"{pair(beside, 'itl')} | {row.ratios['itl_ms_p99']:.2f} | {pair(alone, 'ttft')} | "
        f"{pair(beside, 'ttft')} | {row.ratios['ttft_ms_p50']:.2f} | "
        f"{beside['burst_ttft_ms_p50']:.0f} |"
    )


def as_objects(rows: Sequence[IsolationRow]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]
