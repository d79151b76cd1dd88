"""docs/cards: a page for each card, of its report under docs/bench and of its cost file, if any."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from epd.config import ConfigError
from epd_lab.bench.card_tables import table
from epd_lab.diagrams.page import markdown_table
from epd_lab.plan.costs import Costs, of_card, read

CARDS = ("h100", "h200")
NOTICE = (
    "<!-- Written by `python -m epd diagrams` from docs/bench and epd_lab/plan; do not edit. -->"
)
PATCHES = (256, 1024, 4096, 8160)  # the last: of 1920 x 1080 pixels
HEAD = """\
*For operators: figures of this card, and its costs.*

How they were measured: [performance.md](../performance.md). Which topology when:
[topologies.md](../topologies.md)."""
UNKNOWN = """\
There is no cost file, so `epd plan` refuses this card. In about a minute on it
`epd bench calibrate --device cuda --out FILE` writes one, for `epd plan --costs FILE`."""


def pages(docs: Path) -> dict[Path, str]:
    return {docs / "cards" / f"{card}.md": page(card, docs / "bench") for card in CARDS}


def page(card: str, reports: Path) -> str:
    """`card`: the name of its report and, in small letters, a part of the device's name."""
    report = reports / f"{card}.json"
    title = msgspec.json.decode(report.read_bytes())["card"]
    try:
        costs = [*_costs(card, read(of_card(card)))]
    except ConfigError:
        costs = [UNKNOWN]
    parts = NOTICE, f"# {title}", HEAD, "## Measured", table(report), "## Costs", *costs
    return "\n\n".join(parts) + "\n"


def _costs(card: str, costs: Costs) -> Iterator[str]:
    step, model = costs.step, costs.model
    yield (
        f"`epd plan --card {card}` has these: {model.name} ({model.form}) on {costs.device}, "
        f"alone on the card. {model.kv_tokens:,} tokens of KV fit."
    )
    yield _line("tokens of a step", step.tokens_ms)
    yield (
        f"For 1,000 tokens of context a decode adds {step.context_ns / 1e3:.3f} ms. "
        f"A prompt of n tokens behind h adds {step.pair_ns:.2f} ns times n (h + n / 2)."
    )
    alone = msgspec.structs.replace(costs, sustained=1.0)
    yield _line("patches of an image", [(n, alone.tower_s([n]) * 1e3) for n in PATCHES])
    rows = [
        [name, f"{hop.latency_ms:.2f}", f"{hop.gb_per_s:.1f}"] for name, hop in costs.hops.items()
    ]
    yield markdown_table(["transport", "a hop, ms", "GB/s"], rows)
    yield "Steps that no cost was made of, and how far the costs are off:"
    found = [
        [
            *map(str, msgspec.structs.astuple(check)[:4]),
            f"{check.measured_ms:.2f}",
            f"{costs.error(check):+.0%}",
        ]
        for check in costs.checks
    ]
    yield markdown_table(["decodes", "context", "prompt", "behind it", "ms", "costs"], found)
    if costs.compared is not None:
        yield f"Plans beside a measurement: {costs.compared}."


def _line(what: str, points: Sequence[tuple[int, float]]) -> str:
    return markdown_table(
        [what, *(f"{n}" for n, _ in points)], [["ms", *(f"{ms:.1f}" for _, ms in points)]]
    )
