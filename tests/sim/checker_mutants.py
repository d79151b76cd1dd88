"""Bugs that change no answer: each is noticed by one checker, and by nothing else there is."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

from epd.fsm.transfer import Transfer
from epd.roles.embeddings import Embeddings
from epd.roles.requests import Requests
from tests.sim.planting import mutant

# --- wake-ups -------------------------------------------------------------------------------------


@mutant
def who_leaves_the_line_wakes_nobody() -> Iterator[None]:
    """F24, F43: who stood behind a request that left waits until something else happens."""

    def leave(self: Requests, key: str) -> None:
        self._on_reserved.pop(key, None)
        self._scheduler.remove(key)

    with mock.patch.object(Requests, "leave_line", leave):
        yield


@mutant
def what_is_not_stranded_any_more_is_kept() -> Iterator[None]:
    """F41: slots of an abandoned load that was delivered after all are promised to nobody."""
    concluded = Embeddings.concluded

    def quietly(self: Embeddings, transfer: Transfer, *, delivered: bool) -> None:
        with mock.patch.object(self, "_pump_budget", lambda: None):
            concluded(self, transfer, delivered=delivered)

    with mock.patch.object(Embeddings, "concluded", quietly):
        yield
