"""What exhaustive searches found, each run once for all tests of a module."""

from __future__ import annotations

from functools import cache
from typing import Any

from epd.sim.model.explore import Space
from epd.sim.model.scenarios import Search


@cache
def searched(search: Search) -> Space[Any]:
    return search.run()
