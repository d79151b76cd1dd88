"""From probes of a few layers to whole models: memory, times, and on how many cards they fit.

A model fits so many cards, as ranks of one instance, if the weights leave room on each for eight
full steps of prompts (of less the log warns).  The share of memory of an instance bounds both.
Layers are shared out to the ranks, and KV by heads; all else is counted whole for each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from epd_lab.diagrams.page import markdown_table

CARDS = {"80 GB": 80 << 30, "141 GB": 140 << 30}  # about what they say of themselves
MOST_CARDS = 8  # of one host, on which the ranks of an instance are
HEADER = [
    *("model", "layers measured", "tower, GB", "language, GB", "a layer, GB"),
    *("KV, KB a token", "image, ms", "prompt of 2k / 8k, ms"),
    *("1 / 32 / 128 decodes, ms", "cards of 80 / 141 GB"),
]
Row = Mapping[str, Any]


def line(row: Mapping[str, Any]) -> str:
    """One measurement, for a console."""
    figures = row["figures"]
    name = f"{row['model']}, {row['layers']} of {row['whole']} layers ({row['took_s']} s):"
    told = [f"{key.removesuffix('_ms')} {figures[key]:.2f} ms" for key in figures if "_ms" in key]
    gib = [
        f"{key.removesuffix('_nbytes')} {figures[key] / 2**30:.2f} GiB"
        for key in ("tower_nbytes", "weights_nbytes", "computed_nbytes", "workspace_nbytes")
        if key in figures
    ]
    failed = [row["failed"]] if "failed" in row else []
    return f"{name} {', '.join(gib + told + failed)}"


def as_json(report: Mapping[str, Any]) -> str:
    """A row a line."""
    head = {key: value for key, value in report.items() if key != "rows"}
    rows = ",\n  ".join(json.dumps(row) for row in report["rows"])
    return f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n  {rows}\n ]\n}}\n'


def table(report: Mapping[str, Any]) -> str:
    """A row for each model of which both measurements are there."""
    return markdown_table(HEADER, [_cells(*pair, report) for pair in _pairs(report["rows"])])


def _pairs(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    by_model: dict[str, list[Row]] = {}
    for row in rows:
        if "failed" not in row:
            by_model.setdefault(row["model"], []).append(row)
    for found in by_model.values():
        if len(found) > 1:
            yield found[0], found[-1]


@dataclass(frozen=True, slots=True)
class Line:
    """Through two numbers of layers of one model."""

    few: Row
    more: Row

    def layer(self, name: str) -> float:
        """What a layer adds."""
        added = self.more["figures"][name] - self.few["figures"][name]
        return float(added / (self.more["layers"] - self.few["layers"]))

    def whole(self, name: str) -> float:
        further = self.more["whole"] - self.more["layers"]
        return float(self.more["figures"][name] + self.layer(name) * further)

    @property
    def workspace_nbytes(self) -> float:
        """It hardly depends on layers."""
        return float(max(row["figures"]["workspace_nbytes"] for row in (self.few, self.more)))

    def num_cards(self, card_nbytes: int, share: float) -> int | None:
        """Ranks that a model needs, by powers of two; None: more than `MOST_CARDS`."""
        figures = self.more["figures"]
        kept = ("reserve", "rows", "tower", "outside")
        each_nbytes = share * card_nbytes - sum(figures[f"{name}_nbytes"] for name in kept)
        each_nbytes -= max(self.workspace_nbytes, figures["tower_workspace_nbytes"])
        kv_nbytes = figures["pool_tokens"] * self.whole("kv_token_nbytes")
        layers_nbytes = self.whole("weights_nbytes") - figures["outside_nbytes"]
        number = 1
        while number <= MOST_CARDS:
            kv_share = min(number, int(figures["kv_heads"]))
            if layers_nbytes / number + kv_nbytes / kv_share <= each_nbytes:
                return number
            number *= 2
        return None


def _cells(few: Row, more: Row, report: Mapping[str, Any]) -> list[str]:
    one, figures = Line(few, more), more["figures"]
    prompts = [f"{one.whole(name):.0f}" for name in figures if name.startswith("prefill_")]
    decodes = [f"{one.whole(name):.1f}" for name in figures if name.startswith("decode_")]
    cards = [one.num_cards(nbytes, report["share"]) for nbytes in CARDS.values()]
    return [
        few["model"],
        f"{few['layers']}, {more['layers']} of {few['whole']}",
        f"{figures['tower_nbytes'] / 1e9:.1f}",
        f"{one.whole('weights_nbytes') / 1e9:.0f}",
        f"{one.layer('weights_nbytes') / 1e9:.2f}",
        f"{one.whole('kv_token_nbytes') / 1e3:.0f}",
        f"{figures['image_ms']:.1f}",
        " / ".join(prompts),
        " / ".join(decodes),
        " / ".join(f"over {MOST_CARDS}" if n is None else str(n) for n in cards),
    ]
