"""What an instance without the prefill or the decode role does where the other's effects come up.

Both roles move REQUEST by one table. An instance with only one of them never takes what the other
one takes. So it has nothing of that to release, and the other role's effects cannot occur.
"""

from __future__ import annotations

from epd.fsm.kernel import Event
from epd.fsm.request import Do, Request
from epd.roles.base import Component, performs


class WithoutPrefill(Component[Request]):
    @performs(Do.RELEASE_EMBEDDINGS)
    def release_nothing(self, request: Request, event: Event) -> None:
        """No images."""

    @performs(Do.ACQUIRE_EMBEDDINGS, Do.ARM_LEASE, Do.END_LEASE)
    def refuse(self, request: Request, event: Event) -> None:
        raise AssertionError(f"{request.key}: no prompt comes to an instance without prefill")


class WithoutDecode(Component[Request]):
    @performs(Do.RESERVE_BLOCKS, Do.CANCEL_TRANSFER)
    def refuse(self, request: Request, event: Event) -> None:
        raise AssertionError(f"{request.key}: no KV comes to an instance without decode")
