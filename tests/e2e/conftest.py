"""Two clusters for all tests that neither end nor change one.

Each pytest process has its own, if a file that it takes asks for one.  The zygote of all clusters
imports while pytest collects.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e import warm
from tests.e2e.server import Server, serving
from tests.e2e.shared import APART, TOGETHER


def pytest_configure(config: pytest.Config) -> None:
    if not config.option.collectonly:
        warm.address()


@pytest.fixture(scope="session")
def apart() -> Iterator[Server]:
    """An instance for each stage."""
    with serving("1e1p1d", **APART) as server:
        yield server


@pytest.fixture(scope="session")
def together() -> Iterator[Server]:
    """Everything in one process."""
    with serving("all", **TOGETHER) as server:
        yield server
