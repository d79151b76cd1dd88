"""What NIXL makes of a cable that is cut in the middle of a write.

See tests/transport/nixl/test_nixl_faults.py for faults on one host."""

from __future__ import annotations

import pytest

from epd.transport.nixl.library import missing
from epd_lab.bench.chaos.hosts import two_hosts, unable
from tests.patience import PATIENCE_S
from tests.transport.nixl.agents import NBYTES, pair

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(missing() or unable()), reason=missing() or unable()),
]


@pytest.mark.parametrize(("limit", "state"), [("inf", "PROC"), ("2s", "nixlRemoteDisconnectError")])
def test_a_cut_cable_is_an_error_only_by_the_kernels_limit(limit: str, state: str) -> None:
    with two_hosts() as cable:
        enter = [host.enter for host in cable.hosts]
        with pair(*enter, UCX_TCP_USER_TIMEOUT=limit) as made:
            cable.cut()
            made.writer.ask("post", NBYTES)
            assert made.writer.ask("wait", 12.0) == state
            cable.mend()
            if state == "PROC":
                assert made.writer.ask("wait", PATIENCE_S) == "DONE"
