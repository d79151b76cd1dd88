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


def test_a_check_is_compared_with_a_step_alone() -> None:
    """The costs are near steps that they were not made of, as one H200 had them."""
    assert len(KNOWN.checks) == 6
    assert all(abs(KNOWN.error(check)) < 0.08 for check in KNOWN.checks)
    hotter = msgspec.structs.replace(KNOWN, sustained=2.0)
    assert [hotter.error(check) for check in KNOWN.checks] == [*map(KNOWN.error, KNOWN.checks)]


def test_towers_are_those_of_the_table() -> None:
    """24 ms of an image of 1920 x 1080 were measured on 2026-11-22, 25 on 2026-11-30."""
    alone = msgspec.structs.replace(KNOWN, sustained=1.0)
    assert ms(alone.tower_s([8160])) == pytest.approx(25.0, rel=0.05)


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
