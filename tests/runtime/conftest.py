"""What the supervisor does to the whole host, left out."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from epd.runtime import supervisor


@pytest.fixture
def swept() -> Iterator[mock.Mock]:
    with mock.patch.object(supervisor, "sweep") as sweep:
        yield sweep
