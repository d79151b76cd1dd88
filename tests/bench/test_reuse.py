"""`epd bench reuse`: a row holds if every image was encoded exactly once; counts are awaited."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from epd_lab.bench.servers import reuse
from epd_lab.bench.servers.openai_load import Sample


class Page:
    """A server whose count of encodes grows with each look at it."""

    def __init__(self, *counts: int) -> None:
        self._counts = list(counts)

    async def text(self, path: str) -> str:
        assert path == "/metrics"
        count = self._counts.pop(0) if len(self._counts) > 1 else self._counts[0]
        return (
            "# HELP epd_encodes_total images encoded\n"
            f'epd_encodes_total{{instance="e0"}} {count}.0\n'
            'epd_encodes_total{instance="e1"} 2.0\n'
        )


def row(**changes: Any) -> reuse.ReuseRow:
    whole = {"transport": "shm", "reuse": 0.5, "images": 30, "distinct": 15, "encodes": 15}
    return reuse.ReuseRow(**{**whole, "ttft_ms": {"p50": 1.0}, "failed": 0, **changes})


def test_one_encode_too_many_or_too_few_is_no_success() -> None:
    assert row().holds
    assert not row(encodes=16).holds
    assert not row(encodes=14).holds
    assert not row(failed=1).holds
    assert "| shm | 50% | 30 | 15 | 16 |" in reuse.table([row(encodes=16)])


async def test_the_count_is_of_all_encoders_and_late_ones_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def at_once(delay_s: float) -> None:
        """No waiting."""

    monkeypatch.setattr(asyncio, "sleep", at_once)
    assert await reuse._settled(Page(5, 9, 14, 14), 2, 14) == 14  # type: ignore[arg-type]
    assert await reuse._settled(Page(14, 15), 2, 14) == 15  # type: ignore[arg-type]


def test_times_are_of_the_answered() -> None:
    samples = [Sample(0.0, ttft_s=n / 1000) for n in range(1, 101)]
    samples.append(Sample(0.0, ttft_s=9.0, error="HTTP 503"))
    assert reuse._ttft_ms(samples) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert reuse._ttft_ms(samples[-1:]) == {}
