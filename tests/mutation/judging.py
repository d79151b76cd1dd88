"""Tests run within this process, chosen and in a chosen order: to measure, and to try a mutant."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import hypothesis
import pytest

from tests.mutation.forks import Tell
from tests.mutation.reach import Reach

# A test that takes this much longer than it should does not come to its end.
SLOWER, AT_LEAST_S = 10.0, 5.0
# of real time: other work on this machine must not look like a test without an end
WALL_SLOWER, WALL_AT_LEAST_S = 100.0, 120.0

Run = Callable[[list[pytest.Item]], None]


class Plugin:
    """Takes the place of pytest's own loop over what was collected."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.ran = False
        self.failure = ""
        self.properties: dict[str, object] = {}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("not all could be collected")
        self._run(session.items)
        self.ran = True
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.properties.update(report.user_properties)
        if report.failed and not self.failure:
            crash = getattr(report.longrepr, "reprcrash", None)
            told = crash.message if crash is not None else report.longreprtext
            self.failure = told.split("\n")[0] or "failed"


def session(files: Sequence[str], scratch: Path, run: Run) -> None:
    """Collect the files and hand what was found to `run`.

    Raises RuntimeError with what pytest said, where it does not come to that, or not to its end.
    """
    hypothesis.settings.register_profile(
        "mutation",
        deadline=None,
        derandomize=True,
        phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),  # a failure is enough
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    os.environ["HYPOTHESIS_PROFILE"] = "mutation"
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    said = scratch / f"{os.getpid()}.log"
    with said.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    plugin = Plugin(run)
    options = ["-q", "--capture=no", "-p", "no:cacheprovider"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # hypothesis is imported
    options += [
        "-m",
        "not long and not e2e and not gpu",
        f"--basetemp={scratch / str(os.getpid())}",
    ]
    try:
        pytest.main([*options, *files], plugins=[plugin])
    finally:
        for number, copy in enumerate(kept, 1):
            os.dup2(copy, number)
            os.close(copy)
    if not plugin.ran:
        raise RuntimeError(said.read_text(errors="replace")[-2000:])


def outcomes(items: Sequence[pytest.Item]) -> Iterator[tuple[pytest.Item, Plugin, float]]:
    """Run the items in this order; each with how it ended, and its time of the processor."""
    for item, following in itertools.zip_longest(items, items[1:]):
        plugin = _plugin(item)
        plugin.failure, plugin.properties = "", {}
        begun_s = time.process_time()
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        yield item, plugin, time.process_time() - begun_s


def _plugin(item: pytest.Item) -> Plugin:
    return next(p for p in item.config.pluginmanager.get_plugins() if isinstance(p, Plugin))


def judge(items: list[pytest.Item], reach: Reach, budget_s: float, tell: Tell) -> None:
    """Run the items, as many as the budget allows, until one fails."""
    firing = Counter(_drill(name) for name, fired in reach.fired.items() if fired)
    spent_s = 0.0
    running = outcomes(items)
    for item in items:
        limit_s = max(AT_LEAST_S, SLOWER * reach.costs_s[item.nodeid])
        tell({"item": item.nodeid, "limit_s": max(WALL_AT_LEAST_S, WALL_SLOWER * limit_s / SLOWER)})
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        _, plugin, cost_s = next(running)
        if plugin.failure:
            tell({"caught": item.nodeid, "why": plugin.failure})
            return
        if reach.fired.get(item.nodeid) and not plugin.properties.get("fired"):
            firing[_drill(item.nodeid)] -= 1
            if firing[_drill(item.nodeid)] < _must_fire(item.nodeid):
                tell({"caught": item.nodeid, "why": "the drill's fault no longer happens"})
                return
        spent_s += cost_s
        if spent_s > 2 * budget_s:  # what it costs now may be more than what was measured
            break
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    tell({"survived": True})


def _title(item: str) -> str:
    return item.partition("[")[2].removesuffix("]")


def _drill(item: str) -> str:
    return _title(item).rpartition(" ")[0]


def _must_fire(item: str) -> int:
    from tests.mutation.runs import must_fire  # only where the simulator was imported

    return must_fire(_title(item))
