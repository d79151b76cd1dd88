"""`epd bench hop` measures what it says, over real processes, on items small enough for a test."""

from __future__ import annotations

import dataclasses

import pytest

from epd.bench import hop
from epd.bench.hop import MIB, Plan, Row, measure_all, table, with_ratios
from epd.transport.mooncake_library import missing
from epd.transport.routing import BACKENDS

SMALL = Plan(max_nbytes=MIB, volume_nbytes=MIB, min_items=4, max_items=4)


@pytest.mark.slow
async def test_every_backend_and_reference_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hop, "SIZES", (64 << 10, MIB, 4 * MIB))
    monkeypatch.setattr(hop, "IN_FLIGHT", (1, 2))
    backends = [*hop.REFERENCES, *BACKENDS]
    if missing():
        backends = [name for name in backends if "mooncake" not in name]
    rows = await measure_all(dataclasses.replace(SMALL, backends=tuple(backends)))
    cells = {(row.backend, row.nbytes, row.in_flight) for row in rows}
    assert cells == {
        (backend, nbytes, in_flight)
        for backend in backends
        for nbytes in (64 << 10, MIB)
        for in_flight in ((1,) if backend == "memcpy" else (1, 2))
    }
    for row in rows:
        assert 0 < row.latency_us["p50"] <= row.latency_us["p99"]
        assert row.gb_per_s > 0


def test_ratios_are_to_the_memcpy_of_the_same_size() -> None:
    def row(backend: str, nbytes: int, p50: float) -> Row:
        return Row(backend, nbytes, 1, {"p50": p50, "p99": p50}, 1.0, 1.0, 1.0)

    rows = with_ratios(
        [row("memcpy", 1, 10.0), row("shm", 1, 15.0), row("memcpy", 2, 20.0), row("shm", 2, 15.0)]
    )
    assert [found.ratio_to_memcpy for found in rows] == [1.0, 1.5, 1.0, 0.75]
    assert table(rows).splitlines()[2].split() == [
        "shm",
        "0",
        "1",
        "15",
        "15",
        "1.00",
        "1.00",
        "1.5",
    ]
