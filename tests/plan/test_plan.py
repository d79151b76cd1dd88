"""`epd plan`: what it ranks first, what it prints, and what it refuses."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.cli.main import main
from epd.config import ConfigError
from epd_lab.bench.servers.figures import Slo, figures
from epd_lab.bench.servers.openai_load import Sample
from epd_lab.bench.traces import form
from epd_lab.bench.workload import NAMED, Bursts, Closed, Poisson, named
from epd_lab.plan import costs, limits, topologies
from epd_lab.plan.search import (
    KNOBS,
    Outcome,
    PlanCandidate,
    PlanWish,
    ranked,
    scaled,
    search,
    stage_s,
    what_changes,
)

KNOWN = costs.read(costs.BUNDLED)
SLO = Slo(1.0, math.inf, 0.05)
WISH = PlanWish(KNOWN, NAMED["small"], SLO)
WORK_S = {"encode": 1.0, "prefill": 1.0, "decode": 1.0}
Answers = Callable[[PlanCandidate], tuple[int, float, float]]


def outcome(candidate: PlanCandidate, good: int, ttft_s: float, itl_s: float) -> Outcome:
    """A hundred requests in a hundred seconds, of which so many have these times."""
    samples = [
        Sample(float(n), n + 1.0, ttft_s if n < good else 9.0, [itl_s], 8, 2) for n in range(100)
    ]
    return Outcome(candidate, samples, figures(samples, SLO), [])


def runner(
    answers: Answers, asked: list[PlanCandidate]
) -> Callable[[Sequence[PlanCandidate]], list[Outcome]]:
    def run(candidates: Sequence[PlanCandidate]) -> list[Outcome]:
        asked.extend(candidates)
        return [outcome(one, *answers(one)) for one in candidates]

    return run


@given(st.integers(1, 6), st.tuples(*[st.floats(0.01, 10.0)] * 3))
def test_no_split_has_a_higher_bound_than_replicas(num_gpus: int, work: tuple[float, ...]) -> None:
    stages = dict(zip(("encode", "prefill", "decode"), work, strict=True))
    first, *others = topologies.sensible(num_gpus)
    bound = topologies.bound_per_s(first, stages)
    assert bound == pytest.approx(num_gpus / sum(work))
    assert all(topologies.bound_per_s(name, stages) <= bound * 1.000001 for name in others)


def test_bounds_are_those_of_the_stage_that_ends_it() -> None:
    stages = {"encode": 4.0, "prefill": 1.0, "decode": 1.0}
    assert topologies.bound_per_s("1e1pd", stages) == 0.25
    assert topologies.bound_per_s("1ep1ed", stages) == pytest.approx(2 / 6)
    assert topologies.promising(["3epd", "1e2pd", "2e1pd"], stages, 2) == ["3epd", "2e1pd"]


def test_stages_of_an_image_are_those_of_the_cost_file() -> None:
    """As docs/topologies.md has it: about as long in the tower as in the prompt."""
    work = stage_s(KNOWN, list(limits.requests_of(KNOWN, NAMED["1x1080p"])))
    assert work["encode"] == pytest.approx(KNOWN.tower_s([8160]))
    assert 0.8 < work["encode"] / work["prefill"] < 1.25
    assert work["decode"] < work["prefill"]


def test_goodput_decides_and_then_room() -> None:
    few, more = (
        outcome(PlanCandidate("1e1pd"), 50, 0.1, 0.01),
        outcome(PlanCandidate("2epd"), 60, 0.9, 0.04),
    )
    assert ranked([few, more], SLO) == [more, few]
    near = outcome(PlanCandidate("1ep1ed"), 60, 0.85, 0.04)
    assert ranked([near, more], SLO) == [more, near], "replicas, where they are alike"
    roomy = (
        outcome(PlanCandidate("1ep1d"), 99, 0.2, 0.01),
        outcome(PlanCandidate("2epd"), 100, 0.9, 0.04),
    )
    assert ranked(roomy, SLO)[0].candidate.topology == "1ep1d", "but with much more room"


def test_a_setting_is_kept_where_it_is_worth_more_than_noise() -> None:
    def answers(one: PlanCandidate) -> tuple[int, float, float]:
        base = {"2epd": 60, "1ep1ed": 80}.get(one.topology, 10)
        gains: dict[tuple[str, ...], int] = {(KNOBS[0],): 1, (KNOBS[2],): 9}
        gain = gains.get(one.changes, 0)
        return base + gain, 0.5, 0.02

    asked: list[PlanCandidate] = []
    order = search(WISH, topologies.sensible(2), WORK_S, runner(answers, asked))
    assert [one.candidate.topology for one in order[:2]] == ["1ep1ed", "2epd"]
    assert [one.candidate.changes for one in order[:2]] == [(KNOBS[2],)] * 2
    assert {one.topology for one in asked if one.changes} < {one.topology for one in asked}
    fixed = PlanWish(KNOWN, NAMED["small"], SLO, (KNOBS[2],))
    asked.clear()
    search(fixed, topologies.sensible(2), WORK_S, runner(answers, asked))
    assert not any(KNOBS[2] in one.changes for one in asked), "who gives it keeps it"


def test_what_would_have_to_change_is_found_by_halving() -> None:
    """The second wins above 1.3 times the load, and where the bound of gaps is below 40 ms."""

    def answers(one: PlanCandidate) -> tuple[int, float, float]:
        if one.topology == "2epd":
            return (90 if one.load < 1.3 else 20), 0.5, 0.04
        return 80, 0.5, 0.01

    asked: list[PlanCandidate] = []
    run = runner(answers, asked)
    order = run([PlanCandidate("2epd"), PlanCandidate("1ep1ed")])
    ((itl, load),) = what_changes(WISH, order, run)
    name, _, bound = itl.partition("=")
    assert name == "itl"
    assert 36 <= float(bound.removesuffix("ms")) < 40
    times = float(load.removesuffix(" x the load"))
    assert 1.3 <= times < 1.3 * 2 ** (1 / 8) + 0.01
    assert len(set(asked)) == len(asked), "nothing is run twice"


def test_of_a_load_there_is_more_or_less_for_as_long() -> None:
    chat, burst = scaled(NAMED["mixed"], 0.5).streams
    assert (chat.arrival, chat.count) == (Closed(8), 64)
    assert (burst.arrival, burst.count) == (Bursts(4, 5.0), 12)
    (stream,) = scaled(named("text@30"), 2.0).streams
    assert (stream.arrival, stream.count, stream.name) == (Poisson(60.0), 512, "text@30")


def test_the_verb_prints_a_command_that_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = [
        "plan",
        "--gpus",
        "2",
        "--card",
        "h200",
        "--load",
        "small",
        "--users",
        "2",
        "--jobs",
        "1",
    ]
    few = ["--topology", "2epd", "--topology", "1ep1ed", "--set", "engine.max_quantum_ms=5"]
    drawn = tmp_path / "plan.svg"
    assert main([*asked, *few, "--set", "placement=auto", "--plot", str(drawn)]) == 0
    told = capsys.readouterr().out
    assert "predicted, not measured: qwen3-vl-4b-shape on NVIDIA H200" in told
    (command,) = [line for line in told.splitlines() if line.startswith("python -m epd run")]
    assert "--topology 2epd --model DIR --device cuda:0,cuda:1" in command
    flags = shlex.split(command)[3:]
    assert main([*flags, "--show-config"]) == 0
    shown = msgspec.json.decode(capsys.readouterr().out)
    assert shown["engine"]["max_quantum_ms"] == 5
    assert drawn.read_text().startswith("<svg")


def test_errors_of_a_report_are_kept_in_the_cost_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = [
        {"workload": "3x560-c1", "stream": "3x560-c1", "server": name,
         "figures": {"req_per_s": rate, "goodput_req_per_s": rate}}
        for name, rate in (("1epd", 2.0), ("2epd", 1.0))
    ]  # fmt: skip
    seen, own = tmp_path / "gpu.json", tmp_path / "costs.json"
    report = {"date": "2026-11-30", "slo": {"ttft_s": 1.0}, "rows": rows}
    seen.write_bytes(msgspec.json.encode(report))
    costs.write(KNOWN, own)
    asked = ["plan", "--costs", str(own), "--measured", str(seen), "--jobs", "1"]
    assert main([*asked, "--keep"]) == 0
    told = costs.read(own).compared
    assert told is not None
    assert str(told) in capsys.readouterr().out
    assert told.report == "gpu.json"
    assert told.ordered == (0, 1), "a second GPU does not halve it"
    errors = [error for _, _, error in told.errors]
    assert errors[1] == pytest.approx(2 * errors[0] + 1, abs=0.1)
    assert f"off by {max(errors):.0%} (median)" in str(told)


def test_a_trace_is_a_load(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "day.jsonl"
    trace = [form.TraceRequest(n / 4, 40, 4, (form.Picture(112, 112, n),)) for n in range(8)]
    form.write(trace, file)
    asked = ["plan", "--card", "h200", "--load", str(file), "--jobs", "1", "--topology", "1epd"]
    settings = [flag for knob in KNOBS for flag in ("--set", knob)]
    assert main([*asked, *settings, "--json"]) == 0
    (row,) = msgspec.json.decode(capsys.readouterr().out)["rows"]
    assert (row["server"], row["figures"]["requests"], row["figures"]["failed"]) == ("1epd", 8, 0)
    form.write([*trace, form.TraceRequest(3.0, 90_000, 4)], file)
    assert main(asked) == 2
    assert "a request has 90009 tokens with its answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--gpus", "-1"], "--gpus -1: at least 1"),
        (["--users", "0"], "--users 0: at least 1"),
        (["--load", "text@9", "--users", "3"], "of a load that has users"),
        (["--topology", "2x"], "'x' is no role"),
        (["--topology", "1epd:tp2"], ":tp is for epd run"),
        (["--load", "tall"], "there is no workload"),
        (["--load", __file__], "line 1: "),
        (["--slo", "ttft=soon"], "--slo 'ttft=soon'"),
        (["--transport", "pigeon"], "choose cuda, shm"),
        (["--costs", "no.json"], "no.json"),
        (["--measured", "no.json"], "no.json"),
        (["--set", "engine.speed=9"], "engine.speed"),
        (["--card", "h100"], "--card h100: there are costs of NVIDIA H200"),
        (["--model", "8b"], "is another model or form; measure it"),
        (["--model", "4b", "--set", "engine.quantization=fp8"], "4b (fp8, KV auto)"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_said(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--card", "h200", *flags]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"longest": 1000}, "1285 tokens with its answer, and steps were calibrated up to 1000"),
        ({"patches_ms": ((1296, 3.0),)}, "8160 patches, and images were calibrated up to 1296"),
    ],
)
def test_what_was_not_calibrated_is_refused(change: dict[str, object], said: str) -> None:
    part = "step" if "longest" in change else "tower"
    less = msgspec.structs.replace(
        KNOWN, **{part: msgspec.structs.replace(getattr(KNOWN, part), **change)}
    )
    with pytest.raises(ConfigError, match=said):
        list(limits.requests_of(less, NAMED["text" if part == "step" else "1x1080p"]))
