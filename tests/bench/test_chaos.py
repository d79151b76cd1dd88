"""`epd bench chaos` without processes: its plan, its books, its verdict, its picture."""

from __future__ import annotations

import dataclasses
import json
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.cli.main import main
from epd.config import ConfigError
from epd_lab.bench import plots
from epd_lab.bench.chaos.clients import ChaosAnswer, ChaosChoice
from epd_lab.bench.chaos.outages import Outages
from epd_lab.bench.chaos.plan import KINDS, Fault, Wish, faults_of, members_of, parts_of
from epd_lab.bench.chaos.questions import questions
from epd_lab.bench.chaos.verdict import Run, verdict

WISH = Wish(partition=True)
MEMBERS = members_of(WISH)
ASKED = questions(1)


def entries(epochs: dict[str, int], lost: tuple[str, ...] = ()) -> dict[str, dict[str, object]]:
    return {
        m.name: {"epoch": epochs.get(m.name, 1), "state": "LOST" if m.name in lost else "HEALTHY"}
        for m in MEMBERS
    }


def test_a_plan_follows_from_its_seed_and_has_everything() -> None:
    plan = faults_of(WISH)
    assert plan == faults_of(WISH) != faults_of(dataclasses.replace(WISH, seed=2))
    two = faults_of(Wish(num_gateways=2))
    assert {fault.who for fault in two if fault.kind == "gateway"} == {"0", "1"}
    assert {fault.kind for fault in (*plan, *two)} == {*KINDS}
    assert {fault.who for fault in plan if fault.kind == "kill"} == {m.name for m in MEMBERS}
    assert sum(fault.kind == "kill" for fault in plan) == 90
    ranks = {f.rank for f in faults_of(Wish("2e2pd:tp2")) if f.who.startswith("pd")}
    assert ranks == {0, 1}


def test_a_topology_is_shared_between_hosts() -> None:
    assert parts_of("2e2p2d") == ("1e1p1d", "1e1p1d")
    assert parts_of("3e2pd:tp2") == ("1e1e1pd:tp2", "1e1pd:tp2")
    with pytest.raises(ConfigError, match="two of nothing"):
        parts_of("1e1p1d")


def test_the_plan_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "chaos", "--plan", "--minutes", "1", "--seed", "5"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == [str(fault) for fault in faults_of(Wish(minutes=1, seed=5))]
    assert main(["bench", "chaos", "--plan", "--stop", "4"]) == 2


@given(st.lists(st.sampled_from(faults_of(WISH)), max_size=12), st.randoms())
def test_no_stage_loses_its_last_instance(faults: list[Fault], chance: object) -> None:
    """Whatever comes in whatever order, and is over or not."""
    outages, epochs = Outages(MEMBERS), {}
    outages.see(entries(epochs), 0.0)
    for at_s, fault in enumerate(faults):
        if not outages.may(fault):
            continue
        names = outages.hit_by(fault)
        outages.hit(names, float(at_s), ends=fault.kind == "kill")
        assert {*names} <= {*outages.away}
        if chance.random() < 0.5:  # type: ignore[attr-defined]
            if fault.kind == "kill":
                epochs[fault.who] = epochs.get(fault.who, 1) + 1
            else:
                outages.release(names, at_s + 0.3)
            outages.see(entries(epochs), at_s + 0.5)
    assert not outages.lacked(0.0, 100.0)


def test_what_fails_without_any_fault_is_noticed() -> None:
    """Both encoders were lost from 2 s to 3 s, by nobody's plan."""
    outages = Outages(MEMBERS)
    outages.see(entries({}), 0.0)
    outages.see(entries({}, lost=("e0", "b/e0")), 2.0)
    outages.see(entries({}), 3.0)
    whens = ((0, 1.9), (1, 2.5), (2.2, 2.3), (2.9, 9), (3.1, 4))
    assert [outages.lacked(*when) for when in whens] == [False, True, True, True, False]
    assert outages.lacking_s(10.0) == 1.0


TWO = [(at_s, faults_of(WISH)[0]) for at_s in (1.5, 4.0)]


def run_of(*answers: ChaosAnswer, **changes: object) -> Run:
    outages, asked = Outages(MEMBERS), ASKED
    outages.see(entries({}), 0.0)
    right = {question.name: {0: ChaosChoice("abc", "61 62 63 ", "length")} for question in asked}
    run = Run(WISH, asked, outages, right, list(answers), [(1.0, faults_of(WISH)[0])], 20.0)
    return dataclasses.replace(run, **changes)  # type: ignore[arg-type]


def answer(text: str = "abc", **changes: object) -> ChaosAnswer:
    tokens = "".join(f"{letter.encode().hex()} " for letter in text)
    said = {0: ChaosChoice(text, tokens, "length")}
    made = ChaosAnswer(ASKED[7].name, 1.0, 5.0, 1.5, [(2.0, 4.0)], said)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answers", "changes", "sentence"),
    [
        ((answer(), answer("ab", has_left=True)), {}, ""),
        ((answer("abd"),), {}, "1 answers are wrong"),
        ((answer(), answer("b", has_left=True)), {}, "1 answers are wrong"),
        ((answer(), answer("ab", error="503 busy")), {}, "1 requests failed"),
        ((answer(), answer("ab", error="503 busy")), {"faults": TWO}, "1 requests failed"),
        ((answer(), answer("ab", error="503 busy")), {"faults": 2 * TWO}, ""),
        ((answer(), answer("", error="422 poison")), {"faults": TWO[:1]}, "1 requests failed"),
        ((answer(), answer("", error="422 poison")), {"faults": TWO}, ""),
        ((answer(pauses=[(2.0, 8.5)]),), {}, "paused for 6.5 s"),
        ((answer(pauses=[(2.0, 8.5)]),), {"faults": TWO}, ""),
        ((answer(),), {"in_use": {"slots": 1.0}}, "still in use"),
        ((answer(),), {"away": ["p0"]}, "did not come back: p0"),
        ((answer(),), {"left_behind": ["process 7"]}, "process 7"),
        ((answer(),), {"faults": []}, "nothing was shown"),
        ((), {}, "nothing was shown"),
    ],
)
def test_each_bound_can_break(
    answers: tuple[ChaosAnswer, ...], changes: dict[str, object], sentence: str
) -> None:
    found = verdict(run_of(*answers, **changes))
    assert len(found["broken"]) == bool(sentence) and sentence in str(found["broken"])
    told = json.loads(json.dumps(found, default=dataclasses.asdict))
    for wrong in told["replay"]:
        assert wrong["body"]["messages"] and wrong["right"]["0"]["text"] == "abc"


def test_the_picture_has_every_fault_and_pause() -> None:
    run = run_of(answer(), answer(error="503 busy"), faults=[(f.at_s, f) for f in faults_of(WISH)])
    drawn = plots.chaos(run)
    ET.fromstring(drawn)
    assert drawn.count("<circle") == 2
    assert drawn.count('stroke-width="8"') == len(run.faults)


def test_questions_differ_in_everything() -> None:
    asked = questions(1)
    assert asked == questions(1) and len({question.name for question in asked}) == len(asked) == 38
    bodies = [json.dumps(question.body) for question in asked]
    for word in ("video_url", "structured_outputs", "tools", '"n": 2', "seed", "_penalty"):
        assert any(word in body for body in bodies), word
    assert max(body.count("image_url") for body in bodies) == 2 * 4
