"""A cluster under simulation: the production roles of a topology over simulated ports.

Only ports are replaced: clock, bus, data plane, randomness, journal, log and engines.  Roles,
tables, scheduling, messages and codec are those that ship.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from epd.config import (
    DecodeConfig,
    EncodeConfig,
    EngineConfig,
    GatewayConfig,
    InstanceConfig,
    Limits,
    PrefillConfig,
    Timing,
)
from epd.groups.data import GroupDataPlane
from epd.messages import Address
from epd.roles.base import Actor
from epd.roles.compose import Engines, Gateway, Instance
from epd.roles.encode.row_tiers import note_of
from epd.roles.holding import Holding
from epd.roles.ports import Ports
from epd.topology import Roles, name_instances, parse_groups
from epd.transport.base import Received
from epd.transport.checksum import checksum_of
from epd.transport.files import whole_file
from epd_lab.sim import signs, wedges
from epd_lab.sim.adapters import Desk
from epd_lab.sim.core.process import SimProcess
from epd_lab.sim.engine import golden
from epd_lab.sim.engine.device import Costs, SimDevice
from epd_lab.sim.engine.engines import SimLanguageEngine, SimVisionEngine
from epd_lab.sim.engine.golden import Image
from epd_lab.sim.engine.own_memory import OnFound
from epd_lab.sim.lives import Lives, Node, SimLog
from epd_lab.sim.planes import strangers
from epd_lab.sim.planes.near import transfers_of
from epd_lab.sim.planes.network import SimBus
from epd_lab.sim.planes.storage import Disk, DiskConditions, SimStorage
from epd_lab.sim.ranks.groups import Groups, meeting_place
from epd_lab.sim.workload import mm_hash_of
from epd_lab.sim.world import World

FINGERPRINT = "simulated model"
GATEWAY = "gateway"  # the first; another one is called gateway1
DAY_S = 86400.0
MEMBERSHIP = ("MEMBERSHIP ", "INSTANCE ", "Member._beat", "Health._look", "StorageWatch._look")
HOUSEKEEPING = (*MEMBERSHIP, "Rooms._forget")
OnDeliver = Callable[[SimProcess, Callable[[Received], None], Received], None]
OnCall = Callable[[SimProcess, str, Any], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes and times of a simulated cluster: small, so that every limit is reached."""

    timing: Timing = Timing(
        first_token_timeout_s=30.0, token_timeout_s=30.0, request_timeout_s=30.0,
        accept_timeout_s=1.0, stall_timeout_s=5.0, abort_timeout_s=1.0, link_timeout_s=1.0,
        retry_interval_s=0.2, tombstone_s=10.0, heartbeat_interval_s=0.4, suspect_after_s=1.0,
        lost_after_s=2.0, drain_timeout_s=3.0, move_timeout_s=1.5,
        group_join_timeout_s=3.0, group_step_timeout_s=2.0, kv_lease_s=1.0,
        max_clock_skew_s=0.0,  # clocks are set by days
    )  # fmt: skip
    limits: Limits = Limits(max_open_requests=64)
    encode: EncodeConfig = EncodeConfig(
        max_queue=64, max_batch_patches=64, cache_device_nbytes=2048
    )
    prefill: PrefillConfig = PrefillConfig(
        max_queue=64,
        pool_nbytes=12 * 4 * golden.ROW_NBYTES,
        slot_nbytes=4 * golden.ROW_NBYTES,
        min_early_tokens=1,
    )
    decode: DecodeConfig = DecodeConfig(max_queue=64, max_running=16)
    engine: EngineConfig = EngineConfig(max_step_tokens=48, max_chunk_tokens=16)
    placement: Literal["auto", "fixed"] = "auto"
    prefix_affinity: bool = True
    autoscale: Literal["off", "roles"] = "off"
    disk: DiskConditions = DiskConditions()  # used if `encode.cache_dir` is set
    disk_knows_all: bool = False  # rows of every image that will be asked for, from the start
    num_blocks: int = 64
    num_landing_blocks: int = 0  # in front of a pool that others cannot write; 0: they can
    near: tuple[str, ...] = ()  # whose devices reach each other's pool: how their names begin
    has_state: bool = False  # besides KV, a state of fixed size for each sequence
    window: int | None = None  # of one of two kinds of rows; 0: none of them; None: one kind
    max_uncut: int = 0  # rows of the largest image, if no chunk may cut one
    adapters: tuple[str, ...] = ()  # digests, at each instance from its start
    costs: Costs = Costs()
    num_gateways: int = 1  # over the same instances
    restart_after_s: float = 0.5
    load_s: float = 0.3  # what other roles need
    rank_lingers_s: float = 0.0  # a rank whose leader has died, at most
    ranks_elsewhere: bool = False  # those that do not lead: each on a host of its own


def parse_topology(topology: str) -> list[tuple[str, Roles]]:
    """`2e1pd` to `[("e0", ("encode",)), ("e1", ...), ("pd0", ("prefill", "decode"))]`."""
    return name_instances([roles for roles, _ in parse_groups(topology)])


class Cluster:
    """The gateways and the instances of a topology."""

    def __init__(self, world: World, topology: str, settings: Settings) -> None:
        self.world = world
        self.settings = settings
        world.fabric.near = settings.near
        self.instances = dict(parse_topology(topology))
        others = range(1, settings.num_gateways)
        self.gateways = (GATEWAY, *(f"{GATEWAY}{number}" for number in others))
        for number in others:  # no clock of theirs is another's
            world.set_s[f"{GATEWAY}{number}"] = -DAY_S * number
        self.desk = Desk(world)
        self.groups = Groups(
            world, topology, settings.rank_lingers_s, settings.prefill, settings.timing
        )
        if settings.ranks_elsewhere:
            self.groups.hosts.use(self.groups.sizes, settings.timing.lost_after_s)
        self.nodes: dict[str, Node] = {}  # by process name; dead ones stay for their stories
        self.disk = Disk(world, settings.disk, settings.encode.cache_disk_nbytes)
        world.on_death.append(self._supervise)
        self.lives = Lives(world, self._ends, self.run_instance, self.instances)
        if world.records:
            world.watch(partial(signs.count, world, settings.has_state, self.nodes), *signs.EVENTS)
        self._stopping = False
        self.waited_out = True  # every tombstone must be gone at the end
        self.on_deliver: OnDeliver | None = None  # in place of a role's own
        self.on_call: OnCall = lambda process, what, work: None  # of an engine, by a role
        self.on_found: OnFound = lambda process, text: None  # by an engine

    # --- processes --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start everything within a tenth of a second, in an order of the seed's choosing."""
        for name in (*self.gateways, *self.instances, *self.groups.hosts):
            at_s = 0.1 * self.world.random.uniform("start", name)
            self.world.loop.call_at(at_s, self.spawn, name)

    def fill_disk(self, images: Iterable[Image]) -> None:
        """As encoders of an earlier day have left it."""
        for image in images:
            key, rows = mm_hash_of(image), image.rows()
            note = note_of(golden.ROW_CONTRACT, key, image.num_rows)
            head = whole_file.head_of(note, len(rows), checksum_of([memoryview(rows)]))
            self.disk.write(key, head + rows, "before")

    def spawn(self, name: str) -> None:
        alive = self.world.processes.get(name)
        main = self._run_gateway if name in self.gateways else self.groups.hosts.main(name)
        main = self.run_instance if name in self.instances else main
        if main is not None and (alive is None or not alive.alive):  # or its leader makes another
            self.world.spawn(name, main)

    def restart_later(self, name: str, delay_s: float) -> None:
        loop = self.world.loop
        loop.call_outside(loop.now_s + delay_s, self.spawn, name)

    def _supervise(self, process: SimProcess) -> None:
        """What ended by itself is started anew; what was killed, only if a fault asks for it."""
        if process.exited and not (self._stopping or self.groups.is_started_by_its_leader(process)):
            self.restart_later(process.instance_id, self.settings.restart_after_s)

    def node(self, name: str) -> Node | None:
        """The living process of this name."""
        process = self.world.processes.get(name)
        return self.nodes.get(process.name) if process is not None and process.alive else None

    def living(self) -> list[Node]:
        found = (self.node(name) for name in (*self.gateways, *self.instances))
        return [node for node in found if node is not None]

    def is_formed(self, process: SimProcess) -> bool:
        """Whether the ranks that it leads, if any, have all been there."""
        group = self.groups.at.get(meeting_place(process))
        return group is None or group.leader.ready.done()

    @property
    def idle(self) -> bool:
        """Everyone is there, and nothing is left that could cause anything: no message or write
        under way, nothing owned, no task, and only the timers of membership and of tombstones."""
        nodes = self.living()
        links = self.world.network.links.values()
        if len(nodes) < len(self.gateways) + len(self.instances) or self.world.fabric.writes:
            return False
        if any(link.num_in_flight or link.held for link in links) or self.world.network.withheld:
            return False
        if any(node.process.alive for node in self.lives.loading.values()):
            return False
        if any(not self.is_formed(n.process) or n.live() or len(n.actor.mailbox) for n in nodes):
            return False
        return not any(node.tasks() or node.timers(HOUSEKEEPING) for node in nodes)

    # --- composition ------------------------------------------------------------------------------

    def _ports(self, process: SimProcess) -> Ports:
        return Ports(
            clock=(world := self.world).clock(process),
            bus=SimBus(world.network, process),
            random=world.random.stream("role", process.name),
            transfers=transfers_of(world.fabric, process),
            journal=world.journal(process),
            log=SimLog(world, process),
            storage=SimStorage(self.disk, process) if self.settings.encode.cache_dir else None,
            start_task=lambda work, name: world.loop.create_task(work, name=name),
        )

    def _gateway_config(self) -> GatewayConfig:
        return GatewayConfig(
            timing=(settings := self.settings).timing, limits=settings.limits,
            placement=settings.placement, prefix_affinity=settings.prefix_affinity,
            decode=settings.decode, engine=settings.engine, autoscale=settings.autoscale,
        )  # fmt: skip

    def _instance_config(self, instance_id: str, roles: tuple[str, ...]) -> InstanceConfig:
        settings = self.settings
        return InstanceConfig(
            instance_id=instance_id, roles=roles, timing=settings.timing, encode=settings.encode,
            prefill=settings.prefill, decode=settings.decode, engine=settings.engine,
        )  # fmt: skip

    def _run_gateway(self, process: SimProcess) -> None:
        ports = self._ports(process)
        gateway = Gateway(ports, self._gateway_config(), FINGERPRINT)
        self.nodes[process.name] = Node(process, gateway.actor, ports, gateway=gateway)
        self._look_at_messages(process, gateway.actor)
        self.desk.start(gateway, self.settings.adapters)

    def run_instance(self, process: SimProcess) -> None:
        if self.groups.hosts.awaited(process, partial(self.run_instance, process)):
            return
        ports = self._ports(process)
        held, devices = self.lives.kept(process) or self._holding(process)
        config, engines = held.config, held.engines
        self._hear_calls(process, engines)
        language = engines.language
        self.groups.lead(process, engines, self.settings.timing, self._rank_engines)
        if engines.ranks is not None:
            ports.transfers = GroupDataPlane(ports.transfers, engines.ranks)
        joins = [Address(name, 0, f"sim://{name}") for name in self.gateways]
        instance = Instance(ports, config, engines, joins, FINGERPRINT, "sim", process.pid)
        node = Node(process, instance.actor, ports, instance=instance, held=held, devices=devices)
        if isinstance(language, SimLanguageEngine) and instance.requests is not None:
            node.language = language
            language.is_leased = instance.requests.pool.holds
            language.is_published = instance.requests.pool.is_published
        self.nodes[process.name] = node
        self.lives.follow(node)
        processes, buses = self.world.processes, self.world.network.buses
        strangers.attend(process, instance.member, processes, buses, self.nodes)
        instance.actor.on_device_lost = lambda reason: self._ends("device_lost", node, reason)
        self._look_at_messages(process, instance.actor)
        if engines.leader is None:
            instance.start()
        else:
            lost = engines.leader.lost
            lost.add_done_callback(lambda lost: self._ends("group_lost", node, lost.result()))
            engines.leader.ready.add_done_callback(lambda _: instance.start())

    def _look_at_messages(self, process: SimProcess, actor: Actor) -> None:
        look = self.on_deliver
        take = actor.take if look is None else partial(look, process, actor.take)
        actor.take = partial(self.world.network.hear, process, take)  # type: ignore[method-assign]

    def _holding(self, process: SimProcess) -> tuple[Holding, list[SimDevice]]:
        """Of a process that begins, with what its engines run on."""
        name, roles = process.instance_id, self.instances[process.instance_id]
        config = strangers.of_parent(self._instance_config(name, roles), process)
        device = SimDevice(self.world.loop, process, self.world.random, "device")
        pool = SimDevice(self.world.loop, process, self.world.random, "pool")
        pool.widen(self.settings.costs.pool_threads)

        def made(roles: tuple[str, ...]) -> Engines:
            engines = self._engines_on(device, pool, name, roles, 0)
            engines.rest = None if self.groups.size_of(name) > 1 else device.rest
            engines.anew = anew
            return engines

        async def anew(config: InstanceConfig) -> Engines:
            await asyncio.sleep(self.settings.load_s)
            device.process.breaks.meet("load")
            return made(config.roles)

        return Holding(config, made(roles)), [device, pool]

    def _hear_calls(self, process: SimProcess, engines: Engines) -> None:
        if isinstance(engines.vision, SimVisionEngine):
            engines.vision.on_call = partial(self.on_call, process)
        if isinstance(engines.language, SimLanguageEngine):
            engines.language.on_call = partial(self._called, process)

    def _rank_engines(self, leader: SimProcess, rank: int, device: SimDevice) -> Engines:
        """Of a rank without roles, which prepares nothing."""
        instance_id = leader.instance_id
        return self._engines_on(device, device, instance_id, self.instances[instance_id], rank)

    def _engines_on(
        self,
        device: SimDevice,
        pool: SimDevice,
        instance_id: str,
        roles: tuple[str, ...],
        rank: int,
    ) -> Engines:
        settings, size = self.settings, self.groups.size_of(instance_id)
        engines = Engines(probe=device.probe)
        if "encode" in roles:
            quantum_s = settings.engine.max_quantum_ms / 1e3
            engines.vision = vision = SimVisionEngine(device, pool, settings.costs, quantum_s)
            vision.begin_with(settings.adapters, self.desk.spoils(instance_id))
            vision.poison = self.world.poison
            vision.contract = golden.contract_of(settings.max_uncut)
        if "prefill" in roles or "decode" in roles:
            engines.language = language = SimLanguageEngine(
                device,
                settings.costs,
                settings.num_blocks,
                num_landing_blocks=settings.num_landing_blocks,
                has_state=settings.has_state,
                window=settings.window,
                rank=rank,
                size=size,
            )
            language.begin_with(settings.adapters, self.desk.spoils(instance_id))
            language.poison, language.on_found = self.world.poison, self.on_found
            if language.row_contract is not None:  # of a text-only model there is none
                language.row_contract = golden.contract_of(settings.max_uncut)
        return engines

    def _ends(self, why: str, node: Node, reason: str) -> None:
        """As the composition root does: end in order, then let the supervisor start a new life."""
        self.world.trace(why, node.process.name, reason)
        self.world.fired[why] += 1
        self.world.loop.call_next(self.world.exit, node.process)

    def _called(self, process: SimProcess, what: str, batch: Sequence[object]) -> None:
        is_step, fired = what == "step", self.world.fired
        fired["full_step"] += is_step and len(batch) == self.settings.decode.max_running
        longer = partial(signs.is_longer_for_a_picture, self.settings.engine.max_chunk_tokens)
        fired["longer_for_a_picture"] += is_step and any(map(longer, batch))
        fired["state_came_by_heads"] += what == "land_state"
        self.on_call(process, what, batch)

    # --- healing ----------------------------------------------------------------------------------

    def heal(self) -> None:
        """No faults any more; one lost device may be left, not two: that would look like poison."""
        self.world.network.heal_all()
        wedges.heal(self.world.fabric, (node.instance for node in self.living()))
        self.disk.heal()
        for name in (*self.gateways, *self.instances, *self.groups.hosts):
            self.spawn(name)
        for running in (*(node.process for node in self.living()), *self.groups.living()):
            running.slowness = 1.0
            self.world.resume(running)
        for node in self.living():
            for device in node.devices:
                device.fail_next = 0
                device.release()
            node.process.breaks.clear()
        sick = [node for node in self.living() if any(d.lost or d.dead for d in node.devices)]
        for node in sick[1:]:
            self._ends("device_lost", node, "the world heals")

    def stop(self) -> None:
        self._stopping = True

    def stories(self) -> str:
        """What every living process has open."""
        lines = []
        for node in self.living():
            state = "stalled " if node.process.stalled else ""
            lines.append(f"  {node.process.name}: {state}{node.live()} {dict(node.actor.counters)}")
        return "\n".join(lines)
