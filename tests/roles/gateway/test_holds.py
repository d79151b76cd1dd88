"""Claims on held prompts count for the tenant that made them, while the lease lasts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from epd.config import Timing
from epd.frontend import Generation, Stage
from epd.messages import AbortRequest, Address, SamplingParams
from epd.roles.gateway.holds import MAX_HOLDS, Holds

PREFILL = Address("p0", 3, "")
LEASE_S = 30.0


class FakeActor:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.clock = SimpleNamespace(now_s=lambda: self.now_s)
        self.sent: list[tuple[Any, Any]] = []

    def send(self, to: Any, message: Any) -> bool:
        self.sent.append((to, message))
        return True


def machine(key: str, scope: str, stage: Stage = "", claim: str = "", finish: str = "") -> Any:
    prompt = Generation(
        (1,), (), SamplingParams(max_tokens=1), scope=scope, stage=stage, claim=claim
    )
    placement = SimpleNamespace(prefill=PREFILL)
    return SimpleNamespace(
        key=key,
        asked=prompt,
        prompt=prompt,
        placement=placement,
        attempt=2,
        finish_reason=finish,
    )


def made() -> tuple[FakeActor, Holds]:
    actor = FakeActor()
    holds: Any = Holds(actor, Timing(kv_lease_s=LEASE_S))  # type: ignore[arg-type]
    holds.ended(machine("g-1", "mine", "prefill", finish="length"))
    return actor, holds


def test_its_tenant_goes_on_where_it_is_held_and_lets_go() -> None:
    actor, holds = made()
    going_on = machine("g-2", "mine", claim="g-1")
    assert holds.claimed_by(going_on) == "p0"
    holds.taken(going_on)
    assert actor.sent == [(PREFILL, AbortRequest(request_id="g-1", attempt=2))]
    assert holds.claimed_by(going_on) == "", "once"


def test_another_tenants_claim_is_as_if_there_was_none() -> None:
    """F38: it neither learns where that is, nor ends its lease."""
    actor, holds = made()
    stranger = machine("g-2", "another", claim="g-1")
    assert holds.claimed_by(stranger) == ""
    holds.taken(stranger)
    assert not actor.sent
    assert holds.claimed_by(machine("g-3", "mine", claim="g-1")) == "p0"


def test_a_lease_ends() -> None:
    actor, holds = made()
    actor.now_s += LEASE_S
    assert holds.claimed_by(machine("g-2", "mine", claim="g-1")) == ""


def test_what_failed_or_was_no_prompt_alone_is_not_held() -> None:
    _, holds = made()
    holds.ended(machine("g-4", "mine", "prefill"))
    holds.ended(machine("g-5", "mine", finish="stop"))
    holds.ended(SimpleNamespace(asked=None, key="g-6"))
    for key in ("g-4", "g-5", "g-6"):
        assert holds.claimed_by(machine("g-9", "mine", claim=key)) == ""


def test_the_books_are_bounded() -> None:
    _, holds = made()
    for number in range(MAX_HOLDS):
        holds.ended(machine(f"h-{number}", "mine", "prefill", finish="length"))
    assert holds.claimed_by(machine("g-2", "mine", claim="h-0")) == "p0"
    assert holds.claimed_by(machine("g-2", "mine", claim="g-1")) == ""
