"""A group of two ranks on two hosts: the answers of one host, and one fate.

Answers are compared token for token with those of a group on one host.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from epd.runtime.claim import read_claim
from epd.transport.bus.curve import ClusterKey
from epd_lab.bench.chaos.hosts import HostCable, two_hosts, unable
from epd_lab.bench.chaos.process import new_dir
from tests.e2e.client import post_all
from tests.e2e.faults.test_kill import ANSWER, HEALTHY
from tests.e2e.server import READY_S, Command, Server, wait_for
from tests.e2e.streams import (
    PATIENT,
    ask_during,
    check_same_afterwards,
    first_has_said,
    questions,
    wait_until_replaced,
)

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(unable()), reason=unable()),
]
GATEWAY, RANKS = 7000, 7001
LOST_S = 10.0  # after a cut


class Pair:
    """The leader's command on host a, the other rank's on host b."""

    def __init__(self, cable: HostCable, directory: Path, topology: str, *flags: str) -> None:
        self.cable = cable
        self.a, self.b = cable.hosts
        self.key = directory / "key.json"
        ClusterKey.generate().save(str(self.key))
        self.flags = ("--cluster-key", str(self.key), "--transport", "tcp", *flags)
        listen = ("--listen", f"tcp://{self.a.address}:{GATEWAY}", "--ranks-elsewhere", "1")
        self._what = (topology, *listen, *self.flags)
        self.commands: list[Command] = []
        self.server = self.lead()
        self.follower = self.follow()

    def lead(self, like: Server | None = None) -> Server:
        self.server = Server(*self._what, on=self.a, like=like, **PATIENT)
        self.commands.append(self.server)
        return self.server

    def follow(self, name: str = "pd0", key: Path | None = None) -> Command:
        flags = (*self.flags, *(("--cluster-key", str(key)) if key is not None else ()))
        join = ("--join", f"tcp://{self.a.address}:{RANKS}")
        listen = ("--listen", f"tcp://{self.b.address}:*", "--threads", "1")
        run_dir = new_dir()
        what = ("--rank-of", name, "--run-dir", str(run_dir), *join, *listen, *flags)
        self.commands.append(Command("run", *what, run_dir=run_dir, on=self.b))
        return self.commands[-1]

    def kill_rank(self) -> None:
        """The process on the other host; its command goes on."""
        (path,) = self.follower.run_dir.rglob("rank-of-pd0.pid")
        claim = read_claim(path)
        assert claim is not None
        self.b.signal(signal.SIGKILL, claim.child.pid)

    @property
    def epoch(self) -> int:
        return int(self.server.instances()["pd0"]["epoch"])

    def is_there(self) -> bool:
        """It is healthy, as its gateway sees it."""
        entry = self.server.instances().get("pd0")
        return entry is not None and entry["state"] == "HEALTHY"

    def check_lost(self) -> None:
        """In time: nobody closes a connection.  Its gateway places nothing there any more."""
        began_s = time.monotonic()
        self.server.says("group lost", LOST_S)
        lost_s = time.monotonic() - began_s
        wait_for(lambda: not self.is_there(), LOST_S - lost_s, "its gateway notices")
        print(f"lost after {lost_s:.1f} s, noticed after {time.monotonic() - began_s:.1f} s")

    async def check_answer(self) -> None:
        (reply,) = await post_all(self.server.base_url, [HEALTHY])
        assert reply.text == ANSWER


@contextlib.contextmanager
def pair(directory: Path, topology: str = "1e1pd:tp2", *flags: str) -> Iterator[Pair]:
    """At the end both commands end in good order, and leave nothing."""
    with two_hosts() as cable:
        made = Pair(cable, directory, topology, *flags)
        try:
            made.server.wait_ready()
            yield made
            made.server.check_all_returned()
            assert made.follower.stop(signal.SIGINT) == 130, made.follower.text
            assert made.server.stop() == 0, made.server.text
            for command in made.commands:
                assert "Traceback" not in command.text, command.text
        finally:
            for command in made.commands:
                command.discard()


async def test_two_hosts_answer_as_one_does(together: Server, tmp_path: Path) -> None:
    """As a group on one host does, and one rank alone (faults/test_groups.py).  Then the follower
    dies; its command starts the next one, which joins the next life of the leader."""
    bodies = questions(400, 4, side=120, num_tokens=30)
    with pair(tmp_path) as made:
        answers = [
            [reply.text for reply in await post_all(server.base_url, bodies)]
            for server in (made.server, together)
        ]
        assert answers[0] == answers[1] and all(answers[0])
        assert made.server.instances()["pd0"]["transports"] == {"e0": "tcp"}
        epoch = made.epoch
        made.kill_rank()
        wait_until_replaced(made.server, "pd0", epoch)
        await made.check_answer()


@pytest.mark.long
async def test_the_followers_host_loses_power(together: Server, tmp_path: Path) -> None:
    """No socket is closed, and no error comes from it.  Answers go on with their next token when
    its command is started again."""
    with pair(tmp_path) as made:
        epoch = made.epoch

        def lose_power() -> None:
            made.cable.cut(made.b)  # else its kernel would say that its processes end
            made.cable.kill(made.b)
            made.check_lost()
            made.cable.restart(made.b)
            made.cable.mend()
            made.follower = made.follow()

        bodies = questions(410, 4, side=120, num_tokens=400)
        replies = await ask_during(made.server, bodies, lose_power, first_has_said)
        wait_until_replaced(made.server, "pd0", epoch)
        assert await check_same_afterwards(together, bodies, replies) == {"answered": 4}


@pytest.mark.long
@pytest.mark.parametrize("senders", ["both", "a", "b"])
async def test_the_cable_is_cut(senders: str, together: Server, tmp_path: Path) -> None:
    """In a collective, which would wait for its own limit.  Both ranks end by themselves and find
    each other again when the cable is mended."""
    with pair(tmp_path) as made:
        epoch = made.epoch
        cut = [host for host in made.cable.hosts if host.name == senders]

        def cut_it() -> None:
            made.cable.cut(*cut)
            made.check_lost()
            made.follower.says("this life of pd0 is over", LOST_S)
            made.cable.mend()

        bodies = questions(420, 4, side=120, num_tokens=400)
        replies = await ask_during(made.server, bodies, cut_it, first_has_said)
        wait_until_replaced(made.server, "pd0", epoch)
        assert await check_same_afterwards(together, bodies, replies) == {"answered": 4}


@pytest.mark.long
async def test_a_short_cut_ends_nothing(together: Server, tmp_path: Path) -> None:
    with pair(tmp_path) as made:
        epoch = made.epoch
        bodies = questions(430, 4, side=120, num_tokens=100)
        cut = lambda: made.cable.cut_for(2)  # noqa: E731
        replies = await ask_during(made.server, bodies, cut, first_has_said)
        assert await check_same_afterwards(together, bodies, replies) == {"answered": 4}
        assert made.epoch == epoch


@pytest.mark.long
async def test_the_leader_dies(tmp_path: Path) -> None:
    """Its process, then its whole command, which is started again."""
    with pair(tmp_path) as made:
        epoch = made.epoch
        made.a.signal(signal.SIGKILL, made.server.pid("pd0"))
        wait_until_replaced(made.server, "pd0", epoch)
        await made.check_answer()
        made.server.send(signal.SIGKILL)
        wait_for(lambda: not made.server.processes(), READY_S, "its processes end")
        made.lead(like=made.server)
        made.server.wait_ready()
        await made.check_answer()


@pytest.mark.long
def test_who_is_refused(tmp_path: Path) -> None:
    """A wrong key and a wrong name end a command with a sentence; one rank too many waits."""
    other = tmp_path / "other.json"
    ClusterKey.generate().save(str(other))
    with pair(tmp_path) as made:
        epoch = made.epoch
        for sentence, refused in (
            (
                "not a member of this cluster: give it the same --cluster-key",
                made.follow(key=other),
            ),
            ("pd0 leads here, and not pd7: correct --rank-of or --join", made.follow("pd7")),
        ):
            assert refused.wait(READY_S) == 1, refused.text
            assert sentence in refused.text
        spare = made.follow()
        spare.says("pd0 has all of its ranks", READY_S)
        assert made.epoch == epoch
        made.follower.stop()
        wait_until_replaced(made.server, "pd0", epoch)
        made.follower = spare
