"""What exhaustive searches found, each run once for all tests of a module."""

from __future__ import annotations

from functools import cache
from typing import Any

from epd_lab.sim.model.explore import Space
from epd_lab.sim.model.scenarios import Search


@cache
def searched(search: Search) -> Space[Any]:
    return search.run()
