"""How roles are put together, for every runtime: real processes, one process, the simulator.

Pure wiring over injected ports and engines, so that what is tested in simulation is what runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from epd.config import GatewayConfig, InstanceConfig
from epd.engine.base import LanguageEngine, Profiler, VisionEngine
from epd.fsm.kernel import Journal
from epd.groups.asks import OtherRanks
from epd.later import later
from epd.messages import Address, InstanceInfo, Load, StageCosts
from epd.observed import Memory
from epd.roles.at_hand import HandsReport
from epd.roles.base import Actor
from epd.roles.cache_events import CacheDirectory, CachePublisher
from epd.roles.decode.role import DecodeRole
from epd.roles.encode.role import EncodeRole
from epd.roles.gateway.affinity import Affinity
from epd.roles.gateway.dispatch import Dispatcher
from epd.roles.gateway.registry import Registry
from epd.roles.gateway.role import GatewayRole
from epd.roles.health import Health, Probe
from epd.roles.incoming import IncomingRooms
from epd.roles.links import Links
from epd.roles.member import Member
from epd.roles.outgoing import OutgoingRooms
from epd.roles.ports import Ports
from epd.roles.prefill.embeddings import Embeddings
from epd.roles.prefill.kv_producer import KvProducer
from epd.roles.prefill.role import PrefillRole
from epd.roles.steps.absent import WithoutDecode, WithoutPrefill
from epd.roles.steps.requests import Requests
from epd.roles.unsent import fail_at_instance
from epd.roles.watching.observers import Observable
from epd.scheduling.placement import MakeRule, pick_encoder
from epd.scheduling.predicted_rule import PredictedRule
from epd.scheduling.step_cost import Measured

if TYPE_CHECKING:
    from epd.groups.leader import Leader
    from epd.roles.gateway.adapters import Adapters
    from epd.roles.steps.held_adapters import HeldAdapters

IDLE_CHECK_S = 0.05
RULES: dict[str, MakeRule] = {
    "auto": PredictedRule,
    "fixed": later("epd.scheduling.fixed_rule:FixedRule"),
}


@dataclass(slots=True)
class Engines:
    """What the roles of an instance need of its device."""

    vision: VisionEngine | None = None
    language: LanguageEngine | None = None
    profiler: Profiler | None = None
    close: Callable[[], Awaitable[object]] | None = None  # ends the threads of the device
    probe: Probe | None = None  # a small work of the device
    rest: Callable[[], Awaitable[bool]] | None = None  # whether they have ended a life's work
    anew: Callable[[InstanceConfig], Awaitable[Engines]] | None = None  # for other roles
    forget: Callable[[], None] | None = None  # weights that only former roles needed
    leader: Leader | None = None  # of several ranks
    ranks: OtherRanks | None = None  # the others
    epoch: int = 0  # that they know
    attention: str = ""  # what computes that of prompts and towers
    films: str = ""  # what decodes them
    kind: type[Instance] | None = None  # that is made of them, if not the usual one

    @property
    def num_ranks(self) -> int:
        return self.leader.machine.size if self.leader is not None else 1

    @property
    def journal(self) -> Journal | None:
        """Of what began before there was an instance."""
        return self.leader.journal if self.leader is not None else None


class Instance:
    """One serving instance with any of the roles encode, prefill and decode."""

    def __init__(
        self,
        ports: Ports,
        config: InstanceConfig,
        engines: Engines,
        gateways: Sequence[Address],
        fingerprint: str,
        host_id: str,
        pid: int,
    ) -> None:
        self.config = config
        self._close_engines, self._rest = engines.close, engines.rest
        self.leader = engines.leader
        self._vision = engines.vision
        self.actor = actor = Actor(ports)
        self.links = Links(actor, config.timing)
        self.health: Health | None = None
        if engines.probe is not None:
            self.health = Health(actor, config.timing, engines.probe, self.links)
        self.hands = HandsReport(actor)
        self.outgoing = OutgoingRooms(actor, config.timing)
        self.incoming = IncomingRooms(actor, config.timing)
        fail_at_instance(actor, self.outgoing)
        self.encode: EncodeRole | None = None
        self.requests: Requests | None = None
        self.embeddings: Embeddings | None = None
        self.prefill: PrefillRole | None = None
        self.decode: DecodeRole | None = None
        self.adapters: HeldAdapters | None = None
        if engines.vision is not None:
            events = CachePublisher(actor)
            self.encode = EncodeRole(
                actor,
                self.outgoing,
                engines.vision,
                config.encode,
                config.timing,
                events,
                num_ranks=engines.num_ranks,
            )
        if engines.language is not None:
            self._add_language(engines.language, engines.ranks)
            self._add_finder()
        self._holders = tuple(one for one in (engines.language, engines.vision) if one is not None)
        if config.engine.lora.runtime_dir:
            from epd.roles.steps.held_adapters import HeldAdapters

            self.adapters = HeldAdapters(actor, self._holders, self.requests)
        if engines.profiler is not None:
            later("epd.roles.watching.profiling:Profiled")(actor, engines.profiler)
        Observable(actor, self._memory)
        info = self._info(engines, host_id, pid)
        self.member = Member(actor, gateways, info, fingerprint, config.timing, self.load)
        if self.adapters is not None:
            self.member.adapters = self.adapters.brought

    def _add_language(self, engine: LanguageEngine, ranks: OtherRanks | None) -> None:
        config, actor = self.config, self.actor
        self.requests = Requests(
            actor, engine, config.engine, config.timing, config.decode.max_running, ranks
        )
        if self.health is not None:
            self.health.turns = self.requests.loop
        kv = KvProducer(actor, self.outgoing, self.requests)
        if "prefill" in config.roles:
            if engine.row_contract is not None:
                self.embeddings = Embeddings(
                    actor,
                    self.incoming,
                    engine.row_contract,
                    config.prefill,
                    config.timing,
                    self.links.is_given_up,
                    engine.lift_rows,
                    ranks,
                )
                engine.attach_rows(self.embeddings.ranks.own)
            self.prefill = PrefillRole(
                actor, kv, self.incoming, self.requests, self.embeddings, config.prefill
            )
        else:
            self.requests.extend(WithoutPrefill(actor))
        if "decode" in config.roles:
            self.decode = DecodeRole(actor, self.incoming, self.requests, config.decode)
        else:
            self.requests.extend(WithoutDecode(actor))

    def _add_finder(self) -> None:
        """Rows that encoders have put into a shared storage are found here without them."""
        actor, config, embeddings = self.actor, self.config, self.embeddings
        storage = actor.ports.storage
        if self.encode is not None or embeddings is None or storage is None:
            return
        from epd.roles.encode.finder import NoTower, StorageWatch

        events = CachePublisher(actor)
        tower = NoTower(embeddings.contract)
        self.encode = EncodeRole(
            actor, self.outgoing, tower, config.encode, config.timing, events, encodes=False
        )
        StorageWatch(actor, storage, events)

    def _info(self, engines: Engines, host_id: str, pid: int) -> InstanceInfo:
        language, vision = engines.language, engines.vision
        contract = vision.contract if vision is not None else None
        if self.prefill is not None and language is not None:
            contract = language.row_contract
        return InstanceInfo(
            address=self.actor.address,
            roles=self.config.roles,
            host_id=host_id,
            pid=pid,
            num_slots=self.embeddings.pool.size if self.embeddings is not None else 0,
            num_kv_blocks=language.num_blocks if language is not None else 0,
            max_queue=self.config.prefill.max_queue,
            kv_layout=language.kv_layout if language is not None else None,
            row_contract=contract,
            transports=self.actor.ports.transfers.offers,
            lacks=self.actor.ports.transfers.lacks,
            finds_rows=self.encode is not None and vision is None,
            other_ranks=engines.ranks.places if engines.ranks is not None else (),
            attention=engines.attention,
            films=engines.films,
            lineage=self.config.lineage,
            kept_roles=self.config.kept_roles,
        )

    def _memory(self) -> Iterator[Memory]:
        """Of each kind how much is taken; cached rows and blocks count as such."""
        if self.requests is not None:
            pool = self.requests.pool
            yield Memory(kind="kv", unit="blocks", used=pool.num_leased, capacity=pool.size)
        if self.embeddings is not None:
            slots = self.embeddings.pool
            yield Memory(kind="rows", unit="slots", used=slots.num_leased, capacity=slots.size)
        for tier in self.encode.tiers.report() if self.encode is not None else ():
            kind, most = f"{tier.tier} tier", tier.capacity_nbytes
            yield Memory(kind=kind, unit="bytes", used=tier.nbytes, capacity=most)

    async def test(self) -> None:
        """Pass the self-test before it joins.  Raises EngineError, TimeoutError."""
        if self.health is not None:
            async with asyncio.timeout(self.config.timing.first_token_timeout_s):
                await self.health.probe()

    def start(self) -> None:
        self.actor.start()

    def live(self) -> dict[str, int]:
        """What is owned now, by kind; all zero when nothing is open (invariant 4)."""
        counts: dict[str, int] = {}
        for component in self.actor.components:
            counts.update(component.live())
        return counts

    def is_busy(self) -> bool:
        """Whether something is open that has an end; a doubt about a peer that is gone has none."""
        components = (one for one in self.actor.components if one is not self.links)
        return any(any(component.live().values()) for component in components)

    def load(self) -> Load:
        live, requests, bus = self.live(), self.requests, self.actor.bus
        listed = self.adapters
        return Load(
            open_requests=live.get("requests", 0),
            free_kv_blocks=requests.pool.num_free if requests is not None else 0,
            live=tuple(sorted(live.items())),
            totals=tuple(sorted(requests.totals.items())) if requests is not None else (),
            cache_sequence=self.encode.events.sequence if self.encode is not None else 0,
            events=tuple(sorted(self.actor.counters.items())),
            num_encoded=self.encode.num_encoded if self.encode is not None else 0,
            cache=self.encode.tiers.report() if self.encode is not None else (),
            silent_peers=self.links.silent(),
            dropped=tuple(sorted((bus.dropped + self.actor.ports.transfers.refused).items())),
            histograms=self.actor.times.told(),
            counts=self.actor.times.counts(),
            costs=self._costs(),
            hands=self.hands.report(),
            waits=self.health.waits() if self.health is not None else (),
            adapters=self._held(),
            adapter_list=listed.applied if listed is not None else (0, 0),
            unheld=listed.unheld if listed is not None else (),
        )

    def _held(self) -> tuple[str, ...]:
        """Digests of the adapters that its tower and its language model hold, whichever it has."""
        first, *others = [holder.adapters for holder in self._holders]
        return tuple(one for one in first if all(one in each for each in others))

    def _costs(self) -> StageCosts:
        rows = self.actor.times.rows_cost
        measured: dict[str, Measured] = {"nbyte_s": rows}
        step_s = sequence_s = token_s = 0.0
        if self.requests is not None:
            cost = self.requests.cost
            step_s, sequence_s = cost.decodes.fitted()
            token_s = cost.prompts.unit_s
            measured |= {
                "step_s": cost.decodes,
                "sequence_s": cost.decodes,
                "token_s": cost.prompts,
            }
        return StageCosts(
            patch_s=self._vision.patch_s if self._vision is not None else 0.0,
            token_s=token_s,
            step_s=step_s,
            sequence_s=sequence_s,
            nbyte_s=rows.unit_s,
            quantum_s=self.config.engine.max_quantum_ms / 1e3,
            unsure=tuple(name for name, one in measured.items() if not one.is_sure),
        )

    async def drain(self) -> bool:
        """Take no new work, wait for what is open, leave.  False: some of it had to be left."""
        self.member.drain()
        await self._idle()
        self.member.leave()
        await asyncio.sleep(0)
        return not self.is_busy()

    async def _idle(self) -> None:
        """Until nothing is open, or there is no time for it left."""
        ended = asyncio.Event()

        def look() -> None:
            if self.is_busy() and not self.member.is_over:
                self.actor.timers.call_later(IDLE_CHECK_S, look)
            else:
                ended.set()

        self.actor.mailbox.put("idle", look)  # behind what came first, which may open something
        await ended.wait()

    async def close(self) -> None:
        """Roles first, then the device, whose last step may still use registered memory."""
        await self.actor.close()
        if self._close_engines is not None:
            await self._close_engines()
        if self.actor.ports.storage is not None:
            await self.actor.ports.storage.close()
        await self.actor.ports.transfers.close()

    async def end_life(self) -> bool:
        """As `close`, but its engines stay, for a next life of this process.  False: something may
        still move of this one, which only the end of the process ends."""
        assert self._rest is not None
        await self.actor.close()
        is_at_rest = await self._rest()
        if self.actor.ports.storage is not None:
            await self.actor.ports.storage.close()
        return await self.actor.ports.transfers.close() and is_at_rest


class Gateway:
    """The OpenAI front's roles, without HTTP."""

    def __init__(self, ports: Ports, config: GatewayConfig, fingerprint: str) -> None:
        self.actor = Actor(ports)
        self.links = Links(self.actor, config.timing)
        self.registry = Registry(self.actor, fingerprint, config.timing)
        self.directory = CacheDirectory(self.actor, self.registry)
        self.affinity = Affinity(self.actor) if config.prefix_affinity else None
        pick = pick_encoder(config.encode_policy, ports.random.integer)
        dispatcher = Dispatcher(
            self.actor,
            self.registry,
            config.timing,
            self.directory.index,
            self.affinity,
            pick,
            self.links.silent,
            RULES[config.placement],
        )
        self.dispatcher = dispatcher
        self.directory.on_stored = dispatcher.encoded
        self.role = GatewayRole(
            self.actor,
            self.registry,
            config.limits,
            config.timing,
            dispatcher,
            config.decode.max_running,
        )
        if config.autoscale == "roles":
            moves = later("epd.roles.gateway.role_moves:RoleMoves")
            moves(self.actor, self.registry, dispatcher, config, self.role.drain)
        self.adapters: Adapters | None = None
        if (lora := config.engine.lora).runtime_dir:
            from epd.roles.gateway.adapters import Adapters

            self.adapters = self.role.adapters = Adapters(
                self.actor, self.registry, config.timing, lora.max_loras, self.role.open_ones
            )
            dispatcher.may_run = self.adapters.may_run
            dispatcher.on_ended = self.adapters.request_ended

    def start(self) -> None:
        self.actor.start()

    def live(self) -> dict[str, int]:
        affinity = self.affinity.live() if self.affinity is not None else {}
        adapters = self.adapters.live() if self.adapters is not None else {}
        return {**self.role.live(), **self.links.live(), **affinity, **adapters}

    def is_busy(self) -> bool:
        """Whether a request is open; see `Instance.is_busy`."""
        return any(self.role.live().values())

    async def close(self) -> None:
        await self.actor.close()
