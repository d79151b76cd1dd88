"""`epd bench chaos` in short: faults of every kind under mixed load, and nothing wrong or lost.

Longer: `epd bench chaos --minutes 15`.  The bound of pauses is that of a busy machine.
"""

from __future__ import annotations

import itertools

import pytest

from epd_lab.bench.chaos.hosts import unable
from epd_lab.bench.chaos.plan import Wish
from epd_lab.bench.chaos.run import chaos
from epd_lab.bench.chaos.verdict import verdict
from tests.e2e.server import SLOW, Command, Server
from tests.e2e.streams import DEADLINE_S, PATIENT

pytestmark = pytest.mark.timeout(600)
LONG = pytest.mark.long
MAX_PAUSE_S = 6.0 * SLOW
SET = (("--set", f"{key.replace('__', '.')}={value}") for key, value in PATIENT.items())
WISHES = {
    "2e2p2d": Wish("2e2p2d", 0.3, 4.0, (3.0, 7.0), clients=4, max_pause_s=MAX_PAUSE_S),
    "hosts": Wish(
        "2e2p2d", 2.0, 10.0, partition=True, max_pause_s=MAX_PAUSE_S, flags=("--transport", "tcp")
    ),
    "two gateways": Wish("2e2p2d", 1.0, 10.0, max_pause_s=MAX_PAUSE_S, num_gateways=2),
    "ranks": Wish("2e2pd:tp2", 1.0, 10.0, max_pause_s=MAX_PAUSE_S),
    # What is the only one comes back within the patience of those who wait.
    "the only ones": Wish(
        "1e1p:tp2,1d", 1.0, 20.0, max_pause_s=DEADLINE_S, flags=(*itertools.chain(*SET),)
    ),
}  # fmt: skip
NO_HOSTS = pytest.mark.skipif(bool(unable()), reason=unable())


@pytest.mark.parametrize(
    "name",
    [
        "2e2p2d",
        pytest.param("hosts", marks=(LONG, NO_HOSTS)),
        pytest.param("two gateways", marks=LONG),
        pytest.param("ranks", marks=LONG),
        pytest.param("the only ones", marks=LONG),
    ],
)
def test_nothing_is_wrong_or_lost(name: str) -> None:
    """Faults F19, F20, F29, F41, F79."""
    found = verdict(chaos(WISHES[name], (Server, Command)))
    print({key: found[key] for key in found if key not in {"replay", "wish"}})
    assert found["broken"] == []
    if name == "the only ones":
        assert {error["kind"] for error in found["errors"]} <= {"422 poison"}, "killed twice"
