"""How a bug is put back: a patched row or method while a context is open."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from epd.fsm.kernel import Effect, Event, State, Table

Mutant = Callable[[], contextlib.AbstractContextManager[None]]
MUTANTS: dict[str, Mutant] = {}


def mutant(function: Callable[[], Iterator[None]]) -> Mutant:
    """Register a generator as a mutant."""
    manager = contextlib.contextmanager(function)
    MUTANTS[function.__name__] = manager
    return manager


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
