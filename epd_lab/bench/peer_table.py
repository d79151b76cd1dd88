"""The table of a report of `epd bench peer`: a line per workload and server, with ratios."""

from __future__ import annotations

from typing import Any

from epd_lab.bench.machine import counted
from epd_lab.bench.servers.figures import by_stream
from epd_lab.diagrams.page import markdown_table

GAP_MS = 50
HEADER = [
    *("workload", "server", "req/s", "TTFT p50 / p99, ms", "TPOT p50, ms", "ITL p50 / p99, ms"),
    *("E2E p50 / p99, ms", "J a request", "n"),
    f"of open arrivals a second (n 1): first token in time, p99 gap below {GAP_MS} ms",
]


def goodput_name(gap_ms: int) -> str:
    return f"goodput_gap_{gap_ms}ms_req_per_s"


def table(report: dict[str, Any]) -> str:
    """What was measured, on what, and how the servers were started; then the figures."""
    cards = ", ".join(counted(report["gpus"])) or "no GPU"
    versions = [f"{name} {version}" for name, version in report["versions"].items()]
    head = [f"{cards}; {', '.join(versions)}; {report['date']}."]
    head += [f"{side['name']} {side['version']}: `{side['flags']}`." for side in report["sides"]]
    closed: dict[str, list[dict[str, Any]]] = {}
    opened: dict[str, list[dict[str, Any]]] = {}
    for (workload, stream), rows in by_stream(report["rows"]).items():
        (opened if stream == "open" else closed)[workload] = rows
    lines = [
        _cells(row, rows[0]["figures"], opened.get(workload, [None] * len(rows))[index])
        for workload, rows in closed.items()
        for index, row in enumerate(rows)
    ]
    return " ".join(head) + "\n\n" + markdown_table(HEADER, lines)


def _cells(row: dict[str, Any], first: dict[str, float], opened: Any) -> list[str]:
    found = row["figures"]

    def told(name: str, places: int) -> str:
        if name not in found:
            return ""
        ratio = f" ({found[name] / first[name]:.2f})" if found is not first and first[name] else ""
        return f"{found[name]:.{places}f}{ratio}"

    def pair(what: str, places: int) -> str:
        return f"{told(f'{what}_ms_p50', places)} / {told(f'{what}_ms_p99', places)}"

    kept = ""
    if opened is not None:
        arrived, good = opened["figures"], opened["figures"][goodput_name(GAP_MS)]
        kept = f"{good:.2f} of {arrived['req_per_s']:.2f}"
    return [
        *(row["workload"], row["server"], told("req_per_s", 2), pair("ttft", 0)),
        *(told("tpot_ms_p50", 1), pair("itl", 1), pair("e2e", 0), told("j_per_req", 1)),
        *(str(row["repeats"]), kept),
    ]
