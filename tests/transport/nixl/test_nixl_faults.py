"""What NIXL does when an end of a write dies, stops or takes it back: what `epd` builds upon.

Each of these notices if a release of NIXL or UCX behaves otherwise: then `epd.transport.nixl` can
be simpler, or must be more careful.
"""

from __future__ import annotations

import contextlib
import signal
import time

import pytest

from epd.transport.nixl.library import missing
from tests.patience import PATIENCE_S
from tests.transport.nixl.agents import NBYTES, NEW, OLD, pair

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(missing()), reason=missing() or "there")]
PATIENT = {"UCX_TCP_USER_TIMEOUT": "inf"}  # as UCX is by itself
SOON = {"UCX_TCP_USER_TIMEOUT": "2s"}
DISCONNECTED = "nixlRemoteDisconnectError"


def test_an_owner_that_is_killed_is_an_error_soon_and_for_every_later_write() -> None:
    with pair() as made:
        made.post_to_a_stopped_owner()
        made.owner.signal(signal.SIGKILL)
        assert made.writer.ask("wait", 3.0) == DISCONNECTED
        made.writer.ask("release")
        assert made.writer.ask("post", 4096) == DISCONNECTED


def test_an_owner_hears_nothing_of_a_writer_that_is_killed() -> None:
    with pair() as made:
        made.stop_in_mid_write()
        made.writer.signal(signal.SIGKILL)
        assert 0 < made.arrived_at_rest() < NBYTES
        assert made.owner.ask("notifications") == 0


def test_a_stopped_owner_is_in_progress_for_ever() -> None:
    with pair(**PATIENT) as made:
        made.post_to_a_stopped_owner()
        assert made.writer.ask("wait", 12.0) == "PROC"
        made.owner.signal(signal.SIGCONT)
        assert made.writer.ask("wait", PATIENCE_S) == "DONE"


def test_the_kernels_limit_makes_it_an_error_and_metadata_loaded_anew_a_connection() -> None:
    with pair(**SOON) as made:
        made.post_to_a_stopped_owner()
        assert made.writer.ask("wait", PATIENCE_S) == DISCONNECTED
        made.owner.signal(signal.SIGCONT)
        made.arrived_at_rest()
        made.writer.ask("release")
        assert made.writer.ask("post", 4096) == DISCONNECTED  # though it lives
        made.writer.ask("release")
        made.writer.ask("remove")
        made.writer.ask("load", *made.owner.ask("own", NBYTES))
        made.writer.ask("post", NBYTES)
        assert made.writer.ask("wait", PATIENCE_S) == "DONE"


def test_keep_alive_of_ucx_kills_a_writer_whose_stopped_owner_wakes() -> None:
    """By a segmentation fault in a thread of the library: of twelve with NIXL 1.5.1, ten.  None
    over loopback."""
    alive = SOON | {"UCX_KEEPALIVE_INTERVAL": "1s", "UCX_NET_DEVICES": "all"}
    with contextlib.ExitStack() as stack:
        pairs = [stack.enter_context(pair(**alive)) for _ in range(4)]
        for made in pairs:
            made.post_to_a_stopped_owner()
            made.writer.begin("wait", PATIENCE_S)
        for made in pairs:
            assert made.writer.answer() == DISCONNECTED
            made.owner.signal(signal.SIGCONT)
        time.sleep(3.0)
        assert {made.writer.ended_by for made in pairs} - {0}


def test_a_released_transfer_goes_on_and_still_reads_its_source() -> None:
    with pair(**PATIENT) as made:
        made.post_to_a_stopped_owner()
        made.writer.ask("release")
        made.writer.ask("fill", NEW)
        made.owner.signal(signal.SIGCONT)
        assert made.arrived_at_rest() == NBYTES
        assert made.owner.ask("count", NEW) > NBYTES // 2


@pytest.mark.parametrize("taken_back", ["deregister", "remove"])
def test_bytes_land_after_their_owner_has_taken_it_back(taken_back: str) -> None:
    with pair(**PATIENT) as made:
        made.owner.ask("load", *made.writer.ask("own", NBYTES))
        made.writer.ask("fill", OLD)
        made.stop_in_mid_write()
        before = made.owner.ask("count", OLD)
        made.owner.ask(taken_back)
        made.writer.signal(signal.SIGCONT)
        assert made.writer.ask("wait", PATIENCE_S) == "DONE"
        assert before < NBYTES == made.owner.ask("count", OLD)
