"""The cost file: what it says of a step, its round trip, and what is said of a bad one."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from epd.config import ConfigError
from epd_lab.plan.costs import BUNDLED, between, read, write

KNOWN = read(BUNDLED)


def ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    write(KNOWN, tmp_path / "costs.json")
    assert read(tmp_path / "costs.json") == KNOWN


def test_between_points() -> None:
    points = ((10, 1.0), (20, 3.0))
    assert [between(points, n) for n in (1, 10, 15, 20, 40)] == [1.0, 1.0, 2.0, 3.0, 6.0]


@pytest.mark.parametrize(
    ("decodes", "context", "prompt", "history", "measured_ms"),
    [
        (1, 1450, 0, 0, 3.44),
        (8, 1300, 0, 0, 3.85),
        (22, 2140, 0, 0, 5.28),
        (64, 1150, 0, 0, 6.00),
        (0, 0, 512, 0, 6.91),
        (18, 2140, 750, 0, 11.96),
        (18, 2140, 750, 1400, 13.13),
        (0, 0, 2048, 0, 25.88),
        (5, 9200, 699, 4600, 16.8),
        (5, 9200, 1019, 4600, 21.1),
        (56, 1150, 968, 0, 16.3),
        (22, 2140, 1052, 1052, 19.7),
    ],
)
def test_bundled_steps_are_those_of_the_table(
    decodes: int, context: int, prompt: int, history: int, measured_ms: float
) -> None:
    """Steps alone, as measured on one H200 (2026-11-22)."""
    alone = msgspec.structs.replace(KNOWN, sustained=1.0)
    pairs = prompt * (history + prompt / 2)
    mixed = bool(decodes and prompt)
    took_s = alone.step_s(decodes + prompt, decodes * context, pairs, mixed=mixed)
    assert 1e3 * took_s == pytest.approx(measured_ms, rel=0.08)


def test_bundled_towers_are_those_of_the_table() -> None:
    alone = msgspec.structs.replace(KNOWN, sustained=1.0)
    assert ms(alone.tower_s([8160])) == pytest.approx(24.0, rel=0.02)
    assert ms(alone.tower_s([1296])) == pytest.approx(4.1, rel=0.02)
    assert ms(alone.tower_s([1296, 1296])) == pytest.approx(7.3, rel=0.02)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"step": {}}, "missing required field"),
        ({"sustained": 0.5}, "sustained"),
        ({"colour": "red"}, "colour"),
        ({"hops": {}}, "hops is empty; name a transport"),
    ],
)
def test_a_bad_file_says_what_to_do(tmp_path: Path, change: dict[str, object], said: str) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(msgspec.json.encode(msgspec.to_builtins(KNOWN) | change))
    with pytest.raises(ConfigError, match=said):
        read(path)


def test_sizes_must_rise(tmp_path: Path) -> None:
    tower = msgspec.structs.replace(KNOWN.tower, patches_ms=((8, 1.0), (4, 2.0)))
    path = tmp_path / "costs.json"
    write(msgspec.structs.replace(KNOWN, tower=tower), path)
    with pytest.raises(ConfigError, match=r"tower\.patches_ms must rise"):
        read(path)


def test_no_file_names_who_writes_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file.*epd bench calibrate"):
        read(tmp_path / "none.json")


def test_an_unknown_transport_names_the_known() -> None:
    assert KNOWN.hop() is KNOWN.hops["cuda"]
    with pytest.raises(ConfigError, match="choose cuda, shm"):
        KNOWN.hop("pigeon")
