"""Bugs of admission put back."""

from __future__ import annotations

from unittest import mock

from epd.roles.gateway.admission import AdmissionControl
from epd.scheduling.admission.comebacks import Comebacks
from epd.scheduling.admission.fairness import FairQueue
from tests.sim.mutants.planting import Planted, mutant

JOIN = FairQueue.join


@mutant
def keys_share_a_line() -> Planted:
    """F39: who asks most gets most."""
    return mock.patch.object(
        FairQueue, "join", lambda self, key, who, rank, amounts: JOIN(self, key, "", rank, amounts)
    )


@mutant
def turns_do_not_count_costs() -> Planted:
    """F39: keys get equal numbers of requests, so large ones get most."""
    return mock.patch.object(
        FairQueue, "join", lambda self, key, who, rank, _: JOIN(self, key, who, rank, (1.0, 0.0))
    )


@mutant
def retry_after_is_a_constant() -> Planted:
    """F39: all who were refused come back together, and are refused."""
    return mock.patch.object(Comebacks, "refused", lambda *_: 1)


@mutant
def nobody_is_too_late() -> Planted:
    """F39: what cannot be in time is computed, and its client gets an error."""
    return mock.patch.object(AdmissionControl, "_late", lambda *_: None)
