"""Traces of others, from their own files: none of their data is here.

- Mooncake (kvcache-ai/Mooncake, `FAST25-release/traces`): JSON lines with `timestamp` in ms,
  `input_length`, `output_length` and `hash_ids`, one of each block of 512 tokens.
- BurstGPT (HPMLL/BurstGPT, `data/*.csv`): a line has `Timestamp` in seconds, `Request tokens`,
  `Response tokens` and `Log Type`; some have a `Session ID`.  Failed ones, without a response, are
  left out.
- ServeGen (alibaba/ServeGen, `data/CATEGORY/MODEL`): a client is a table of windows
  (`chunk-N-trace.csv`) and one of contents (`chunk-N-dataset.json`).  A window has a rate, and the
  law of its gaps, Gamma or Weibull with shape and scale.  Contents are shares of numbers of tokens
  and pictures.  Requests are drawn from both.  A token of its models has 28 x 28 pixels.
"""

from __future__ import annotations

import ast
import csv
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from epd_lab.bench.traces import form
from epd_lab.bench.traces.form import BLOCK_TOKENS, Picture, TraceRequest
from epd_lab.bench.traces.shapes import until

TOKEN_PIXELS = 28
WINDOW_S = 600.0  # the last one of a table; of the others until the next


def read(path: Path, for_s: float = math.inf, seed: int = 0) -> list[TraceRequest]:
    """A trace of any kind; the first `for_s` seconds.  Raises ValueError, OSError."""
    try:
        if path.is_dir():
            found = list(_servegen(path, for_s, seed))
        elif path.suffix == ".csv":
            found = list(_burstgpt(path))
        elif b'"input_length"' in path.read_bytes()[:200]:
            found = list(_mooncake(path))
        else:
            return [asked for asked in form.read(path) if asked.arrival_s < for_s]
    except (LookupError, TypeError, SyntaxError) as error:
        raise ValueError(f"{path} is no trace of a known kind: {error!r}") from error
    return [asked for asked in form.ordered(found) if asked.arrival_s < for_s]


def _mooncake(path: Path) -> Iterator[TraceRequest]:
    for line in path.read_text().splitlines():
        row = json.loads(line)
        blocks = tuple(row["hash_ids"][: (row["input_length"] - 1) // BLOCK_TOKENS])
        yield TraceRequest(
            row["timestamp"] / 1e3, row["input_length"], row["output_length"], blocks=blocks
        )


def _burstgpt(path: Path) -> Iterator[TraceRequest]:
    with path.open(newline="") as lines:
        for row in csv.DictReader(lines):
            if sent := int(row["Response tokens"]):
                yield TraceRequest(
                    float(row["Timestamp"]), max(1, int(row["Request tokens"])), sent,
                    session=row.get("Session ID") or "", kind=row.get("Log Type") or "all",
                )  # fmt: skip


def _servegen(directory: Path, for_s: float, seed: int) -> Iterator[TraceRequest]:
    for table in sorted(directory.glob("chunk-*-trace.csv")):
        draw = random.Random(f"{table.name} {seed}")
        data = json.loads(
            table.with_name(table.name.replace("trace.csv", "dataset.json")).read_text()
        )
        contents = {
            int(at): {k: ast.literal_eval(v) for k, v in d.items()} for at, d in data.items()
        }
        rows = [line.split(",") for line in table.read_text().split()]
        for row, after in zip(rows, [*rows[1:], [""]], strict=True):
            begin_s = float(row[0])
            end_s = min(float(after[0] or begin_s + WINDOW_S), for_s)
            known = [at for at in contents if at <= begin_s]
            if row[3] and known:
                for at_s in _gaps(draw, row[3], float(row[4]), float(row[5]), end_s - begin_s):
                    yield _content(draw, begin_s + at_s, contents[max(known)])


def _gaps(
    draw: random.Random, law: str, shape: float, scale_s: float, for_s: float
) -> Iterator[float]:
    if law == "Gamma":
        return until(for_s, lambda: draw.gammavariate(shape, scale_s))
    return until(for_s, lambda: draw.weibullvariate(scale_s, shape))


def _content(draw: random.Random, at_s: float, tables: dict[str, dict[int, float]]) -> TraceRequest:
    def one(name: str, default: int = 0) -> int:
        table: Any = tables.get(name) or {default: 1.0}
        return int(draw.choices(list(table), list(table.values()))[0])

    pictures = tuple(_picture(draw, one("image_tokens")) for _ in range(one("image_count")))
    tokens = one("text_tokens") if "text_tokens" in tables else one("input_tokens")
    return TraceRequest(at_s, max(1, tokens), max(1, one("output_tokens")), pictures)


def _picture(draw: random.Random, num_tokens: int) -> Picture:
    """About square; each is new."""
    rows = max(1, math.isqrt(num_tokens))
    columns = max(1, round(num_tokens / rows))
    return Picture(columns * TOKEN_PIXELS, rows * TOKEN_PIXELS, draw.getrandbits(48))
