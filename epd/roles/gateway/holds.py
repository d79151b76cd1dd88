"""The gateway's record of prompts that prefill instances hold, and the tenant of each.

A claim is what a client sends: the id of a request. It is valid for the tenant that made that
request, while the lease lasts; any other claim is ignored. It only names the instance: blocks
are found there by their contents and tenant.
"""

from __future__ import annotations

from dataclasses import dataclass

from epd.config import Timing
from epd.fsm.generation import Generation
from epd.messages import AbortRequest, Address
from epd.roles.base import Actor

MAX_HOLDS = 4096


@dataclass(frozen=True, slots=True)
class _Hold:
    prefill: Address
    attempt: int
    scope: str
    until_s: float


class Holds:
    """By request, the oldest first."""

    def __init__(self, actor: Actor, timing: Timing) -> None:
        self._actor = actor
        self._timing = timing
        self._holds: dict[str, _Hold] = {}

    def lease_s(self, machine: Generation) -> float:
        """How long its prompt is to be held; 0: not at all."""
        return self._timing.kv_lease_s if machine.prompt.stage == "prefill" else 0.0

    def ended(self, machine: Generation) -> None:
        """If it was answered, and for its prompt alone, that is held now."""
        if machine.asked is None or not self.lease_s(machine) or not machine.finish_reason:
            return
        until_s = self._actor.clock.now_s() + self._timing.kv_lease_s
        if len(self._holds) >= MAX_HOLDS:
            del self._holds[next(iter(self._holds))]
        self._holds[machine.key] = _Hold(
            machine.placement.prefill, machine.attempt, machine.prompt.scope, until_s
        )

    def claimed_by(self, machine: Generation) -> str:
        """The instance that holds what it goes on with; empty if there is none."""
        hold = self._of(machine)
        return hold.prefill.instance_id if hold is not None else ""

    def taken(self, machine: Generation) -> None:
        """It has its first token: what was held for it is not needed any more."""
        if (hold := self._of(machine)) is not None:
            del self._holds[machine.prompt.claim]
            self._actor.send(
                hold.prefill, AbortRequest(request_id=machine.prompt.claim, attempt=hold.attempt)
            )

    def _of(self, machine: Generation) -> _Hold | None:
        hold = self._holds.get(machine.prompt.claim)
        if hold is None or hold.scope != machine.prompt.scope:
            return None
        return hold if self._actor.clock.now_s() < hold.until_s else None
