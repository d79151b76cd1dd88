"""The form of a path test: feed events, compare states and effects."""

from __future__ import annotations

from typing import Any

from epd.fsm.kernel import Effect, Event, Machine


def follow(machine: Machine, *steps: tuple[Event, Any, tuple[Effect, ...]]) -> None:
    """Each step: an event, the state that it leads to, and the effects in their order."""
    for event, state, effects in steps:
        happened = machine.fire(event)
        where = f"after {machine.tell_story()}"
        assert machine.state is state, where
        assert happened == effects, where
