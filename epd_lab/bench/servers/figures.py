"""From samples to figures: percentiles, goodput, time per stage; medians of repeats; ratios."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from epd_lab.bench.servers.openai_load import Sample

SHARES = (50, 90, 99)
CLIENT_LAG = "client_lag_ms_p99"
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must keep to count for goodput."""

    ttft_s: float = 1.0
    tpot_s: float = 0.030
    itl_s: float = math.inf  # the p99 of its own gaps

    def kept_by(self, sample: Sample) -> bool:
        return (
            not sample.error
            and sample.ttft_s <= self.ttft_s
            and sample.tpot_s <= self.tpot_s
            and percentile(sample.gaps_s, 99) <= self.itl_s
        )


def percentile(values: Sequence[float], share: int) -> float:
    """Nearest rank; 0 without values."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, -(-share * len(ordered) // 100) - 1)]


def figures(samples: Sequence[Sample], slo: Slo, late_s: Sequence[float] = ()) -> Figures:
    """Of one stream of one run; milliseconds, and rates from the first request to the last end.
    `late_s`: how late the client's own loop was, now and then."""
    good = [sample for sample in samples if not sample.error]
    began_s = min((sample.sent_s for sample in samples), default=0.0)
    elapsed_s = max((sample.ended_s for sample in samples), default=0.0) - began_s or 1e-9
    found = {
        "requests": float(len(samples)),
        "failed": float(len(samples) - len(good)),
        "req_per_s": len(good) / elapsed_s,
        "output_tok_per_s": sum(sample.output_tokens for sample in good) / elapsed_s,
        "goodput_req_per_s": sum(map(slo.kept_by, samples)) / elapsed_s,
        "prompt_tokens": statistics.fmean(s.prompt_tokens for s in good) if good else 0.0,
    }
    times = {
        "ttft": [sample.ttft_s for sample in good],
        "itl": [gap for sample in good for gap in sample.gaps_s],
        "tpot": [sample.tpot_s for sample in good if sample.output_tokens > 1],
        "e2e": [sample.latency_s for sample in good],
    }
    for name, values in times.items():
        for share in SHARES:
            found[f"{name}_ms_p{share}"] = 1e3 * percentile(values, share)
    if late_s:
        found[CLIENT_LAG] = 1e3 * percentile(late_s, 99)
    return found


def median_of(repeats: Sequence[Figures]) -> Figures:
    """Figure by figure."""
    return {name: statistics.median(one[name] for one in repeats) for name in repeats[0]}


def spread_of(repeats: Sequence[Figures]) -> dict[str, list[float]]:
    """The lowest and the highest, figure by figure."""
    values = {name: [one[name] for one in repeats] for name in repeats[0]}
    return {name: [min(found), max(found)] for name, found in values.items()}


def ratios(first: Figures, second: Figures) -> Figures:
    """Second by first, where both are measured."""
    names = [name for name in first if name != CLIENT_LAG]
    return {name: second[name] / first[name] for name in names if first[name] and second[name]}


def stages_ms(samples: Iterable[Sample]) -> dict[str, float]:
    """Median milliseconds per state of each machine, where the server sends its timeline; and from
    the request's head to the end of its body."""
    spans: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        since: dict[tuple[str, str], tuple[str, float]] = {}
        if sample.timeline:
            spans["body"].append(sample.timeline[0]["t_ms"])
        for event in sample.timeline:
            machine, state, at_ms = event["machine"], event["state"], event["t_ms"]
            name = machine.partition("@")[0]
            if "ms" in event:  # a chunk of a prompt
                spans[f"{name} {state}"].append(event["ms"])
                continue
            one = (machine, event.get("key", ""))
            if one in since:
                before, began_ms = since[one]
                spans[f"{name} {before}"].append(at_ms - began_ms)
            since[one] = (state, at_ms)
    return {name: statistics.median(values) for name, values in sorted(spans.items())}


# --- for people -----------------------------------------------------------------------------------

COLUMNS = (
    ("req/s", "req_per_s", 2),
    ("tok/s", "output_tok_per_s", 0),
    ("good/s", "goodput_req_per_s", 2),
    ("TTFT p50", "ttft_ms_p50", 1),
    ("p99", "ttft_ms_p99", 1),
    ("ITL p50", "itl_ms_p50", 2),
    ("p99", "itl_ms_p99", 1),
    ("TPOT p50", "tpot_ms_p50", 2),
    ("e2e p50", "e2e_ms_p50", 0),
    ("p99", "e2e_ms_p99", 0),
    ("lag p99", CLIENT_LAG, 1),
    ("failed", "failed", 0),
)


def by_stream(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Those of each workload and stream together, both in the order in which they came first."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["workload"], row["stream"]), []).append(row)
    return found


def stream_name(workload: str, stream: str) -> str:
    """Of the only stream of a workload the workload's."""
    return workload if workload == stream else f"{workload}: {stream}"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line per server, workload and stream; times in ms; then the ratios of a pair."""
    width = max(12, *(len(row["server"]) for row in rows)) if rows else 12
    head = f"{'workload':12} {'stream':10} {'server':{width}}"
    lines = [head + "".join(f"{title:>9}" for title, _, _ in COLUMNS)]
    for row in rows:
        is_ratio = "errors" not in row
        cells = "".join(
            f"{row['figures'][key]:9.{2 if is_ratio else places}f}"
            if key in row["figures"]
            else f"{'':9}"
            for _, key, places in COLUMNS
        )
        lines.append(f"{row['workload']:12} {row['stream']:10} {row['server']:{width}}{cells}")
    return "\n".join(lines)
