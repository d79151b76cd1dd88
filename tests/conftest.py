"""What holds for every test: one thread per process, no network, marks by directory."""

from __future__ import annotations

import gc
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

gc.disable()  # imports make next to no garbage, and looking for it is a fifth of their time
# Before anything imports torch: the tests run side by side, and a result may not depend on threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that asks a model hub must fail, not wait
os.environ["TOKENIZERS_PARALLELISM"] = "false"

settings.register_profile(
    "epd",
    deadline=None,  # a shared machine stalls; pytest-timeout ends what hangs
    derandomize=True,  # the same tree gives the same verdict; seeds are the simulator's business
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "epd"))

TESTS = Path(__file__).parent
MARK_OF_DIRECTORY = {
    "clients": pytest.mark.clients,
    "e2e": pytest.mark.e2e,
    "gpu": pytest.mark.gpu,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests in these directories are marked by where they lie."""
    for item in items:
        mark = MARK_OF_DIRECTORY.get(item.path.relative_to(TESTS).parts[0])
        if mark is not None:
            item.add_marker(mark)
        elif item.get_closest_marker("e2e"):
            raise pytest.UsageError(f"{item.nodeid} has real processes: it belongs into tests/e2e")


def pytest_collection_finish() -> None:
    """What collecting has imported stays: garbage collections need not look through it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


# --- which process takes which file ---------------------------------------------------------------

SHARING = (  # the clusters of tests/e2e/conftest.py
    *("bad_input", "openai_client", "burst", "structured", "other_apis", "answers", "http_images"),
    *("looking", "monitoring", "ui", "stages", "groups"),
)
# By the models, or the clusters, that files have in common; small files, not listed, come between.
FIRST = ("tests/engine/", "tests/roles/", *(f"tests/e2e/test_{name}" for name in SHARING))
LAST = ("tests/e2e/test_lifecycle", "tests/e2e/test_exactness", "tests/e2e/test_kill", "tests/sim/")


def place(path: str) -> int:
    """In the order that processes take from either end."""
    for number, beginning in enumerate(FIRST):
        if path.startswith(beginning):
            return number - len(FIRST)
    return next((n for n, beginning in enumerate(LAST, 1) if path.startswith(beginning)), 0)


class FromBothEnds(LoadFileScheduling):
    """Every other process takes files from the end of the order, so that what is loaded for one of
    them is loaded for its neighbours, and once."""

    def schedule(self) -> None:
        if self.collection is None:
            self.config.option.loadscopereorder = False
        super().schedule()

    def _assign_work_unit(self, node: Any) -> None:
        if not self.assigned_work or not any(self.assigned_work.values()):
            files = sorted(self.workqueue.items(), key=lambda item: (place(item[0]), -len(item[1])))
            self.workqueue = OrderedDict(files)
        if self.nodes.index(node) % 2:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return FromBothEnds(config, log) if config.getoption("dist") == "loadfile" else None
