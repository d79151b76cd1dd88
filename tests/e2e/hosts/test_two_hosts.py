"""Two hosts with a cable between them: the answers of one, whatever ends on either.

Answers are compared token for token with those of a cluster on one host.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.hosts.clusters import cluster
from tests.e2e.hosts.network import unable
from tests.e2e.server import Server
from tests.e2e.streams import ask_during, check_same_afterwards, first_has_said, questions

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(unable()), reason=unable()),
]
COUNT = 4


async def test_a_host_is_lost_and_comes_back(apart: Server, tmp_path: Path) -> None:
    """Faults F19, F20, F78: who decodes loses power in the middle of answers. They go on with the
    very next token when the host is there again, and its instance has the name that it had."""
    with cluster(("1e1p", "1d"), tmp_path, "--transport", "shm,tcp") as made:
        made.wait_ready(3)
        before = made.server.instances()
        (name,) = (name for name in before if name.startswith("b-"))
        assert before["p0"]["transports"] == {"e0": "shm", name: "tcp"}

        def lose_power() -> None:
            made.cable.kill(made.b)
            made.cable.restart(made.b)
            made.other = made.join_from_b()

        bodies = questions(60, COUNT, side=90, num_tokens=150)
        replies = await ask_during(made.server, bodies, lose_power, first_has_said)
        assert await check_same_afterwards(apart, bodies, replies) == {"answered": COUNT}
        assert any(reply.has_migrated for reply in replies)
        after = made.server.instances()
        assert after[name]["epoch"] > before[name]["epoch"] and len(after) == 3
