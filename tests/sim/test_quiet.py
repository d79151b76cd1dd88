"""What goes on when nothing goes on: heartbeats, tombstones, reports, and when silence is over."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from epd.fsm import instance
from epd.messages import Tokens
from epd_lab.sim.client import Clients
from epd_lab.sim.cluster import GATEWAY, MEMBERSHIP, Cluster, Settings
from epd_lab.sim.drills import by_name
from epd_lab.sim.engine.golden import Image
from epd_lab.sim.run import run
from epd_lab.sim.workload import Ask
from epd_lab.sim.world import World

HOUSEKEEPING = ("Heartbeat", "HeartbeatAck")
SETTINGS = Settings()


class Watched:
    """A cluster of three instances, and the messages that it sends."""

    def __init__(self, settings: Settings = SETTINGS) -> None:
        self.world = World(3)
        self.cluster = Cluster(self.world, "1e1p1d", settings)
        self.clients = Clients(self.cluster, ())
        self.sent: Counter[str] = Counter()
        self.world.network.on_message.append(
            lambda source, target, message: self.sent.update([type(message).__name__])
        )
        self.cluster.start()
        self.world.loop.run_until(1.0)

    def run_for(self, seconds: float) -> None:
        self.world.loop.run_until(self.world.loop.now_s + seconds)

    def ask(self, *, wants_timeline: bool = False) -> None:
        images = ((1, Image("one")),)
        at_s = self.world.loop.now_s
        record = self.clients.add(
            Ask(0, at_s, (11, 12), images, 3, 1, wants_timeline=wants_timeline)
        )
        self.run_for(1.0)
        assert record.finish_reason


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched()
    yield watched
    watched.world.close()


def test_heartbeats_are_acknowledged_a_few_times_per_loss_and_nobody_joins_again(
    watched: Watched,
) -> None:
    watched.sent.clear()
    watched.run_for(40.0)
    assert watched.sent["Heartbeat"] == 3 * 40.0 / 0.4
    assert watched.sent["HeartbeatAck"] == watched.sent["Heartbeat"] / 2  # every 0.8 s of 2.0
    assert set(watched.sent) == set(HOUSEKEEPING)


def test_a_missed_membership_is_noticed_by_the_next_heartbeat(watched: Watched) -> None:
    node = watched.cluster.node("p0")
    assert node is not None and node.instance is not None
    (place,) = node.instance.member.places
    place.version -= 1
    watched.sent.clear()
    watched.run_for(0.5)
    assert watched.sent["Join"] == 1 and watched.sent["Membership"] == 1


def test_one_clock_of_silence_has_two_marks(watched: Watched) -> None:
    gateway = watched.cluster.node(GATEWAY)
    assert gateway is not None and gateway.gateway is not None
    registry = gateway.gateway.registry
    encoder = next(i for i in registry.instances if i.key == "e0:1")
    watched.world.stall("e0")
    watched.run_for(0.95 - 0.4)
    assert encoder.state is instance.S.HEALTHY
    watched.run_for(0.5)
    assert encoder.state is instance.S.SUSPECT
    watched.run_for(1.0)
    assert encoder.state is instance.S.LOST


def test_who_has_nothing_open_leaves_at_once_though_its_gateway_is_gone(watched: Watched) -> None:
    """That it does not answer is doubted for as long as this process lives (LINK)."""
    node = watched.cluster.node("e0")
    assert node is not None and node.instance is not None
    watched.world.kill(GATEWAY)
    watched.run_for(6.0)
    assert node.instance.live()["links_doubted"] == 1
    leaving = watched.world.loop.create_task(
        node.instance.drain(), name="drain", context=node.process.context
    )
    watched.run_for(0.5)
    assert leaving.done() and leaving.result(), "nothing had to be left"


def test_a_peer_that_went_with_its_registry_is_not_asked_for_ever(watched: Watched) -> None:
    """The gateway that would have said that it is lost is gone; the next one never met it."""
    node, gone = watched.cluster.node("p0"), watched.cluster.node("e0")
    assert node is not None and node.instance is not None
    assert gone is not None and gone.instance is not None
    for name in (GATEWAY, "e0"):
        watched.world.kill(name)
    node.instance.actor.doubt(gone.instance.actor.address)
    watched.run_for(3.0)
    assert "e0" in node.instance.links.silent()
    watched.cluster.spawn(GATEWAY)
    watched.run_for(10.0)
    assert node.instance.links.silent() == () and not node.timers(MEMBERSHIP)


def test_tombstones_are_not_live_and_go(watched: Watched) -> None:
    watched.ask()
    found = [node.instance for node in watched.cluster.living() if node.instance]
    ends = [end for one in found for end in (one.outgoing, one.incoming)]
    assert [end.live()[end.end] for end in ends] == [0] * 6
    assert [len(end._rooms) for end in ends] == [1, 0, 1, 1, 0, 1], "rows to p0, KV from it"
    watched.run_for(Settings().timing.tombstone_s * 9 / 8)
    assert not any(end._rooms or end._ended for end in ends)


def test_stages_report_only_for_a_timeline(watched: Watched) -> None:
    watched.ask()
    assert watched.sent["StageReport"] == 0
    watched.ask(wants_timeline=True)
    assert watched.sent["StageReport"] == 3  # encode (from its cache or not), prefill, decode


def test_an_answer_that_nobody_reads_as_it_grows_takes_few_words(watched: Watched) -> None:
    whole = Ask(0, 0.0, (11, 12), (), 9, 1, stops_at_eos=False, tokens_per_word=4)
    for ask, num_words in ((whole, 3), (dataclasses.replace(whole, tokens_per_word=1), 9)):
        watched.sent.clear()
        record = watched.clients.add(ask)
        watched.run_for(0.2)
        assert tuple(record.tokens) == ask.answer()
        assert watched.sent["Tokens"] == num_words  # of the whole one: 1, 4 and 4 tokens
        assert watched.sent["RequestAccepted"] == 0  # the first token says it


def test_tokens_are_not_held_back_for_long(watched: Watched) -> None:
    """Whoever computes slowly says so with the tokens that it has."""
    node = watched.cluster.node("d0")
    assert node is not None
    node.process.slowness = 300.0
    ask = Ask(0, 0.0, (11, 12), (), 12, 1, stops_at_eos=False, tokens_per_word=1000)
    record = watched.clients.add(ask)
    watched.run_for(4.0)  # some six tokens; nothing is silent for a third of stall_timeout_s
    assert 1 < len(record.tokens) < 12
    watched.run_for(10.0)
    assert tuple(record.tokens) == ask.answer()


def test_the_last_word_of_a_held_prompt_is_inquired_after() -> None:
    """It was answered, though its blocks are still owned: who asks is told that it has ended."""
    timing = msgspec.structs.replace(Settings().timing, kv_lease_s=20.0)
    watched = Watched(dataclasses.replace(Settings(), timing=timing))
    node = watched.cluster.node("p0")
    assert node is not None and node.instance is not None
    node.process.slowness = 300.0  # it says first that it is there
    actor, lost = node.instance.actor, list[Tokens]()
    send = actor.send

    def loses_one(to: Any, message: Any, payloads: Any = ()) -> bool:
        if isinstance(message, Tokens) and not lost:
            lost.append(message)
            return True
        return send(to, message, payloads)

    actor.send = loses_one  # type: ignore[method-assign]
    ask = Ask(0, 0.0, (11, 12), (), 3, 1, drives=True, leaves_after="prefill")
    record = watched.clients.add(ask)
    watched.run_for(timing.stall_timeout_s)
    assert lost and watched.sent["RequestInquiry"]
    assert record.staged and record.error is None
    live = node.instance.live()
    assert live["held_prompts"] == 1 and live["requests"] == 0, "it takes no place in the queue"
    watched.world.close()


@pytest.mark.parametrize("name", ["kill-encode", "lossy-bus", "restart-gateway", "small-pool"])
def test_after_silence_is_over_nothing_happens(name: str) -> None:
    """Ended early, a run misses nothing: all that would follow are heartbeats."""
    result = run(by_name(name).plan(9), keep=True)
    world, cluster = result.world, result.cluster
    assert world is not None and cluster is not None
    assert not cluster.waited_out and cluster.idle
    before = len(world.events)
    world.loop.run_until(world.loop.now_s + 60.0)
    later = list(world.events)[before:]
    assert later
    beats = {
        ("INSTANCE", "HEALTHY"),
        ("MEMBERSHIP", "MEMBER"),
        *(("arrive", kind) for kind in HOUSEKEEPING),
    }
    assert {(kind, what[-1]) for _, kind, what in later} == beats
    assert not any(node.timers(MEMBERSHIP) for node in cluster.living())
    world.close()
