"""What searches found is let go behind the tests that look at it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fsm.searches import searched


@pytest.fixture(scope="module", autouse=True)
def spaces_are_let_go() -> Iterator[None]:
    """They are so many objects that each later collection of garbage would take seconds."""
    yield
    searched.cache_clear()
