"""One cluster for all clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.server import Server, serving


@pytest.fixture(scope="package")
def server() -> Iterator[Server]:
    with serving("1e1p1d") as server:
        yield server
