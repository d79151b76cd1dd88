"""Adapters of requests at an instance."""

from __future__ import annotations

from epd.engine.base import HoldsAdapters
from epd.failure import Failure, FailureKind


def adapter_objection(engine: HoldsAdapters, adapter: str) -> Failure | None:
    """Why requests with this adapter are not computed here; None if they are."""
    if not adapter or adapter in engine.adapters:
        return None
    reason = f"the adapter {adapter} is not loaded here; load the same adapters at each instance"
    return Failure(FailureKind.CONTRACT, reason)
