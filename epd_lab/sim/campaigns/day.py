"""A day in the life of a cluster: 86,400 seconds of virtual time at one request per second.

One gateway and three instances (1e1p1d) in their default configuration; half of the requests bring
one or two images out of twenty thousand, the rest is text.  Two settings are no defaults, because
the simulated model is small: 4,096 KV blocks of 4 tokens, and answers of at most 12 tokens, as in
the drills.  Everything is checked as in a drill: each answer token by token, every byte that lands,
single flight while it runs, and at the end that nothing is owned.

Requests are drawn and forgotten by the hour, so that a day needs no more memory than an hour.

At full load (`FULL`) a work takes so long that devices hardly rest at this rate.  So a day of that
has no more events than another one.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from epd.config import DecodeConfig, EncodeConfig, EngineConfig, Limits, PrefillConfig, Timing
from epd_lab.sim.checkers import (
    Answers,
    Conservation,
    Faultless,
    GoldenTokens,
    Integrity,
    SingleFlight,
    Wedges,
)
from epd_lab.sim.checkers.base import Context
from epd_lab.sim.client import Clients
from epd_lab.sim.cluster import Cluster, Settings
from epd_lab.sim.core.guard import no_escape
from epd_lab.sim.core.rand import KeyedRandom
from epd_lab.sim.engine.device import Costs
from epd_lab.sim.run import Prepare, nothing_may_fail, rare_collections
from epd_lab.sim.workload import Ask, Workload
from epd_lab.sim.world import World

DEFAULTS = Settings(
    timing=Timing(), limits=Limits(), encode=EncodeConfig(), prefill=PrefillConfig(),
    decode=DecodeConfig(), engine=EngineConfig(), num_blocks=4096,
)  # fmt: skip
MIX = Workload(image_share=0.5, max_images=2, num_images=20_000, timeline_share=0.0)
FULL = dataclasses.replace(
    DEFAULTS,
    costs=Costs(
        preprocess_s=0.05, encode_base_s=1.35, encode_per_patch_s=0.009,
        step_base_s=0.35, step_per_token_s=0.038,
    ),
)  # fmt: skip
HOUR_S = 3600
START_S = 2.0  # the cluster is up by then


@dataclass(frozen=True, slots=True)
class Day:
    """What a day (or some hours of one) took, and what it showed."""

    num_requests: int
    num_tokens: int
    steps: int
    cpu_s: float
    wall_s: float
    violations: tuple[str, ...]


def _as_it_is(world: World, cluster: Cluster) -> None:
    """Nobody looks on."""


def live_through(
    hours: int = 24,
    *,
    hour_s: int = 0,
    seed: int = 0,
    quiet: bool = False,
    settings: Settings = DEFAULTS,
    prepare: Prepare = _as_it_is,
) -> Day:
    """Run so many hours; progress goes to stderr unless `quiet`.

    `hour_s`: seconds of one, each with a request; 0: `HOUR_S`.
    """
    hour_s = hour_s or HOUR_S
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    world = World(seed, keep_trace=False, records=False, max_steps=1 << 62)
    cluster = Cluster(world, "1e1p1d", settings)
    prepare(world, cluster)
    clients = Clients(cluster, ())
    context = Context(world, cluster, clients, nothing_may_fail)
    integrity = Integrity(context)
    by_hour = (Answers(context), GoldenTokens(context))
    at_end = (integrity, SingleFlight(context), Conservation(context), Faultless(context))
    Wedges(context)  # nobody is taken for stuck
    world.loop.describe = cluster.stories
    random = KeyedRandom(seed, "day")
    num_tokens = 0
    with no_escape(), rare_collections():
        cluster.start()
        for hour in range(hours):
            asks = [_ask(random, hour * hour_s + second) for second in range(hour_s)]
            integrity.expect(asks)
            clients.ask_all(asks)
            world.loop.run_until(START_S + (hour + 1) * hour_s)
            _settle(world, lambda: clients.all_ended)
            for checker in by_hour:
                checker.at_end()
            num_tokens += sum(len(record.tokens) for record in clients.records)
            clients.records.clear()
            if not quiet:
                _show(hour + 1, hours, time.perf_counter() - started_s)
        _settle(world, lambda: cluster.idle)
        world.loop.run_until(world.loop.now_s + 2 * DEFAULTS.timing.tombstone_s)
        for last in at_end:
            last.at_end()
    day = Day(
        hours * hour_s,
        num_tokens,
        world.loop.steps,
        time.process_time() - started_cpu_s,
        time.perf_counter() - started_s,
        tuple(world.violations),
    )
    world.close()
    return day


def _ask(random: KeyedRandom, index: int) -> Ask:
    """At a drawn moment of its own second."""
    ask = MIX.ask(random.stream("ask", index), index)
    return dataclasses.replace(ask, at_s=START_S + index + random.uniform("at", index))


def _settle(world: World, done: Callable[[], bool]) -> None:
    """Until that, or for as long as a request may take."""
    limit_s = world.loop.now_s + DEFAULTS.timing.request_timeout_s
    while not done() and world.loop.now_s < limit_s:
        world.loop.run_until(world.loop.now_s + 0.25)


def _show(hour: int, hours: int, elapsed_s: float) -> None:
    left_s = elapsed_s / hour * (hours - hour)
    print(
        f"a day of virtual time: hour {hour} of {hours}, {elapsed_s:.0f} s, {left_s:.0f} s left",
        file=sys.stderr,
        flush=True,
    )
