"""What must come of a scenario, wherever it is played: in the simulator or between real processes.

A scenario says which terminal answers a request may get and which must occur, by class: `answered`
(whole and right), `refused` (at the door, at once), `hung up` (the client left first), or the kind
of an error.  Afterwards the books are empty.  The drill and the test with processes are compared
with the same entry, by its name, so that they cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Scenario:
    """One story; `drill` plays it in the simulator, the test in `real` between processes."""

    drill: str
    real: str
    may: frozenset[str]
    must: frozenset[str]

    def check(self, outcomes: Mapping[str, int], held: Mapping[str, float]) -> None:
        """`outcomes`: requests by class; `held`: what is not zero in the books afterwards."""
        classes = {name for name, count in outcomes.items() if count}
        assert classes <= self.may, f"{self.drill}: {dict(outcomes)}, allowed {sorted(self.may)}"
        assert self.must <= classes, f"{self.drill}: {dict(outcomes)}, wanted {sorted(self.must)}"
        assert not held, f"{self.drill}: still held {dict(held)}"


def _scenario(drill: str, real: str, must: str, may: str = "") -> Scenario:
    wanted = frozenset(must.split(", "))
    return Scenario(drill, real, wanted | frozenset(filter(None, may.split(", "))), wanted)


SCENARIOS = {
    "kill encode": _scenario(
        "kill-encode",
        "faults/test_kill.py::test_with_a_second_instance_nothing_is_lost",
        "answered",
    ),
    "stall encode": _scenario(
        "stall-encode",
        "faults/test_kill.py::test_with_a_second_instance_nothing_is_lost",
        "answered",
    ),
    "restart prefill": _scenario(
        "kill-prefill",
        "faults/test_kill.py::test_with_a_second_instance_nothing_is_lost",
        "answered",
    ),
    "client hangs up": _scenario(
        "cancel-mid-transfer",
        "apis/test_bad_input.py::test_a_client_that_hangs_up",
        "hung up, answered",
    ),
    "200 at once": _scenario(
        "two-hundred-at-once",
        "faults/test_burst.py::test_above_the_limit_is_refused_at_once",
        "answered, refused",
    ),
}
