"""Which topology, with which settings, holds an SLO for most requests: a search in the simulator.

Theory of operation
-------------------
Topologies with the highest bounds by arithmetic run the load, and replicas always do.  Of the best
few, one setting at a time is changed (`KNOBS`): quanta, with which slices of images go, the budget
of a step, placement.  It is kept where it is worth more than `TIE`.  The rank is that of requests a
second that hold the SLO.  Where these are alike, replicas come first, which lose least when one
ends, unless another leaves much more room to the bounds (`ROOM`).

For those behind the first the search has what would have to change.  Other bounds of the SLO need
no other run, only another count.  Other loads are run, and halved between towards the nearest at
which the order is another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from epd_lab.bench.servers.figures import Figures, Slo, figures, percentile
from epd_lab.bench.servers.openai_load import Sample
from epd_lab.bench.traces.form import Trace, at_rate
from epd_lab.bench.workload import Workload, crowded
from epd_lab.plan.costs import Costs
from epd_lab.plan.run import ForecastPlan, gpu_settings, samples_of
from epd_lab.plan.topologies import is_replicas, promising
from epd_lab.plan.traced import forecast

TIE = 0.02  # goodput of two that differ by less is alike
ROOM = 0.8
NUM_RUN, NUM_TUNED, NUM_SHOWN = 10, 3, 3
KNOBS = (
    "engine.max_quantum_ms=0",
    "engine.max_quantum_ms=20",
    "engine.max_step_tokens=2048",
    "placement=fixed",
)
LOADS = (0.5, 2.0)  # times the load, between which the order is looked for
HALVINGS = 3
FACTORS = sorted((1.05**n for n in range(-28, 29) if n), key=lambda f: abs(math.log(f)))


@dataclass(frozen=True, slots=True)
class PlanWish:
    """What is to be served, by what."""

    costs: Costs
    workload: Workload
    slo: Slo
    assignments: tuple[str, ...] = ()
    transport: str = ""
    trace: Trace = ()  # is asked instead of the workload, where there is one


@dataclass(frozen=True, slots=True)
class PlanCandidate:
    topology: str
    changes: tuple[str, ...] = ()  # of settings
    load: float = 1.0  # times the wish's


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a candidate does.  Of each sample's gaps only the p99 is kept."""

    candidate: PlanCandidate
    samples: list[Sample]
    figures: Figures
    errors: list[str]

    def goodput(self, slo: Slo) -> float:
        """Requests that hold it, per second."""
        began_s = min((sample.sent_s for sample in self.samples), default=0.0)
        ended_s = max((sample.ended_s for sample in self.samples), default=0.0)
        return sum(map(slo.kept_by, self.samples)) / (ended_s - began_s or 1e-9)

    def taken(self, slo: Slo) -> float:
        """What 99 of 100 requests take of their bounds, as a share."""
        return percentile([_taken(sample, slo) for sample in self.samples], 99)


Runner = Callable[[Sequence[PlanCandidate]], list[Outcome]]


def _taken(sample: Sample, slo: Slo) -> float:
    itl_s = percentile(sample.gaps_s, 99)
    times = (sample.ttft_s / slo.ttft_s, sample.tpot_s / slo.tpot_s, itl_s / slo.itl_s)
    return math.inf if sample.error else max(times)


def outcome(wish: PlanWish, candidate: PlanCandidate) -> Outcome:
    """By one run.  Raises ConfigError."""
    settings = gpu_settings((*wish.assignments, *candidate.changes))
    load = scaled(wish.workload, candidate.load)
    plan = ForecastPlan(wish.costs, candidate.topology, load, settings, wish.transport, wish.slo)
    if wish.trace:
        rate = candidate.load * len(wish.trace) / max(wish.trace[-1].arrival_s, 1e-9)
        samples = forecast(plan, at_rate(wish.trace, rate))
    else:
        by_stream, _ = samples_of(plan, 0)
        samples = [sample for found in by_stream.values() for sample in found]
    errors = sorted({sample.error for sample in samples if sample.error})
    few = [replace(sample, gaps_s=[percentile(sample.gaps_s, 99)]) for sample in samples]
    return Outcome(candidate, few, figures(samples, wish.slo), errors[:5])


def scaled(workload: Workload, by: float) -> Workload:
    """So many times the load, for as long."""
    streams = [replace(crowded(s, by), count=max(1, round(s.count * by))) for s in workload.streams]
    return replace(workload, streams=tuple(streams))


def stage_s(costs: Costs, requests: Sequence[tuple[int, int, Sequence[int]]]) -> dict[str, float]:
    """Seconds of a device for a request on average, by role.  `requests`: tokens of the prompt and
    the answer, patches of each image.  Decodes share their steps with 63 others."""
    total = dict.fromkeys(("encode", "prefill", "decode"), 0.0)
    for prompt, answer, images in requests:
        if images:
            total["encode"] += costs.tower_s(images)
        total["prefill"] += costs.step_s(prompt, 0, prompt * prompt / 2, mixed=False)
        total["decode"] += answer * costs.step_s(64, 64 * prompt, 0, mixed=False) / 64
    return {role: seconds / max(1, len(requests)) for role, seconds in total.items()}


def ranked(outcomes: Sequence[Outcome], slo: Slo) -> list[Outcome]:
    """The best first."""
    left, found = sorted(outcomes, key=lambda one: -one.goodput(slo)), list[Outcome]()
    while left:
        least = left[0].goodput(slo) * (1 - TIE)
        alike = [one for one in left if one.goodput(slo) >= least]
        found += sorted(
            alike,
            key=lambda one: one.taken(slo) * (ROOM if is_replicas(one.candidate.topology) else 1.0),
        )
        left = left[len(alike) :]
    return found


def search(
    wish: PlanWish, topologies: Sequence[str], work_s: dict[str, float], run: Runner
) -> list[Outcome]:
    """One outcome of each topology that was run, the best first."""
    names = promising(topologies, work_s, NUM_RUN)
    best = {one.candidate.topology: one for one in run([PlanCandidate(name) for name in names])}
    order = ranked(list(best.values()), wish.slo)
    few = [one.candidate.topology for one in order[:NUM_TUNED]]
    given = {text.partition("=")[0] for text in wish.assignments}
    knobs = [knob for knob in KNOBS if knob.partition("=")[0] not in given]
    for one in run([PlanCandidate(name, (knob,)) for name in few for knob in knobs]):
        before = best[one.candidate.topology]
        if one.goodput(wish.slo) > before.goodput(wish.slo) * (1 + TIE):
            best[one.candidate.topology] = one
    return ranked(list(best.values()), wish.slo)


def what_changes(wish: PlanWish, order: Sequence[Outcome], run: Runner) -> list[list[str]]:
    """For each but the first, where it would be: sentences, none where nothing was found."""
    first, *others = order
    ends = [replace(one.candidate, load=load) for one in order for load in LOADS]
    runs = dict(zip(ends, run(ends), strict=True))

    def wins(one: Outcome, load: float) -> bool:
        pair = [replace(each.candidate, load=load) for each in (first, one)]
        missing = [each for each in pair if each not in runs]
        runs.update(zip(missing, run(missing), strict=True))
        ours, theirs = (runs[each].goodput(wish.slo) for each in pair)
        return theirs > ours * (1 + TIE)

    return [[*_slos(wish.slo, first, one), *_loads(one, wins)] for one in others]


def _slos(slo: Slo, first: Outcome, one: Outcome) -> Iterator[str]:
    """Each bound alone; nearest first, and only where half of all requests hold it."""
    half = one.figures["req_per_s"] / 2
    for name in ("ttft_s", "tpot_s", "itl_s"):
        bound: float = getattr(slo, name)
        for factor in FACTORS if bound < math.inf else ():
            other = replace(slo, **{name: bound * factor})
            if one.goodput(other) > max(half, first.goodput(other) * (1 + TIE)):
                yield f"{name.removesuffix('_s')}={1e3 * bound * factor:.0f}ms"
                break


def _loads(one: Outcome, wins: Callable[[Outcome, float], bool]) -> Iterator[str]:
    for end in LOADS:
        if wins(one, end):
            near, far = 1.0, end
            for _ in range(HALVINGS):
                middle = math.sqrt(near * far)
                near, far = (near, middle) if wins(one, middle) else (middle, far)
            yield f"{far:.2f} x the load"
