"""`epd drain`, `epd role` and `epd rollout`: what they ask for, wait for and say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest

from epd.api.watching.cluster_view import ClusterView, ProcessView
from epd.cli.ask.client import Client
from epd.cli.boundary import CommandFailed
from epd.cli.k8s import probe
from epd.cli.look import drains
from epd.cli.main import parser_of

BACK_S = 2.0


def shown(
    state: str, epoch: int = 1, name: str = "d0", roles: tuple[str, ...] = ("decode",), **facts: Any
) -> ProcessView:
    return ProcessView(instance=name, roles=[*roles], state=state, epoch=epoch, **facts)


class Cluster:
    """Shows one list of instances after the other, the last one ever after."""

    def __init__(self, *lists: list[ProcessView], refusal: str = "") -> None:
        self.lists = list(lists)
        self.refusal = refusal
        self.asked: list[Mapping[str, object]] = []
        self.lines: list[str] = []
        self.paths: list[str] = []

    async def drain(self, body: Mapping[str, object], path: str = "/drain") -> None:
        self.paths.append(path)
        if self.refusal:
            raise CommandFailed(self.refusal)
        self.asked.append(body)

    async def state(self, query: Mapping[str, str]) -> ClusterView:
        now = self.lists[0] if len(self.lists) == 1 else self.lists.pop(0)
        gateway = ProcessView(instance="gateway", roles=["gateway"])
        return ClusterView(processes=[gateway, *now])

    @property
    def client(self) -> Client:
        return cast("Client", self)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_time(seconds: float) -> None:
        pass

    monkeypatch.setattr(drains.asyncio, "sleep", no_time)


async def drain(at: Cluster, within_s: float = 5.0) -> ProcessView:
    return await drains.drain(at.client, "d0", within_s, forced=False, tell=at.lines.append)


async def rollout(at: Cluster, *names: str) -> list[str]:
    return await drains.rollout(at.client, names, 5.0, BACK_S, forced=False, tell=at.lines.append)


async def test_progress_is_shown_until_it_has_left() -> None:
    at = Cluster(
        [shown("HEALTHY")],
        [shown("DRAINING", drain_left_s=4.2, assigned=3, in_use={"requests": 3, "rooms": 0})],
        [shown("DRAINING", drain_left_s=0.0, assigned=1)],
        [shown("LEFT")],
    )
    assert (await drain(at)).state == "LEFT"
    body = {"instance": "d0", "within_s": 5.0, "force": False, "restart": False}
    assert at.asked == [body]
    assert at.lines == [
        "d0 is asked",
        "d0 drains: 3 open (requests 3); it moves in 4 s",
        "d0 drains: 1 open (nothing held); it moves now",
    ]


async def test_a_lost_message_is_sent_again_and_a_refusal_ends_it() -> None:
    at = Cluster(*[[shown("HEALTHY")]] * 11, [shown("LEFT")])
    await drain(at)
    assert len(at.asked) == 2
    with pytest.raises(CommandFailed, match="the only one"):
        await drain(Cluster([], refusal="it is the only one"))


async def test_who_does_not_leave_is_an_error() -> None:
    with pytest.raises(CommandFailed, match="d0 has not left"):
        await drain(Cluster([shown("DRAINING", drain_left_s=0.0)]))


async def test_who_is_lost_meanwhile_is_told() -> None:
    at = Cluster([shown("DRAINING", drain_left_s=3.0)], [shown("LOST")])
    assert (await drain(at)).state == "LOST"
    assert at.lines[-1].startswith("d0 was lost")


async def switch(at: Cluster, *roles: str) -> ProcessView:
    times = 5.0, BACK_S
    return await drains.switch(at.client, "d0", roles, *times, forced=False, tell=at.lines.append)


async def test_who_gets_other_roles_is_waited_for() -> None:
    """However soon it is back: its former epoch is known."""
    leaving = [shown("SWITCHING", drain_left_s=4.2, assigned=3)]
    back = shown("HEALTHY", 2, roles=("encode", "prefill"))
    at = Cluster([shown("HEALTHY")], leaving, [shown("LEFT")], [shown("PROBING", 2)], [back])
    assert await switch(at, "encode", "prefill") == back
    asked = {"instance": "d0", "within_s": 5.0, "force": False, "roles": ["encode", "prefill"]}
    assert (at.asked, at.paths) == ([asked], ["/role"])
    assert at.lines[0] == "d0 switches: 3 open (nothing held); it moves in 4 s"
    assert at.lines[-1].startswith("d0 serves encode, prefill, ")
    assert await switch(Cluster([shown("HEALTHY")], [back]), "encode", "prefill") == back


async def test_a_switch_that_failed_is_an_error_with_its_reason() -> None:
    back = shown("HEALTHY", 2, reason="it cannot have the roles encode: no such file")
    at = Cluster([shown("HEALTHY")], [shown("LEFT")], [back])
    with pytest.raises(CommandFailed, match=r"d0 serves decode as before: it cannot .* no such"):
        await switch(at, "encode")
    with pytest.raises(CommandFailed, match="d0 is not back after 2 s"):
        await switch(Cluster([shown("HEALTHY")], [shown("LEFT")]), "encode")


async def test_a_rollout_takes_one_after_the_other_and_waits_for_each() -> None:
    old = [shown("HEALTHY", name="d0"), shown("HEALTHY", name="d1")]
    half = [shown("HEALTHY", 2, name="d0"), shown("HEALTHY", name="d1")]
    gone, away = [shown("LEFT", name="d0"), old[1]], [half[0], shown("LEFT", name="d1")]
    done = [half[0], shown("HEALTHY", 2, name="d1")]
    at = Cluster(old, old, gone, gone, half, half, away, away, done)
    assert await rollout(at) == ["d0", "d1"]
    assert [(body["instance"], body["restart"]) for body in at.asked] == [
        ("d0", True), ("d1", True),
    ]  # fmt: skip
    assert at.lines[-1] == "d1 serves again (2 of 2)"


async def test_who_does_not_come_back_stops_the_rollout() -> None:
    old = [shown("HEALTHY", name="d0"), shown("HEALTHY", name="d1")]
    at = Cluster(old, old, [shown("LEFT", name="d0"), old[1]])
    with pytest.raises(CommandFailed, match="d0 is not back after 2 s; d1 were not restarted"):
        await rollout(at)
    assert len(at.asked) == 1
    with pytest.raises(CommandFailed, match="no instance d7; there are d0, d1"):
        await rollout(Cluster(old), "d7")


def test_flags_have_units() -> None:
    args = parser_of("drain").parse(["d0", "--within", "1m"])
    assert (args.name, args.within, args.force) == ("d0", 60.0, False)
    args = parser_of("rollout").parse(["d0", "d1", "--force", "--back-within", "90s"])
    assert (args.names, args.within, args.force, args.back_within) == (["d0", "d1"], 30.0, True, 90)


# --- who makes no progress is a member -----------------------------------------------------------


@pytest.mark.parametrize("state", ["STUCK", "PROBING"])
async def test_who_is_stuck_has_not_left_before_it_has(state: str) -> None:
    at = Cluster(
        [shown(state, assigned=3)],
        [shown("DRAINING", drain_left_s=4.0, assigned=3)],
        [shown("DRAINING", drain_left_s=0.0, assigned=3)],
        [shown("LEFT")],
    )
    assert (await drain(at)).state == "LEFT"


async def test_a_rollout_of_all_has_who_is_stuck() -> None:
    ends = [[shown("LEFT")], [shown("HEALTHY", epoch=2)]]
    at = Cluster(*[[shown("STUCK")]] * 3, *ends)
    assert await rollout(at) == ["d0"]


def test_a_pod_that_switches_roles_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    told = probe._Ready([probe._Member("d0", "SWITCHING")])
    monkeypatch.setattr(probe, "_ready", lambda where: told)
    assert probe.problem("g:1", "d0", 1, alive=True) == ""
