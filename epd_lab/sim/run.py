"""One run: build the world, let it happen, heal it, let it drain, check.

A `Plan` is everything that decides a run, so that equal plans give equal traces; the shrinker takes
parts of it away.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from epd_lab.sim import checkers
from epd_lab.sim.checkers.base import Checker, Context, MayFail
from epd_lab.sim.client import Clients, Record
from epd_lab.sim.cluster import Cluster, Settings
from epd_lab.sim.core.guard import no_escape
from epd_lab.sim.core.loop import Deadlock, StepLimitReached
from epd_lab.sim.engine.golden import Image
from epd_lab.sim.faults import Fault, Injector
from epd_lab.sim.planes.network import Conditions
from epd_lab.sim.planes.transfer import DataConditions
from epd_lab.sim.workload import Ask
from epd_lab.sim.world import World

HEAL_SETTLE_S = 5.0
REST_S = 3.0
WAITED_OUT = 8  # every so many seeds the silence is waited out
STAY = {  # nobody ends
    "adapter", "corrupt", "drift", "hang", "jump", "oom", "raise", "raise_late", "skew", "slow",
    "spoil",
}  # fmt: skip
WEDGES = ("wedge", "freeze")  # what an instance notices itself, and ends of
ENDS_GROUP = {"raise", "raise_late", "oom", "slow", "hang"}  # but what fails at one rank alone


def nothing_may_fail(record: object) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that decides a run."""

    seed: int
    topology: str
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...] = ()
    network: Conditions = Conditions()
    data: DataConditions = DataConditions()
    settings: Settings = Settings()
    may_fail: MayFail = nothing_may_fail
    engine_faults: bool = False

    @property
    def bus_loses(self) -> bool:
        """Whether messages between living processes can be lost."""
        return self.network.loss > 0 or any(
            fault.kind in ("reset", "mute") for fault in self.faults
        )

    @property
    def devices_hang(self) -> bool:
        """Whether a device may take work and answer only much later, or never."""
        return any(fault.kind in ("hang", "slow", *WEDGES) for fault in self.faults)

    @property
    def all_stay(self) -> bool:
        """Whether all processes live, and run whenever one of them does."""
        together = all(
            self._stays(fault) or (fault.kind == "sleep" and fault.target == "all")
            for fault in self.faults
        )
        return together and not self.bus_loses

    @property
    def instances_stay(self) -> bool:
        """Whether every instance lives and is a member, but for a short while without a gateway."""
        most_s = self.settings.timing.lost_after_s
        together = all(
            self._stays(fault)
            or (fault.kind == "kill" and fault.target == "gateway" and fault.duration_s < most_s)
            for fault in self.faults
        )
        return (
            self.settings.autoscale == "off"
            and together
            and not self.bus_loses
            and not self.devices_hang
        )

    def _stays(self, fault: Fault) -> bool:
        has_groups = ":" in self.topology
        return fault.kind in STAY and not (has_groups and fault.kind in ENDS_GROUP)

    @property
    def undisturbed(self) -> bool:
        """Whether nothing goes wrong: no attempt is made twice, none is given up."""
        data = self.data
        stressed = self.bus_loses or max(data.failed, data.unknown, data.corrupt) > 0
        leaves = any(ask.cancel_after_s for ask in self.asks)
        flawed = any(image.flaw for ask in self.asks for _, image in ask.images)
        moves = self.settings.autoscale != "off"
        return not (self.faults or stressed or leaves or flawed or moves)


def describe(plan: Plan) -> str:
    """A plan in a line, which is printed before it is run."""
    asks = plan.asks
    work = (
        f"{len(asks)} requests ({sum(bool(ask.images) for ask in asks)} with images, "
        f"{sum(ask.cancel_after_s > 0 for ask in asks)} hang up)"
    )
    faults = "; ".join(map(str, plan.faults)) or "no fault"
    return f"{plan.topology}, {work}, {faults}, {plan.network}, {plan.data}"


@dataclass(slots=True)
class Result:
    """What a run showed."""

    plan: Plan
    violations: list[str]
    digest: str
    steps: int
    virtual_s: float
    fired: Counter[str]
    outcomes: Counter[str]
    records: list[Record] = field(default_factory=list)
    happened: frozenset[str] = frozenset()
    world: World | None = None
    cluster: Cluster | None = None

    @property
    def passed(self) -> bool:
        return not self.violations


Prepare = Callable[[World, Cluster], None]
YOUNG_OBJECTS = 100_000  # more than a run of a drill keeps alive


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Collect cyclic garbage rarely, and once at the end, when a world that was not kept is
    garbage.  Python's own pace takes a fifth of a run's time, most of it to find a world alive.

    So a result must not hold its world: what is alive then is old, and nobody looks at it again.
    """
    kept = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, *kept[1:])
    try:
        yield
    finally:
        gc.collect(0)
        gc.set_threshold(*kept)


class _Noticed(Exception):
    """Something is wrong, and that is all that was asked."""


def run(
    plan: Plan, *, keep: bool = False, prepare: Prepare | None = None, only_whether: bool = False
) -> Result:
    """Run a plan.  `keep`: leave the world open for its trace and stories. `only_whether`: end soon
    after the first violation."""
    with rare_collections():
        return _run(plan, prepare, keep=keep, only_whether=only_whether)


def _run(plan: Plan, prepare: Prepare | None, *, keep: bool, only_whether: bool) -> Result:
    world = World(
        plan.seed, network=plan.network, data=plan.data, keep_trace=keep, max_steps=3_000_000
    )
    cluster = Cluster(world, plan.topology, plan.settings)
    if plan.settings.disk_knows_all:
        asks = (*plan.asks, *_probes(0.0))
        cluster.fill_disk(image for ask in asks for _, image in ask.images)
    clients = Clients(cluster, plan.asks)
    context = Context(
        world, cluster, clients, plan.may_fail, plan.bus_loses, plan.undisturbed, plan.devices_hang,
        plan.engine_faults, plan.all_stay, plan.instances_stay,
    )  # fmt: skip
    watching: list[Checker] = [checker(context) for checker in checkers.ALL]
    injector = Injector(world, cluster, plan.faults)
    world.loop.describe = cluster.stories
    if prepare is not None:
        prepare(world, cluster)
    try:
        with no_escape():
            _play(plan, world, cluster, clients, injector, watching, only_whether=only_whether)
    except _Noticed:
        pass
    except (Deadlock, StepLimitReached) as error:
        world.violate(f"[liveness] {error}")
    else:
        for checker in watching:
            checker.at_end()
    for node in cluster.nodes.values():
        world.fired.update(node.actor.counters)
        world.fired.update(node.process.breaks.fired)
    result = Result(
        plan, list(world.violations), world.digest(), world.loop.steps, world.loop.now_s,
        world.fired, Counter(_kind(record.outcome()) for record in clients.records),
        list(clients.records), world.happened(),
    )  # fmt: skip
    if keep:
        result.world, result.cluster = world, cluster
    else:
        world.close()
    return result


def _kind(outcome: str) -> str:
    return outcome.split(":", maxsplit=1)[0]


def _play(
    plan: Plan,
    world: World,
    cluster: Cluster,
    clients: Clients,
    injector: Injector,
    watching: list[Checker],
    *,
    only_whether: bool,
) -> None:
    """Faults and work, then healing, then probes, then silence.

    Silence ends when nothing is left that could happen; every eighth seed waits it out, so that
    tombstones and timers are seen to go.
    """
    cluster.waited_out = plan.seed % WAITED_OUT == 0
    is_over = (lambda: False) if cluster.waited_out else (lambda: cluster.idle)
    run_until = partial(_run_until, world, only_whether)
    timing = plan.settings.timing
    cluster.start()
    last_ask_s = max((ask.at_s for ask in plan.asks), default=0.0)
    last_fault_s = max((f.at_s + f.duration_s for f in plan.faults), default=0.0)
    limit_s = max(last_ask_s, last_fault_s) + timing.request_timeout_s + 5.0
    run_until(limit_s, lambda: clients.all_ended and world.loop.now_s > last_fault_s)
    injector.enabled = False
    world.poison.disarm()
    cluster.heal()
    settle_s = timing.lost_after_s + HEAL_SETTLE_S if plan.faults or plan.bus_loses else 0.5
    run_until(world.loop.now_s + settle_s, lambda: False)
    probes = [clients.add(ask) for ask in _probes(world.loop.now_s)]
    for checker in watching:
        if isinstance(checker, checkers.Liveness):
            checker.probes = probes
    run_until(world.loop.now_s + timing.request_timeout_s + 2, lambda: clients.all_ended)
    run_until(world.loop.now_s + REST_S, is_over)
    for checker in watching:
        checker.at_rest()
    quiet_s = timing.tombstone_s + 2 * timing.abort_timeout_s
    if any(node.live() for node in cluster.living()):
        quiet_s += timing.request_timeout_s  # what is left must be back by its deadline
    run_until(world.loop.now_s + quiet_s, is_over)
    run_until(world.loop.now_s + 1.0, lambda: cluster.idle)  # an idle instance may test itself now


def _run_until(world: World, only_whether: bool, limit_s: float, done: Callable[[], bool]) -> None:
    """In slices of virtual time, so that `done` is not asked at every step."""
    while world.loop.now_s < limit_s and not done():
        world.loop.run_until(min(limit_s, world.loop.now_s + 0.25))
        if only_whether and world.violations:
            raise _Noticed


def _probes(now_s: float) -> list[Ask]:
    image = Image("probe")
    return [
        Ask(9000, now_s, (11, 12, 13), (), 3, 1),
        Ask(9001, now_s, (21, 22, 23), ((1, image),), 3, 2),
    ]
