"""Where the bugs to put back come from: they live with the tests, and none is named here.

A mutant is a context manager that patches a table's row or a method while it is open.  Its
docstring begins with the faults of the catalogue that it puts back: `F6, F42: a cancelled ...`.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Mapping

MODULE = "tests.sim.mutants"

Mutant = Callable[[], contextlib.AbstractContextManager[None]]


def load() -> Mapping[str, Mutant]:
    """All mutants by name.  Raises ValueError outside a checkout."""
    try:
        mutants: Mapping[str, Mutant] = importlib.import_module(MODULE).MUTANTS
    except ModuleNotFoundError as error:
        if not MODULE.startswith(error.name or "?"):
            raise
        raise ValueError(
            "mutants live with the tests, which are not installed: run it in a checkout's root"
        ) from None
    return mutants


def by_name(name: str) -> Mutant:
    """Raises KeyError with the names that there are."""
    mutants = load()
    if name not in mutants:
        raise KeyError(f"no mutant {name!r}; there are: {', '.join(sorted(mutants))}")
    return mutants[name]


def planted(name: str) -> contextlib.AbstractContextManager[None]:
    """While it is open the bug is there; an empty name plants none."""
    return by_name(name)() if name else contextlib.nullcontext()


def faults_of(name: str) -> tuple[str, ...]:
    """The faults of the catalogue that a mutant puts back, from the head of its docstring."""
    head = (by_name(name).__doc__ or "").partition(":")[0]
    return tuple(re.findall(r"F\d+", head)) if re.fullmatch(r"(F\d+(, )?)+", head) else ()
