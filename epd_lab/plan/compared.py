"""What was predicted beside what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from epd.config import ConfigError
from epd_lab.bench.servers.figures import stream_name

Rows = Sequence[dict[str, Any]]
FIGURES = (
    ("req/s", "req_per_s"),
    ("TTFT p50", "ttft_ms_p50"),
    ("p99", "ttft_ms_p99"),
    ("TPOT p50", "tpot_ms_p50"),
    ("ITL p50", "itl_ms_p50"),
    ("p99", "itl_ms_p99"),
)


def read_measured(path: Path) -> list[dict[str, Any]]:
    """The rows of a `gpu.json`, or of what `epd bench serve --save` wrote, without ratios.

    Raises ConfigError.
    """
    try:
        rows = msgspec.json.decode(path.read_bytes())["rows"]
        return [
            {"key": (row["server"], row["workload"], row["stream"]), "figures": row["figures"]}
            for row in rows
            if " / " not in row["server"]
        ]
    except OSError as error:
        raise ConfigError(f"--measured {path}: {error.strerror}") from error
    except (msgspec.DecodeError, LookupError, TypeError) as error:
        raise ConfigError(
            f"--measured {path} has no rows of figures; give the gpu.json of `epd bench gpu`, or "
            "what `epd bench serve --save` wrote"
        ) from error


def errors(predicted: Rows, measured: Rows) -> list[tuple[tuple[str, str, str], dict[str, float]]]:
    """For each row that both have, by how much of the measured figure the prediction is off."""
    by_key = {row["key"]: row["figures"] for row in measured}
    found = []
    for row in predicted:
        key = (row["server"], row["workload"], row["stream"])
        if (truth := by_key.get(key)) is not None:
            wanted = [name for _, name in FIGURES if truth.get(name)]
            found.append((key, {name: row["figures"][name] / truth[name] - 1 for name in wanted}))
    return found


def table(predicted: Rows, measured: Rows) -> str:
    """Two lines for each row that both have: predicted, measured; errors behind."""
    truths = {row["key"]: row["figures"] for row in measured}
    figures = {(r["server"], r["workload"], r["stream"]): r["figures"] for r in predicted}
    head = f"{'topology':10} {'workload':18} {'':10}"
    lines = [head + "".join(f"{title:>10}" for title, _ in FIGURES)]
    for key, off in errors(predicted, measured):
        server, workload, stream = key
        name = stream_name(workload, stream)
        for title, found in (("predicted", figures[key]), ("measured", truths[key])):
            cells = "".join(f"{found.get(name, 0.0):10.1f}" for _, name in FIGURES)
            lines.append(f"{server:10} {name:18} {title:10}{cells}")
        cells = "".join(f"{off[n]:+10.0%}" if n in off else f"{'':10}" for _, n in FIGURES)
        lines.append(f"{'':29} {'error':10}{cells}")
    if len(lines) == 1:
        lines.append("nothing that was predicted was measured there: names must be equal")
    return "\n".join(lines)
