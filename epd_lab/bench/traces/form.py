"""A trace: one request a line, as JSON, in order of arrival.

A line has when it arrives, its tokens in and out, its pictures, and what it has in
common with others.  A text begins with its `blocks`, of `BLOCK_TOKENS` tokens each, as a line of
Mooncake's traces does: equal numbers are equal texts.  What is behind them is its own; of requests
of one session the shorter text is the beginning of the longer one.  A picture of the same size and
number is the same picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

BLOCK_TOKENS = 512
Count = Annotated[int, msgspec.Meta(ge=1)]


class Picture(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Pixels, and which one it is."""

    width: Count
    height: Count
    number: Annotated[int, msgspec.Meta(ge=0)]


class TraceRequest(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One request."""

    arrival_s: Annotated[float, msgspec.Meta(ge=0)]  # since the trace began
    tokens_in: Count  # of its text, blocks included
    tokens_out: Count
    pictures: tuple[Picture, ...] = ()  # behind the blocks, before the rest of the text
    blocks: tuple[int, ...] = ()
    session: str = ""
    kind: str = "all"  # requests of one kind share a row of figures, and an SLO

    @property
    def own_tokens(self) -> int:
        return max(1, self.tokens_in - BLOCK_TOKENS * len(self.blocks))


Trace = Sequence[TraceRequest]


def write(trace: Trace, path: Path) -> None:
    path.write_bytes(msgspec.json.Encoder().encode_lines(trace))


def read(path: Path) -> list[TraceRequest]:
    """Raises ValueError with the first line that is none."""
    found, decoder = [], msgspec.json.Decoder(TraceRequest)
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            found.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    return ordered(found)


def ordered(trace: Trace) -> list[TraceRequest]:
    """By arrival, from 0 on; of equal times as they were."""
    begin_s = min((asked.arrival_s for asked in trace), default=0.0)
    moved = [msgspec.structs.replace(a, arrival_s=a.arrival_s - begin_s) for a in trace]
    return sorted(moved, key=lambda asked: asked.arrival_s)


def at_rate(trace: Trace, per_s: float) -> list[TraceRequest]:
    """With so many arrivals a second on average: all times are stretched alike."""
    last_s = trace[-1].arrival_s if trace else 0.0
    by = len(trace) / per_s / last_s if last_s else 1.0
    return [msgspec.structs.replace(a, arrival_s=a.arrival_s * by) for a in trace]
