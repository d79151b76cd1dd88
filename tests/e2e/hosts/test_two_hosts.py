"""Two hosts with a cable between them: the answers of one, whatever ends on either.

Answers are compared token for token with those of a cluster on one host.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from epd.transport.backends import BACKENDS
from epd_lab.bench.chaos.hosts import unable
from tests.e2e.goldens import directory_of, goldens
from tests.e2e.hosts.clusters import cluster
from tests.e2e.server import READY_S, Server
from tests.e2e.streams import ask_during, check_same_afterwards, first_has_said, questions
from tests.e2e.test_exactness import burst
from tests.patience import PATIENCE_S

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
            made.other = made.join_from(made.b)

        bodies = questions(60, COUNT, side=90, num_tokens=150)
        replies = await ask_during(made.server, bodies, lose_power, first_has_said)
        assert await check_same_afterwards(apart, bodies, replies) == {"answered": COUNT}
        assert any(reply.has_migrated for reply in replies)
        after = made.server.instances()
        assert after[name]["epoch"] > before[name]["epoch"] and len(after) == 3


@pytest.mark.long
@pytest.mark.parametrize("transport", ["tcp", "mooncake", "nixl", "auto"])
async def test_conversations_equal_generate(transport: str, tmp_path: Path) -> None:
    """A stage on the other host, whose monotonic clock is elsewhere: as of a host that started at
    another time.  Wall clocks are this kernel's; only the simulator's differ."""
    if transport in BACKENDS and (reason := BACKENDS[transport].lacks()):
        pytest.skip(reason)
    flags = ("--transport", transport, "--model", str(directory_of("embedded")))
    with cluster(("1e1p", "1d"), tmp_path, *flags, ahead_s=5) as made:
        uptimes = [host.run("cat", "/proc/uptime").split()[0] for host in made.cable.hosts]
        assert 4 < float(uptimes[1]) - float(uptimes[0]) < 4 + PATIENCE_S
        made.wait_ready(3)
        clocks = {os.readlink(f"/proc/{p.pid}/ns/time") for p in made.other.processes()}
        assert os.readlink(f"/proc/{made.b.first_pid}/ns/time") in clocks and len(clocks) == 1
        assert await burst(made.server, "embedded", goldens("embedded")) == []
        assert await burst(made.server, "embedded", goldens("embedded"), seed=1) == []


@pytest.mark.long
def test_equal_names(tmp_path: Path) -> None:
    """Fault F78: names that are not given by hand differ, also where hosts have one name.  One by
    hand that lives on the other host is refused at both ends."""
    with cluster(("1epd", "1epd"), tmp_path, names=("node", "node")) as made:
        another = made.join_from(made.a)
        made.wait_ready(3)
        before = made.server.instances()
        assert {name.rpartition("-")[2] for name in before} == {"epd0"}, before
        twin = made.join_from(made.b, "--role", "encode", "--id", "epd0")
        assert twin.wait(READY_S) == 1, twin.text
        assert "its name is in use by a living instance" in twin.text
        assert "join refused" in made.server.text
        after = made.server.instances()
        assert [entry["epoch"] for entry in after.values()] == [
            entry["epoch"] for entry in before.values()
        ]
        assert another.stop() == 0, another.text
