"""Many runs: over seeds, over processes, with progress, and with a summary when it is stopped."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

from epd.sim import drills, search, swarm
from epd.sim.run import Plan, run

PROGRESS_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class Job:
    """One run by name and number: small to send to a worker, enough to replay."""

    kind: str  # "drill", "swarm" or "steps"
    name: str
    seed: int

    def plan(self) -> Plan:
        if self.kind == "drill":
            return drills.by_name(self.name).plan(self.seed)
        if self.kind == "steps":
            return search.nth_kill(self.name, self.seed)
        return swarm.draw_plan(self.seed)

    def title(self) -> str:
        """What the run is called: in file names of reports too."""
        return " ".join(filter(None, (self.kind, self.name, str(self.seed))))

    def command(self) -> str:
        name = "swarm" if self.kind == "swarm" else f"{self.kind} {self.name}"
        return f"python -m epd sim replay {name} --seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Report:
    """What is kept of one run."""

    job: Job
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


def execute(job: Job) -> Report:
    """Run one job; an exception of the simulator itself is a failure of that seed."""
    try:
        result = run(job.plan())
    except Exception as error:
        return Report(job, (f"[simulator] {error!r}",), False, 0, "")
    fired = True
    if job.kind == "drill":
        drill = drills.by_name(job.name)
        signs = drill.fires or tuple(fault.kind for fault in drill.faults)
        fired = any(result.happened(sign) for sign in signs) if signs else True
    return Report(job, tuple(result.violations), fired, result.steps, result.digest)


def execute_all(
    jobs: Iterable[Job],
    total: int,
    workers: int,
    *,
    label: str = "",
    stop_at_failures: int = 20,
    quiet: bool = False,
) -> Summary:
    """Run jobs, on several processes if asked; Ctrl-C ends it with what there is."""
    summary = Summary()
    started_s = time.perf_counter()
    shown_s = started_s
    try:
        with interrupts(), contextlib.closing(_reports(jobs, workers)) as reports:
            for report in reports:
                _add(summary, report, quiet=quiet)
                if len(summary.failures) >= stop_at_failures:
                    break
                now_s = time.perf_counter()
                if not quiet and now_s - shown_s > PROGRESS_EVERY_S:
                    shown_s = now_s
                    _show(label, summary, total, now_s - started_s)
    except KeyboardInterrupt:
        summary.interrupted = True
    summary.wall_s = time.perf_counter() - started_s
    return summary


def _add(summary: Summary, report: Report, *, quiet: bool) -> None:
    summary.reports += 1
    summary.fired += report.fired
    summary.steps += report.steps
    if report.violations:
        summary.failures.append(report)
        if not quiet:
            print(f"failed: {report.job.command()}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def interrupts() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt here; outside, the command line ends without ado."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _reports(jobs: Iterable[Job], workers: int) -> Generator[Report, None, None]:
    if workers <= 1:
        yield from map(execute, jobs)
        return
    with ProcessPoolExecutor(workers, initializer=_leave_interrupts_to_the_parent) as pool:
        waiting = iter(jobs)
        open_runs: list[Future[Report]] = [
            pool.submit(execute, job) for job in islice(waiting, 4 * workers)
        ]
        try:
            while open_runs:
                yield open_runs.pop(0).result()
                open_runs.extend(pool.submit(execute, job) for job in islice(waiting, 1))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _show(label: str, summary: Summary, total: int, elapsed_s: float) -> None:
    rate = summary.reports / max(elapsed_s, 1e-9)
    left_s = (total - summary.reports) / max(rate, 1e-9)
    print(
        f"{label}: {summary.reports}/{total} seeds, {rate:.1f}/s, {len(summary.failures)} failed, "
        f"{left_s:.0f} s left",
        file=sys.stderr,
        flush=True,
    )
