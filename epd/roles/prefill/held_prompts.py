"""Prompts whose KV a prefill instance holds for a later request that continues them.

A client drives the stages of a request: the first request was for the prompt alone.  A second one
brings the same prompt and finds its blocks by their contents, as any request finds a cached prefix.
Holding only keeps the blocks from being evicted, so it may end at any time.  It ends when the
second request has come, after the lease, above `MAX_SHARE` of the pool, or when the instance
leaves.
"""

from __future__ import annotations

from epd.fsm.kernel import Event
from epd.fsm.request import Do, LeaseEnded, LeaseRevoked, Request
from epd.roles.base import Actor, Component, performs
from epd.roles.steps.attempts import Attempts

MAX_SHARE = 0.5


class HeldPrompts(Component[Request]):
    """The oldest first."""

    def __init__(self, actor: Actor, requests: Attempts) -> None:
        super().__init__(actor)
        self._requests = requests
        self._max_blocks = int(requests.pool.size * MAX_SHARE)
        self._held: dict[str, Request] = {}
        requests.extend(self)

    def live(self) -> dict[str, int]:
        return {"held_prompts": len(self._held)}

    @performs(Do.ARM_LEASE)
    def arm_lease(self, request: Request, event: Event) -> None:
        self._held[request.key] = request
        self._requests.num_held = len(self._held)
        self._requests.arm(request, request.lease_s, LeaseEnded())
        self.actor.mailbox.look("held prompts", self._let_go)

    @performs(Do.END_LEASE)
    def end_lease(self, request: Request, event: Event) -> None:
        del self._held[request.key]
        self._requests.num_held = len(self._held)

    def drained(self) -> None:
        """From now on nothing is held."""
        self._max_blocks = 0
        self.actor.mailbox.look("held prompts", self._let_go)

    def _let_go(self) -> None:
        """Until no more blocks are held than may be."""
        held = list(self._held.values())
        num_blocks = sum(len(request.blocks) for request in held)
        for request in held:
            if num_blocks <= self._max_blocks:
                return
            num_blocks -= len(request.blocks)
            self._requests.fire(request, LeaseRevoked())
