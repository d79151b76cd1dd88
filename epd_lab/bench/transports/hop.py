"""`epd bench hop`: one item of rows from a process that has it to one that can use it.

Latency is one way: from "rows ready" at the sender to "usable at the receiver" (`hop_process`), a
message like a commit included.  GB/s and CPU seconds, of both processes, cover the acknowledgement
as well, for it frees the slot.

Every cell takes turns: some items over each way, round after round, so that noise of the machine
falls on all of them.  The median is over all rounds.  The references are further ways: a memcpy by
one thread within the sender, mooncake's bare engine, and safetensors files in /dev/shm, on disk,
and on disk with fsync.  A file that was just written is read from the page cache.  `-medium` is the
case of a reader on another host: the file is written through and dropped from the cache before the
message.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from epd.transport.backends import BACKENDS
from epd_lab.bench import machine, plots
from epd_lab.bench.transports.hop_senders import WAYS, HopRows, Sender, make_sender
from epd_lab.bench.transports.words import Remote

KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
IN_FLIGHT = (1, 4, 16)


@dataclass(frozen=True, slots=True)
class HopPlan:
    """What to measure."""

    max_nbytes: int = 64 * MIB  # of an item
    pool_nbytes: int = 256 * MIB  # cells whose items in flight need more are left out
    volume_nbytes: int = 128 * MIB  # moved per way and cell, at least `min_items`
    min_items: int = 10
    max_items: int = 200
    rounds: int = 5
    ways: tuple[str, ...] = WAYS


@dataclass(frozen=True, slots=True)
class HopRow:
    way: str
    nbytes: int
    in_flight: int
    latency_us: dict[str, float]
    gb_per_s: float
    cpu_s_per_gb: float
    ratio_to_memcpy: float  # of the median latency, to one memcpy of the same size


@dataclass(slots=True)
class Tally:
    """What one way has taken in one cell."""

    latencies_ns: list[int] = field(default_factory=list)
    took_s: float = 0.0
    cpu_s: float = 0.0

    def row(self, way: str, nbytes: int, in_flight: int) -> HopRow:
        ranked = sorted(self.latencies_ns)
        p99 = ranked[min(len(ranked) - 1, int(len(ranked) * 0.99))]
        latency_us = {"p50": round(statistics.median(ranked) / 1e3, 1), "p99": round(p99 / 1e3, 1)}
        gigabytes = len(ranked) * nbytes / 1e9
        return HopRow(
            way, nbytes, in_flight, latency_us,
            round(gigabytes / self.took_s, 3), round(self.cpu_s / gigabytes, 3), 1.0,
        )  # fmt: skip


async def _round(
    sender: Sender, rows: HopRows, receiver: Remote, count: int, in_flight: int, tally: Tally
) -> None:
    """`count` items over one way, `in_flight` at a time."""
    numbers = itertools.count()

    async def one_after_the_other(slot: int) -> None:
        while next(numbers) < count:
            item, seen = rows.tagged(slot)
            began_ns = time.perf_counter_ns()
            usable_ns = await sender.send(slot, item, seen)
            tally.latencies_ns.append(usable_ns - began_ns)

    await receiver.ask("rest")  # brings the receiver's CPU seconds up to date
    cpu_s, began_s = time.process_time() + receiver.cpu_s, time.perf_counter()
    await asyncio.gather(*(one_after_the_other(slot) for slot in range(in_flight)))
    tally.took_s += time.perf_counter() - began_s
    await receiver.ask("rest")
    tally.cpu_s += time.process_time() + receiver.cpu_s - cpu_s


async def measure(
    receiver: Remote, plan: HopPlan, directory: str, nbytes: int, in_flight: int
) -> list[HopRow]:
    """One cell: every way, in turns."""
    count = min(plan.max_items, max(plan.min_items, in_flight * 3, plan.volume_nbytes // nbytes))
    rows = HopRows(in_flight, nbytes)
    ways = [way for way in plan.ways if in_flight == 1 or way != "memcpy"]
    senders = {way: await make_sender(way, receiver, directory, in_flight, nbytes) for way in ways}
    tallies = {way: Tally() for way in ways}
    for sender in senders.values():  # connects, maps, touches
        await _round(sender, rows, receiver, in_flight, in_flight, Tally())
    for _ in range(plan.rounds):
        for way, sender in senders.items():
            await _round(sender, rows, receiver, -(-count // plan.rounds), in_flight, tallies[way])
    for sender in senders.values():
        await sender.finish()
    await receiver.ask("release")
    return [tally.row(way, nbytes, in_flight) for way, tally in tallies.items()]


async def measure_all(plan: HopPlan) -> list[HopRow]:
    cells = [
        (nbytes, in_flight)
        for nbytes in SIZES if nbytes <= plan.max_nbytes
        for in_flight in IN_FLIGHT if in_flight == 1 or in_flight * nbytes <= plan.pool_nbytes
    ]  # fmt: skip
    rows: list[HopRow] = []
    receiver = Remote("epd_lab.bench.transports.hop_process")
    with tempfile.TemporaryDirectory(prefix="epd-bench-") as directory:
        for done, (nbytes, in_flight) in enumerate(cells):
            print(
                f"{done + 1}/{len(cells)}: {nbytes // KIB} KiB, {in_flight} in flight",
                file=sys.stderr,
            )
            rows += await measure(receiver, plan, directory, nbytes, in_flight)
        await receiver.close()
    return with_ratios(rows)


def with_ratios(rows: list[HopRow]) -> list[HopRow]:
    """Median latency against the memcpy of the same size."""
    memcpy = {row.nbytes: row.latency_us["p50"] for row in rows if row.way == "memcpy"}
    return [
        replace(row, ratio_to_memcpy=round(row.latency_us["p50"] / memcpy[row.nbytes], 2))
        for row in rows
    ]


def table(rows: list[HopRow]) -> str:
    lines = ["way                     KiB  fly     p50 us     p99 us    GB/s  cpu s/GB  /memcpy"]
    lines += [
        f"{row.way:<19}{row.nbytes // KIB:>8}{row.in_flight:>5}{row.latency_us['p50']:>11.1f}"
        f"{row.latency_us['p99']:>11.1f}{row.gb_per_s:>8.2f}{row.cpu_s_per_gb:>10.3f}"
        f"{row.ratio_to_memcpy:>9.2f}"
        for row in rows
    ]
    return "\n".join(lines)


def markdown(found: dict[str, Any]) -> str:
    """Every cell, as a page for the documentation."""
    lines = [
        "# What a hop costs: every cell",
        "",
        f"Written by `epd bench hop --out`. {machine.sentence(found['machine'])}.",
        "",
        "| way | KiB | in flight | p50 us | p99 us | GB/s | CPU s/GB | to memcpy |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['way']} | {row['nbytes'] // KIB} | {row['in_flight']} "
        f"| {row['latency_us']['p50']} | {row['latency_us']['p99']} | {row['gb_per_s']} "
        f"| {row['cpu_s_per_gb']} | {row['ratio_to_memcpy']} |"
        for row in found["rows"]
    ]
    return "\n".join(lines) + "\n"


def usable(ways: tuple[str, ...]) -> tuple[str, ...]:
    """Those whose library is here; prints why others are left out."""
    backends = {way: BACKENDS.get(way.removesuffix("-raw")) for way in ways}
    lacks = {way: backend.lacks() if backend else "" for way, backend in backends.items()}
    for reason in sorted({*lacks.values()} - {""}):
        print(f"left out: {reason}", file=sys.stderr)
    return tuple(way for way in ways if not lacks[way])


def run(plan: HopPlan, *, as_json: bool, out: str = "") -> int:
    """Measure and print; with `out`, also write hop.json, hop.md and hop.svg there."""
    import uvloop

    plan = replace(plan, ways=usable(plan.ways))
    described = machine.describe()
    rows = uvloop.run(measure_all(plan))
    found = {"machine": described, "rows": [asdict(row) for row in rows]}
    print(json.dumps(found) if as_json else f"{machine.sentence(described)}\n{table(rows)}")
    if out:
        os.makedirs(out, exist_ok=True)
        text = json.dumps(found, indent=1) + "\n"
        for name, content in (("json", text), ("md", markdown(found)), ("svg", plots.lines(found))):
            with open(os.path.join(out, f"hop.{name}"), "w", encoding="utf-8") as file:
                file.write(content)
    return 0
