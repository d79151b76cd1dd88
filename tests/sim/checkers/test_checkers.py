"""Each checker here has bugs that it notices and nothing else does: without it they survive."""

from __future__ import annotations

import re
from types import SimpleNamespace
from unittest import mock

import pytest

from epd.failure import Failure, FailureKind
from epd.messages import RequestFailed
from epd_lab.sim import checkers, drills
from epd_lab.sim.campaigns.measure import DrillMeasures
from epd_lab.sim.checkers.base import Checker, Context
from epd_lab.sim.client import Clients
from epd_lab.sim.cluster import GATEWAY
from epd_lab.sim.planes.network import Parcel
from epd_lab.sim.run import nothing_may_fail, run
from epd_lab.sim.workload import Ask
from epd_lab.sim.world import MAX_VIOLATIONS
from tests.roles.simulated import simulated
from tests.sim.mutants import MUTANTS

MEASURED = DrillMeasures.stored()
ALONE: tuple[tuple[type[Checker], str, str], ...] = (
    (checkers.WakeUps, "leave-the-queue", "who_leaves_the_queue_wakes_nobody"),
    (checkers.WakeUps, "stall-the-only-encode", "what_is_not_stranded_any_more_is_kept"),
    (checkers.Bounds, "small-pool", "no_peer_has_a_quota"),
    (checkers.Bounds, "cache-tiers", "rows_above_the_budget_stay"),
    (checkers.Bounds, "few-places", "a_step_takes_all_who_decode"),
    (checkers.Bounds, "encoder-runs-ahead", "an_encoder_runs_ahead_for_ever"),
    (checkers.Attempts, "prefill-is-not-missed", "whoever_used_the_lost_is_tried_again"),
    (checkers.Attempts, "failed-writes", "the_next_attempt_goes_where_it_failed"),
    (
        checkers.Attempts,
        "messages-of-an-attempt-before",
        "a_message_of_the_last_attempt_ends_this_one",
    ),
    (checkers.Elsewhere, "encode-dies-between-images", "a_lost_encoder_ends_the_attempt"),
    (checkers.Tombstones, "messages-of-an-attempt-before", "an_abort_is_confirmed_once"),
    (checkers.FirstToken, "quiet", "a_grant_waits_for_its_retry"),
    (checkers.Gateways, "one-of-two-gateways-dies", "what_a_dead_gateway_asked_for_goes_on"),
    (checkers.Durations, "lose-the-only-prefill", "the_silent_are_lost_late"),
    (checkers.Tombstones, "drain-decode", "who_drains_refuses_what_it_has"),
    (checkers.Answers, "too-long-for-decode", "what_was_said_counts_twice"),
    (checkers.Lives, "a-new-gateway-counts-anew", "a_list_outlives_its_registry"),
    (checkers.Wedges, "idle-device-freezes", "a_self_test_without_the_device"),
    (checkers.Forsaken, "cancel-mid-transfer", "an_abort_is_confirmed_when_asked_again"),
    (checkers.Turns, "two-keys", "keys_share_a_line"),
    (checkers.Drains, "drain-at-its-bound", "who_drains_too_long_keeps_its_work"),
    (checkers.Switches, "roles-cannot-be-loaded", "a_failed_switch_has_no_reason"),
    (checkers.Adapters, "adapter-that-one-cannot-hold", "a_failed_load_is_not_taken_back"),
    (checkers.Books, "quiet", "what_rests_counts_as_busy"),
    (checkers.Integrity, "stall-encode", "lost_peer_frees_slots"),
    (checkers.GoldenTokens, "quiet", "an_answer_stops_before_its_end"),
    (checkers.Deadlines, "late-first-token", "patience_has_no_end"),
    (checkers.Silence, "last-messages-lost", "nobody_asks_for_last_messages"),
    (checkers.SingleFlight, "same-image-everywhere", "placement_forgets_flights"),
    (checkers.Residency, "cache-events-lost", "cache_gap_is_ignored"),
    (checkers.Poison, "an-image-is-poison", "the_silent_may_have_a_third"),
    (checkers.Faultless, "quiet", "a_handler_fails_when_its_work_is_done"),
    (checkers.Scopes, "two-tenants", "keys_say_nothing_of_who_asks"),
    (checkers.Groups, "rank-dies", "half_a_group_goes_on"),
    (checkers.Links, "mute-to-encode", "mute_links_are_given_up"),
    (checkers.Conservation, "prefill-is-not-missed", "keys_of_what_is_over_go_by_a_clock"),
    (checkers.Liveness, "restart-gateway", "a_new_gateway_begins_late"),
)


@pytest.mark.parametrize(("checker", "drill", "mutant"), ALONE, ids=str)
def test_nothing_else_notices(checker: type[Checker], drill: str, mutant: str) -> None:
    """In one of its seeds: checkers look on, and none changes what another sees."""
    seeds = MEASURED.caught.get((drill, mutant), range(20))
    found: list[set[str]] = []
    with MUTANTS[mutant]():
        for seed in seeds:
            plan = drills.by_name(drill).plan(seed)
            told = run(plan).violations
            found.append({text.partition("[")[2].partition("]")[0] for text in told})
            if found[-1] == {checker.name}:
                break
        assert found[-1] == {checker.name}, found
        if len(told) < MAX_VIOLATIONS:
            return
        others = tuple(other for other in checkers.ALL if other is not checker)
        with mock.patch.object(checkers, "ALL", others):  # what was not kept of so many
            assert not run(plan).violations


def test_each_checker_has_a_bug_of_its_own() -> None:
    assert {checker for checker, _, _ in ALONE} == set(checkers.ALL)


def test_what_an_engine_finds_is_told_when_it_is_found_and_where() -> None:
    with MUTANTS["abort_frees_blocks"]():
        result = run(drills.by_name("hang-up-storm").plan(0))
    told = re.match(
        r"(\d+\.\d+) s: \[integrity\] epd0:1: \S+ .*blocks? \[?\d+", result.violations[0]
    )
    assert told is not None, result.violations[0]
    last_s = max(record.ended_s for record in result.records if record.ask.index < 9000)
    assert float(told[1]) <= last_s < result.virtual_s


@pytest.mark.parametrize("is_heard", [False, True])
def test_a_message_that_the_gateway_has_not_heard_blames_nobody(is_heard: bool) -> None:
    """Where the attempt failed, the gateway knows from messages; this one comes before p0 is lost,
    or is still on its way then."""
    with simulated("1e1p1d") as cluster:
        clients = Clients(cluster.cluster, ())
        checker = checkers.Attempts(
            Context(cluster.world, cluster.cluster, clients, nothing_may_fail)
        )
        cluster.node("p0").devices[0].hung = True
        ask = Ask(1, 0.0, (11, 12, 13), (), 3, 1)
        stream = cluster.within(GATEWAY, cluster.gateway.role.submit, ask.generation())
        if not is_heard:
            cluster.world.network.block("p0", GATEWAY)
        failed = RequestFailed(
            request_id=stream.request_id,
            attempt=1,
            failure=Failure(FailureKind.ENGINE, "because", "d0"),
        )
        cluster.within("p0", cluster.node("p0").actor.send, GATEWAY, failed)
        cluster.pass_time(2 * cluster.settings.timing.lost_after_s)
        machine = cluster.gateway.role._open[stream.request_id]
        assert machine.avoided == ({"d0"} if is_heard else {"p0"})
        assert checker._blamed[stream.request_id] == machine.avoided
        assert not cluster.world.violations


@pytest.mark.parametrize(
    ("text", "times", "is_open", "is_told"),
    [
        ("KvOffer r/1/kv#1", 1, False, False),
        ("KvOffer r/1/kv#1", 3, False, False),  # for as long as an echo may be trusted
        ("KvOffer r/1/kv#1", 4, False, True),
        ("KvOffer r/1/kv#1", 1, True, True),
        ("Grant r/1/0#1", 3, False, False),
        ("Grant r/1/0#1", 4, False, True),
        ("Grant r/1/0#1", 1, True, True),
        ("TransferAborted r/1/kv#1", 1, False, False),
        ("TransferAborted r/1/kv#1", 1, True, True),
    ],
)
def test_what_nobody_misses_may_wait_in_a_mute_link(
    text: str, times: int, is_open: bool, is_told: bool
) -> None:
    with simulated("1e1p1d") as cluster:
        clients = Clients(cluster.cluster, ())
        checker = checkers.Links(Context(cluster.world, cluster.cluster, clients, nothing_may_fail))
        p0, d0 = cluster.node("p0"), cluster.node("d0")
        network = cluster.world.network
        link = network.link(p0.process, d0.actor.address)
        assert network.mute("p0", "d0")
        link.held.append(Parcel(b"", (), text, times))
        cluster.pass_time(6.1)
        end = {
            "KvOffer": cluster.instance("p0").outgoing,
            "Grant": cluster.instance("p0").incoming,
            "TransferAborted": cluster.instance("d0").incoming,
        }[text.partition(" ")[0]]
        room = SimpleNamespace(terminal=False) if is_open else None
        with mock.patch.object(end, "find", lambda key: room):
            checker.at_rest()
        assert bool(cluster.world.violations) == is_told
        cluster.world.violations.clear()
