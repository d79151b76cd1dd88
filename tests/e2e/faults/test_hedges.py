"""An encoder that stands still costs its images a second encoder, and no attempt."""

from __future__ import annotations

import os
import signal
from functools import partial

import psutil
import pytest

from tests.e2e.client import post_all
from tests.e2e.server import READY_S, Server, serving, wait_for
from tests.e2e.streams import DEADLINE_S, ask_during, check_same_afterwards, questions

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]
WON = 'epd_instance_events_total{instance="p0",kind="hedges_won"}'
# Nobody is declared lost, however slow the machine is, and a hedge comes before a silence is seen.
HEDGES = {
    "limits__max_hedged_share": 1.0,
    "prefill__hedge_after_s": 1.0,
    "timing__suspect_after_s": DEADLINE_S,
    "timing__lost_after_s": 2 * DEADLINE_S,
    "timing__first_token_timeout_s": DEADLINE_S,
}


def has_won(server: Server) -> bool:
    """The gateway hears it from a heartbeat."""
    return server.metrics().get(WON, 0) >= 1


async def test_images_of_an_encoder_that_stands_still_are_encoded_by_the_other_one() -> None:
    """F62: the answers are the same, within the attempt, and all memory comes back."""
    with serving("2e1p1d", **HEDGES) as server:
        wait_for(lambda: len(server.instances()) == 4, READY_S, "all have joined")
        for body in questions(90, 24, 60, 2):  # two images each: of one encoder 20 are measured
            (reply,) = await post_all(server.base_url, [body])
            assert reply.status == 200, reply.body
        pid, bodies, replies = server.pid("e0"), questions(91, 4, 60, 4), []
        os.kill(pid, signal.SIGSTOP)
        try:
            for body in bodies:  # one after another: the other encoder has time for each
                replies += await ask_during(server, [body], partial(int), None)
            # Quick: without it, and long before any time-out, each of which is that deadline.
            assert psutil.Process(pid).status() == psutil.STATUS_STOPPED
            assert max(reply.lasted_s for reply in replies) < DEADLINE_S / 4
            wait_for(partial(has_won, server), READY_S, "a second encoder was first")
        finally:
            os.kill(pid, signal.SIGCONT)
        assert await check_same_afterwards(server, bodies, replies) == {"answered": len(bodies)}
        assert not any(reply.has_migrated for reply in replies)
        server.check_all_returned()
