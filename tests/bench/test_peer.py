"""Servers side by side get the same bytes in turns, and what each takes is its own."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from epd.cli.main import main
from epd_lab.bench import peer_table
from epd_lab.bench.card_tables import table
from epd_lab.bench.servers import peer, serve
from epd_lab.bench.servers.figures import Slo
from epd_lab.bench.servers.openai_load import ServerError
from epd_lab.bench.workload import Closed, Shape, Stream, Workload
from tests.bench.test_serve import TOKENS, FakeServer, serving_fake

COUNT, USERS, REPEATS, OPEN_S = 6, 3, 3, 0.2
STREAM = Stream("known", Shape(20, TOKENS, 1, (32, 32)), Closed(USERS), COUNT)


@pytest.fixture
async def sides() -> AsyncIterator[list[FakeServer]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(serving_fake()) for _ in range(2)]


def plan(sides: list[FakeServer], *names: str) -> serve.ServePlan:
    workloads = tuple(Workload(n, (replace(STREAM, name=n),)) for n in names or ["known"])
    targets = (serve.Target(name, url=s.url) for name, s in zip("ab", sides, strict=True))
    return serve.ServePlan(tuple(targets), workloads, REPEATS, Slo(10.0, 10.0))


def asked(side: FakeServer) -> list[str]:
    """With an image: not the two by which words are counted."""
    return [t for t in map(json.dumps, side.bodies) if "image_url" in t]


async def test_the_same_bytes_in_turns_and_energy_by_side(
    sides: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[tuple[int, int]] = []  # how many each had answered, at each look at the counter

    def energy_j() -> float:
        looked.append((len(asked(sides[0])), len(asked(sides[1]))))
        return 1.0 + 12.0 * looked[-1][0] + 30.0 * looked[-1][1]

    monkeypatch.setattr(peer, "energy_j", energy_j)
    beside = peer.Beside({"a": "--some"}, 0.5, OPEN_S, math.inf)
    found = await peer.measure(plan(sides), beside, lambda _: None)
    assert Counter(asked(sides[0])) == Counter(asked(sides[1]))
    assert set(Counter(asked(sides[0])).values()) == {1}  # no image comes again
    answered = [
        (after[0] - before[0], after[1] - before[1])
        for before, after in zip(looked[::2], looked[1::2], strict=True)
    ]
    closed = answered[2:4] + answered[6:]  # the first repeat; open arrivals; the others
    assert closed == [(COUNT, 0), (0, COUNT), (0, COUNT), (COUNT, 0), (COUNT, 0), (0, COUNT)]
    assert all(0 in both for both in answered)  # one is loaded at a time
    first, second, opened, _ = found["rows"]
    assert [row["figures"]["j_per_req"] for row in found["rows"]] == [12.0, 30.0, 12.0, 30.0]
    assert (first["repeats"], opened["repeats"]) == (REPEATS, 1)
    rate = float(opened["arrival"].removeprefix("Poisson(per_s=").removesuffix(")"))
    assert opened["figures"]["requests"] == math.ceil(OPEN_S * rate)
    low, high = zip(*(row["spread"]["req_per_s"] for row in (first, second)), strict=True)
    assert 0.5 * min(low) - 0.01 <= rate <= 0.5 * min(high) + 0.01
    good = [opened["figures"][peer_table.goodput_name(ms)] for ms in peer.GAPS_MS]
    assert good == sorted(good) and 0 < good[-1] <= opened["figures"]["req_per_s"]
    assert found["sides"] == [
        {"name": "a", "version": "1.0", "flags": "--some"},
        {"name": "b", "version": "1.0", "flags": ""},
    ]


async def test_a_cut_run_has_what_it_measured(sides: list[FakeServer]) -> None:
    """No workload is left out for want of time, but repeats are."""
    kept: list[list[Any]] = []
    beside = peer.Beside({}, 0.5, OPEN_S, 0.0)
    found = await peer.measure(
        plan(sides, "one", "two"), beside, lambda told: kept.append([*told["rows"]])
    )
    assert [len(rows) for rows in kept] == [2, 4, 6, 8] and kept[-1] == found["rows"]
    assert {row["repeats"] for row in found["rows"]} == {1}
    assert [row["workload"] for row in found["rows"]] == ["one"] * 4 + ["two"] * 4


async def test_replicas_of_a_side_take_turns(sides: list[FakeServer]) -> None:
    both = serve.Target("a", url=",".join(side.url for side in sides))
    await peer.measure(
        replace(plan(sides), targets=(both,)), peer.Beside({}, 1.0, 0.0, math.inf), lambda _: None
    )
    first, second = (len(side.bodies) for side in sides)
    assert first + second > REPEATS * COUNT and abs(first - second) <= 1


async def test_models_of_two_names_are_refused(sides: list[FakeServer]) -> None:
    sides[1].name = "other"
    with pytest.raises(ServerError, match="their models fake, other"):
        await peer.measure(plan(sides), peer.Beside({}, 1.0, 0.0, 1.0), lambda _: None)


def test_the_table_has_ratios_to_the_first(tmp_path: Path) -> None:
    def row(server: str, stream: str, **figures: float) -> dict[str, Any]:
        times = {f"{what}_ms_p{n}": 10.0 for what in ("ttft", "itl", "e2e") for n in (50, 99)}
        one = times | {"tpot_ms_p50": 8.0, peer_table.goodput_name(50): 3.0} | figures
        return {
            "workload": "text", "stream": stream, "server": server, "repeats": 3, "figures": one,
        }  # fmt: skip

    report = {
        "gpus": ["Card, driver 1"], "versions": {"torch": "2"}, "date": "2026-01-01",
        "sides": [{"name": n, "version": "1", "flags": f"--{n}"} for n in ("peer", "ours")],
        "rows": [
            row("peer", "text", req_per_s=20.0, j_per_req=40.0),
            row("ours", "text", req_per_s=25.0, j_per_req=30.0),
            row("peer", "open", req_per_s=13.0), row("ours", "open", req_per_s=13.5),
        ],
    }  # fmt: skip
    (tmp_path / "peer.json").write_text(json.dumps(report))
    lines = table(tmp_path / "peer.json").splitlines()
    assert lines[0] == "Card, driver 1; torch 2; 2026-01-01. peer 1: `--peer`. ours 1: `--ours`."
    assert lines[-2].startswith("| text | peer | 20.00 | 10 / 10 | 8.0 |")
    assert "| ours | 25.00 (1.25) | 10 (1.00) / 10 (1.00) | 8.0 (1.00) |" in lines[-1]
    assert lines[-1].endswith("| 30.0 (0.75) | 3 | 3.00 of 13.50 |")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["http://x"], "write NAME="),
        (["a=http://x", "--workload", "mixed"], "one stream of users"),
        (["a=http://x", "--flags", "b=--more"], "no server has that name"),
        (["a=http://x", "--seconds", "0"], "above 0"),
    ],
)
def test_what_cannot_be_measured(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "peer", *words, "--save", str(tmp_path / "p.json")]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.long
def test_two_servers_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save = tmp_path / "peer.json"
    words = "bench peer a=1epd b=1epd --workload small --requests 6 --repeats 2 --open-s 2".split()
    assert main([*words, "--threads", "1", "--save", str(save)]) == 0
    rows = json.loads(save.read_text())["rows"]
    assert [row["server"] for row in rows] == ["a", "b"] * 2
    assert all(row["figures"]["failed"] == 0 for row in rows)
    assert table(save) in capsys.readouterr().out
