"""What a run showed: what is wrong, lost or held, how long streams paused, which bounds broke."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from epd.config import Timing
from epd.scheduling.deaths import MAX_DEATHS
from epd_lab.bench.chaos.clients import ChaosAnswer, ChaosChoice
from epd_lab.bench.chaos.outages import Outages
from epd_lab.bench.chaos.plan import Fault, Wish
from epd_lab.bench.chaos.questions import Question
from epd_lab.bench.servers.figures import percentile

SHOWN = 5  # of wrong answers, with their requests
BEFORE_S = 1.0  # a pause begins so soon behind its fault
LOSSES = ("kill", "stop", "cut")
# A request that meets so many may fail: an input at which two died is poison, attempts are counted.
MOST_MET = {"poison": MAX_DEATHS, "": Timing().max_attempts}


@dataclass(slots=True)
class Run:
    """All that was seen; times in seconds since the load began."""

    wish: Wish
    asked: Sequence[Question]
    outages: Outages
    right: dict[str, dict[int, ChaosChoice]] = field(default_factory=dict)
    answers: list[ChaosAnswer] = field(default_factory=list)
    faults: list[tuple[float, Fault]] = field(default_factory=list)
    num_moved: int = 0  # requests that were asked of a further gateway
    lasted_s: float = 0.0
    in_use: dict[str, float] = field(default_factory=dict)
    away: list[str] = field(default_factory=list)  # at the end, after all patience
    left_behind: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def met(self, begin_s: float, end_s: float) -> int:
        """Losses that came then."""
        times = (at_s for at_s, fault in self.faults if fault.kind in LOSSES)
        return sum(begin_s - BEFORE_S <= at_s <= end_s for at_s in times)

    def must_answer(self, failed: ChaosAnswer) -> bool:
        begin_s, end_s = failed.began_s, failed.ended_s
        most = MOST_MET["poison" if "poison" in failed.error else ""]
        return self.met(begin_s, end_s) < most and not self.outages.lacked(begin_s, end_s)

    def pauses(self) -> list[tuple[float, float, bool, int, str]]:
        """The longest first: how long, since when, whether a stage had no instance, losses, id."""
        lacked, met = self.outages.lacked, self.met
        return sorted(
            (
                (round(to - at, 2), round(at, 1), lacked(at, to), met(at, to), answer.request_id)
                for answer in self.answers
                for at, to in answer.pauses
            ),
            reverse=True,
        )


def is_wrong(answer: ChaosAnswer, right: Mapping[int, ChaosChoice]) -> bool:
    """A whole answer is another one; or one that ended early is no beginning of the right one."""
    if answer.is_whole:
        return answer.said != right
    return not all(choice.begins(right[index]) for index, choice in answer.said.items())


def verdict(run: Run) -> dict[str, Any]:
    """One JSON object; `broken` has a sentence for each bound that does not hold."""
    wrong = [answer for answer in run.answers if is_wrong(answer, run.right[answer.question])]
    failed = [answer for answer in run.answers if answer.error]
    whole = [answer for answer in run.answers if answer.is_whole]
    bodies = {question.name: question.body for question in run.asked}
    lacked = run.outages.lacked
    errors = Counter(
        (a.error, not lacked(a.began_s, a.ended_s), run.must_answer(a)) for a in failed
    )
    paused = run.pauses()
    with_second = [(lasted_s, met) for lasted_s, _, alone, met, _ in paused if not alone]
    each_s = max((lasted_s / max(1, met) for lasted_s, met in with_second), default=0.0)
    first_s = [(a.first_s - a.began_s) for a in run.answers if a.first_s]
    found: dict[str, Any] = {
        "wish": asdict(run.wish),
        "faults": dict(Counter(fault.kind for _, fault in run.faults)),
        "skipped": run.skipped,
        "requests": len(run.answers),
        "answered": len(whole),
        "asked_of_another_gateway": run.num_moved,
        "left": sum(answer.has_left for answer in run.answers),
        "wrong": len(wrong),
        "replay": [
            asdict(answer) | {"body": bodies[answer.question], "right": run.right[answer.question]}
            for answer in wrong[:SHOWN]
        ],
        "errors": [
            {"kind": kind, "second_instance": second, "must_not": must, "count": count}
            for (kind, second, must), count in errors.most_common()
        ],
        "failed": [asdict(a) | {"losses": run.met(a.began_s, a.ended_s)} for a in failed[:SHOWN]],
        "leaks": run.in_use,
        "not_back": run.away,
        "left_behind": run.left_behind,
        "longest_pause_s": with_second[0][0] if with_second else 0.0,
        "longest_pause_of_one_loss_s": round(each_s, 2),
        "longest_pause_without_a_second_s": next((p[0] for p in paused if p[2]), 0.0),
        "paused": [
            dict(zip(("lasted_s", "from_s", "alone", "losses", "request"), pause, strict=True))
            for pause in paused[:SHOWN]
        ],
        "first_token_s": {f"p{p}": round(percentile(first_s, p), 2) for p in (50, 99, 100)},
        "stage_lacking_s": round(run.outages.lacking_s(run.lasted_s), 1),
        "answered_per_s": round(len(whole) / max(run.lasted_s, 1e-9), 2),
    }
    return found | {"broken": broken(found, run.wish)}


def broken(found: Mapping[str, Any], wish: Wish) -> list[str]:
    lost = sum(error["count"] for error in found["errors"] if error["must_not"])
    checks = (
        (found["wrong"], f"{found['wrong']} answers are wrong"),
        (lost, f"{lost} requests failed though each stage had an instance"),
        (found["leaks"], f"still in use at the end: {found['leaks']}"),
        (found["not_back"], f"did not come back: {', '.join(found['not_back'])}"),
        (found["left_behind"], f"at the end: {found['left_behind']}"),
        (
            found["longest_pause_of_one_loss_s"] > wish.max_pause_s,
            f"a stream paused for {found['longest_pause_of_one_loss_s']} s by a single loss",
        ),
        (not found["answered"] or not found["faults"], "nothing was shown: no answer or no fault"),
    )
    return [sentence for holds_not, sentence in checks if holds_not]
