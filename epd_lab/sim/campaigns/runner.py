"""Many runs: over seeds, over processes, with progress, and with a summary when it is stopped."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from epd_lab.sim import drills
from epd_lab.sim.campaigns import search
from epd_lab.sim.campaigns.mutants import planted
from epd_lab.sim.campaigns.parallel import Progress, interrupts, results
from epd_lab.sim.run import Plan, Result, run
from epd_lab.sim.swarm import plans

SIMULATOR = "[simulator]"
"""Marks a failure of the simulator itself: nothing was learned about the roles."""
RUN_LIMIT_S = 120  # of real time; a run takes some tenths of a second
CHANCE = 4.0  # standard deviations: of all drills together none fails by chance


@dataclass(frozen=True, slots=True)
class SimJob:
    """One run by name and number: small to send to a worker, enough to replay."""

    kind: str  # "drill", "calm" (a drill without what it is about), "swarm" or "check"
    name: str
    seed: int
    mutant: str = ""  # the bug that is put back meanwhile

    def plan(self) -> Plan:
        if self.kind == "drill":
            return drills.by_name(self.name).plan(self.seed)
        if self.kind == "calm":
            return drills.by_name(self.name).calmed().plan(self.seed)
        if self.kind == "check":
            return search.nth_kill(self.name, self.seed)
        return plans.draw_plan(self.seed, groups=True, varied=True, operated=True)

    def title(self) -> str:
        """What the run is called: in file names of reports too."""
        return " ".join(filter(None, (self.kind, self.name, str(self.seed), self.mutant)))

    def command(self) -> str:
        name = "swarm" if self.kind == "swarm" else f"{self.kind} {self.name}"
        mutant = f" --mutant {self.mutant}" if self.mutant else ""
        return f"python -m epd sim replay {name} --seed {self.seed}{mutant}"


@dataclass(frozen=True, slots=True)
class Report:
    """What is kept of one run."""

    job: SimJob
    violations: tuple[str, ...]
    fired: bool
    steps: int
    digest: str


@dataclass(slots=True)
class Summary:
    """What is kept of many."""

    reports: int = 0
    fired: int = 0
    steps: int = 0
    wall_s: float = 0.0
    failures: list[Report] = field(default_factory=list)
    interrupted: bool = False

    @property
    def fired_share(self) -> float:
        return self.fired / self.reports if self.reports else 0.0

    def fires_too_seldom(self, share: float) -> bool:
        """More so than by chance, if it happened in such a share of all runs there are."""
        expected = share * self.reports
        return self.fired < expected - CHANCE * math.sqrt(expected * (1.0 - share))

    def add(self, report: Report) -> None:
        """Count one run."""
        self.reports += 1
        self.fired += report.fired
        self.steps += report.steps
        if report.violations:
            self.failures.append(report)


class RunTooLong(KeyboardInterrupt):
    """Of this kind because tasks keep every other exception to themselves."""


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    """End a run that never comes back, so that the others go on: in a worker, without Ctrl-C."""
    if multiprocessing.parent_process() is None:
        yield
        return

    def end(signum: int, frame: object) -> None:
        raise RunTooLong

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, RUN_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def execute(job: SimJob) -> Report:
    """Run one job; an exception of the simulator itself is a failure of that seed.

    Of a run with a bug put back only that is asked whether it is noticed.
    """
    try:
        with planted(job.mutant), _time_limit():
            result = run(job.plan(), only_whether=bool(job.mutant))
    except RunTooLong:
        told = f"[liveness] it did not end within {RUN_LIMIT_S} s: something goes round for ever"
        return Report(job, (told,), False, 0, "")
    except Exception as error:
        return Report(job, (f"{SIMULATOR} {error!r}",), False, 0, "")
    fired = drills.by_name(job.name).fired(result) if job.kind == "drill" else True
    return Report(job, tuple(judged(job, result)), fired, result.steps, result.digest)


def judged(job: SimJob, result: Result) -> list[str]:
    """What is wrong with a run: its violations, and signs of a drill that it must not show."""
    signs = drills.by_name(job.name).shown(result) if job.kind == "calm" else []
    told = [f"[sign] {sign} shows without what the drill is about" for sign in signs]
    return [*told, *result.violations]


def execute_all(
    jobs: Iterable[SimJob],
    total: int,
    workers: int,
    *,
    label: str = "",
    stop_after: int | None = None,
    tell: Callable[[Report], None] = lambda report: None,
) -> Summary:
    """Run jobs, on several processes if asked; Ctrl-C ends it with what there is.

    `stop_after`: end at so many failures; None: never.  `tell` gets each run's report, in order.
    """
    summary, progress = Summary(), Progress(label, total)
    try:
        with interrupts(), contextlib.closing(results(execute, jobs, workers)) as reports:
            for report in reports:
                summary.add(report)
                if report.violations:
                    print(f"failed: {report.job.command()}", file=sys.stderr, flush=True)
                tell(report)
                if len(summary.failures) == stop_after:
                    break
                progress.show(summary.reports, f"{len(summary.failures)} failed")
    except KeyboardInterrupt:
        summary.interrupted = True
    summary.wall_s = progress.took_s
    return summary
