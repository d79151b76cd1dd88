"""Bugs of what instances died of, put back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from epd.roles.encode.role import EncodeRole
from epd.roles.gateway.losses import Losses
from epd.roles.hands import Hands
from epd.roles.steps.requests import Requests
from epd.scheduling.deaths import Deaths, Life
from tests.sim.mutants.planting import Planted, mutant, patched, several


@mutant
def deaths_are_not_counted() -> Planted:
    """F68: a pill is retried wherever somebody still lives."""
    return patched(Deaths, "count", lambda self, life, inputs: {})


@mutant
def the_silent_may_have_a_third() -> Planted:
    """F68: whose instance does not answer goes to another one, and to one more."""
    return several(
        patched(Deaths, "is_barred", lambda self, key, request_id="", life=None: False),
        patched(Deaths, "may_hedge", lambda self, key: True),
    )


@mutant
def who_waited_is_blamed() -> Planted:
    """F68: a death counts against all that was sent there."""

    take, hold = Hands.take, Hands.hold

    def take_all(self: Hands, images: Sequence[str]) -> None:
        role = next((one for one in roles if one._hands is self), None)
        waiting = [] if role is None else [k for k, e in role.encodings.items() if e.rows is None]
        take(self, [*images, *waiting])

    def hold_all(self: Hands, requests: tuple[str, ...], suspect: str = "") -> None:
        batch = next(one for one in batches if one.actor.hands is self)
        waiting = (r.request_id for r in batch._requests.values() if not r.has_yielded)
        hold(self, tuple(dict.fromkeys((*requests, *waiting))), suspect)

    roles: list[EncodeRole] = []
    batches: list[Requests] = []
    return several(
        _noted(EncodeRole, roles),
        _noted(Requests, batches),
        patched(Hands, "take", take_all),
        patched(Hands, "hold", hold_all),
    )


def _noted(kind: Any, made: list[Any]) -> Any:
    """Those that are made, the latest first."""
    init = kind.__init__

    def note(self: Any, *args: Any, **named: Any) -> None:
        made.insert(0, self)
        init(self, *args, **named)

    return patched(kind, "__init__", note)


@mutant
def what_left_counts_until_more_enters() -> Planted:
    """F68: a heartbeat does not bring the list."""
    return patched(Losses, "_heartbeat_of", lambda self, one: None)


@mutant
def who_has_it_at_hand_may_not_take_it() -> Planted:
    """F68, F59: an attempt is given up, though nobody more is at stake for its image."""
    is_barred = Deaths.is_barred

    def bar_all(self: Deaths, key: str, request_id: str = "", life: Life | None = None) -> bool:
        return is_barred(self, key, request_id)

    return patched(Deaths, "is_barred", bar_all)


@mutant
def suspects_are_batched() -> Planted:
    """F68: what died beside a pill dies beside it again."""
    return patched(EncodeRole, "_claim", lambda self, encoding: True)


@mutant
def suspects_share_a_step() -> Planted:
    """F68: likewise, of prompts."""
    return patched(Hands, "passed_over", lambda self, suspects: [])
