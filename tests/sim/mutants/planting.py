"""How a bug is put back: a patched row or method while a context is open."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from epd.fsm.kernel import Effect, Event, State, Table

Planted = contextlib.AbstractContextManager[Any]
Mutant = Callable[[], Planted]
MUTANTS: dict[str, Mutant] = {}
patched = mock.patch.object


def mutant(function: Mutant) -> Mutant:
    """Register what plants a bug for as long as its context is open."""
    MUTANTS[function.__name__] = function
    return function


@contextlib.contextmanager
def row(
    table: Table,
    state: State,
    event: type[Event],
    target: State | None,
    effects: tuple[Effect, ...] = (),
    action: Any = None,
) -> Iterator[None]:
    """Replace all rows of (state, event) by one without a guard."""
    kept = table.dispatch[state][event]
    table.dispatch[state][event] = ((None, action, effects, target),)
    try:
        yield
    finally:
        table.dispatch[state][event] = kept


@contextlib.contextmanager
def several(*managers: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for manager in managers:
            stack.enter_context(manager)
        yield
