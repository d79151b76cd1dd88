"""Which process takes which file of tests: neighbours use the same models or the same clusters."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from xdist.scheduler import LoadFileScheduling

SHARING = (  # the clusters of tests/e2e/conftest.py
    *("apis/test_bad_input", "apis/test_openai_client", "faults/test_burst"),
    *("apis/test_structured", "apis/test_other_apis", "apis/test_answers", "apis/test_http_images"),
    *("operating/test_looking", "operating/test_monitoring", "operating/test_ui"),
    *("apis/test_stages", "faults/test_groups", "hosts/test_two_hosts"),
)
# What is not listed is between them.
MODELS = ("tests/engine/", "tests/groups/", "tests/media_files/", "tests/model_files/")
FIRST = (*MODELS, "tests/roles/", *(f"tests/e2e/{name}" for name in SHARING))
LAST = (
    "tests/e2e/operating/test_lifecycle",
    "tests/e2e/test_exactness",
    "tests/e2e/faults/test_kill",
    "tests/e2e/faults/test_chaos",
    "tests/sim/",
)


def place(path: str) -> int:
    """In the order that processes take from either end."""
    for number, beginning in enumerate(FIRST):
        if path.startswith(beginning):
            return number - len(FIRST)
    return next((n for n, beginning in enumerate(LAST, 1) if path.startswith(beginning)), 0)


class FromBothEnds(LoadFileScheduling):
    """Every other process takes files from the end of the order, so that what is loaded for one of
    them is loaded for its neighbours, and once.  Small files are left for the end of the run."""

    def schedule(self) -> None:
        if self.collection is None:
            self.config.option.loadscopereorder = False  # their order is made below
        super().schedule()

    def _assign_work_unit(self, node: Any) -> None:
        if not any(self.assigned_work.values()):
            files = sorted(self.workqueue.items(), key=lambda item: (place(item[0]), -len(item[1])))
            self.workqueue = OrderedDict(files)
        if self.nodes.index(node) % 2:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)
