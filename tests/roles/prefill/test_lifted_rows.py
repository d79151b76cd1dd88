"""Rows that have arrived go to the device before a request that waits for them is in a step."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

from epd_lab.sim.engine.engines import SimLanguageEngine
from tests.roles.prefill.test_embeddings import pool


def test_rows_go_to_the_device_when_they_have_arrived_and_once_for_all_who_wait() -> None:
    """Whoever waits gets what the engine gave for them; who comes later has them lifted again."""
    lifted: list[object] = []

    def lift(engine: SimLanguageEngine, rows: object) -> object:
        assert len(own.heard) == (2 if lifted else 0), "before a request can be in a step"
        lifted.append(rows)
        return f"lifted {len(lifted)}"

    with mock.patch.object(SimLanguageEngine, "lift_rows", lift), pool() as own:
        embedding = own.want("a")
        own.want("b")
        told: list[object] = []
        for room in "ab":
            want = embedding.waiters[room]
            ready = want.ready
            embedding.waiters[room] = replace(
                want,
                ready=lambda room, rows, ready=ready: (told.append(rows), ready(room, rows)),
            )
        assert not lifted
        own.arrive("a")
        assert lifted == [embedding.rows] and told == ["lifted 1"] * 2
        own.want("c")
        assert lifted == [embedding.rows] * 2
