"""The checkpoint, or the reason why there is none here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real.checkpoint import Unavailable, make


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    try:
        return make()
    except Unavailable as error:
        pytest.skip(str(error))
