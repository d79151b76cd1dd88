"""What a run showed: what is wrong, lost or held, how long streams paused, which bounds broke."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from epd_lab.bench.chaos.clients import ChaosAnswer, ChaosChoice
from epd_lab.bench.chaos.outages import Outages
from epd_lab.bench.chaos.plan import Fault, Wish
from epd_lab.bench.chaos.questions import Question
from epd_lab.bench.servers.figures import percentile

SHOWN = 5  # of wrong answers, with their requests


@dataclass(slots=True)
class Run:
    """All that was seen; times in seconds since the load began."""

    wish: Wish
    asked: Sequence[Question]
    outages: Outages
    right: dict[str, dict[int, ChaosChoice]] = field(default_factory=dict)
    answers: list[ChaosAnswer] = field(default_factory=list)
    faults: list[tuple[float, Fault]] = field(default_factory=list)
    lasted_s: float = 0.0
    in_use: dict[str, float] = field(default_factory=dict)
    away: list[str] = field(default_factory=list)  # at the end, after all patience
    left_behind: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


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
    errors = Counter((a.error, not lacked(a.began_s, a.ended_s)) for a in failed)
    paused = sorted(
        (round(end - begin, 2), round(begin, 1), lacked(begin, end), a.request_id, a.question)
        for a in run.answers
        for begin, end in a.pauses
    )[::-1]
    longest_s = next((pause[0] for pause in paused if not pause[2]), 0.0)
    first_s = [(a.first_s - a.began_s) for a in run.answers if a.first_s]
    found: dict[str, Any] = {
        "wish": asdict(run.wish),
        "faults": dict(Counter(fault.kind for _, fault in run.faults)),
        "skipped": run.skipped,
        "requests": len(run.answers),
        "answered": len(whole),
        "left": sum(answer.has_left for answer in run.answers),
        "wrong": len(wrong),
        "replay": [
            asdict(answer) | {"body": bodies[answer.question], "right": run.right[answer.question]}
            for answer in wrong[:SHOWN]
        ],
        "errors": [
            {"kind": kind, "second_instance": second, "count": count}
            for (kind, second), count in errors.most_common()
        ],
        "failed": [asdict(answer) for answer in failed[:SHOWN]],
        "leaks": run.in_use,
        "not_back": run.away,
        "left_behind": run.left_behind,
        "longest_pause_s": longest_s,
        "longest_pause_without_a_second_s": next((p[0] for p in paused if p[2]), 0.0),
        "paused": [
            dict(zip(("lasted_s", "from_s", "alone", "request", "question"), pause, strict=True))
            for pause in paused[:SHOWN]
        ],
        "first_token_s": {f"p{p}": round(percentile(first_s, p), 2) for p in (50, 99, 100)},
        "stage_lacking_s": round(run.outages.lacking_s(run.lasted_s), 1),
        "answered_per_s": round(len(whole) / max(run.lasted_s, 1e-9), 2),
    }
    return found | {"broken": broken(found, run.wish)}


def broken(found: Mapping[str, Any], wish: Wish) -> list[str]:
    lost = sum(error["count"] for error in found["errors"] if error["second_instance"])
    checks = (
        (found["wrong"], f"{found['wrong']} answers are wrong"),
        (lost, f"{lost} requests failed though each stage had an instance"),
        (found["leaks"], f"still in use at the end: {found['leaks']}"),
        (found["not_back"], f"did not come back: {', '.join(found['not_back'])}"),
        (found["left_behind"], f"at the end: {found['left_behind']}"),
        (
            found["longest_pause_s"] > wish.max_pause_s,
            f"a stream paused for {found['longest_pause_s']} s; at most {wish.max_pause_s:g} s",
        ),
        (not found["answered"] or not found["faults"], "nothing was shown: no answer or no fault"),
    )
    return [sentence for holds_not, sentence in checks if holds_not]
