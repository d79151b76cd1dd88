"""What holds for every test: one thread per process, no network, marks by directory."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

gc.disable()  # imports make next to no garbage, and looking for it is a fifth of their time
# Before anything imports torch: the tests run side by side, and a result may not depend on threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that asks a model hub must fail, not wait
os.environ["TOKENIZERS_PARALLELISM"] = "false"

settings.register_profile(
    "epd",
    max_examples=40,
    deadline=None,  # a shared machine stalls; pytest-timeout ends what hangs
    derandomize=True,  # the same tree gives the same verdict; seeds are the simulator's business
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("deep", settings.get_profile("epd"), max_examples=400)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "epd"))

TESTS = Path(__file__).parent
MARK_OF_DIRECTORY = {
    "clients": pytest.mark.clients,
    "e2e": pytest.mark.e2e,
    "gpu": pytest.mark.gpu,
    "real": pytest.mark.real,
    "with_vllm": pytest.mark.vllm,
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
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Only where there is xdist."""
    from tests.files_by_process import FromBothEnds

    return FromBothEnds(config, log) if config.getoption("dist") == "loadfile" else None
