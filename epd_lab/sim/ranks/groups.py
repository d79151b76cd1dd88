"""The ranks of a simulated instance: a process each, ordered channels, and collectives.

The leader and the followers are those that ship (`epd.groups.leader`), over the port `Ranks`.  A
follower has an engine with a KV of its own, and computes every step again: ranks with other
commands find other tokens.  A rank's step ends when its own time is over and every rank is in it,
as it does with a collective; if one is missing, it does not end.  Batches of images are shared out
(`rank_towers`).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from epd.config import PrefillConfig, Timing
from epd.engine.base import OnLayers, Outcome, Patches, SlotRows, StepResult
from epd.fsm.group import CommandExecuted, RankBeat, RankEnded, RankJoined
from epd.groups.asks import Answer, AnyAsk
from epd.groups.data import RankPart
from epd.groups.engines import Encoded, GroupLanguageEngine, GroupVisionEngine
from epd.groups.leader import Batch, ChangeAdapters, Command, Follower, Leader, Probe, Step
from epd.roles.compose import Engines
from epd.topology import name_instances, parse_groups
from epd_lab.sim.core.process import SimProcess
from epd_lab.sim.engine.device import SimDevice
from epd_lab.sim.engine.engines import SimLanguageEngine, SimVisionEngine
from epd_lab.sim.planes.near import transfers_of
from epd_lab.sim.ranks.channels import Channel, SimAnswers, SimAsks, with_own_rows
from epd_lab.sim.ranks.hosts import Cable, Hosts
from epd_lab.sim.ranks.rows import RowsAtRanks
from epd_lab.sim.ranks.towers import Gather, SimTowerShare
from epd_lab.sim.world import World

LOADING_S = 0.4  # of a rank, up to
HOST = "sim"

MakeEngines = Callable[[SimProcess, int, SimDevice], Engines]  # of a rank of this leader


class Watch:
    """Sees what ranks do, for checkers; this one does not look."""

    def entered(self, group: SimRanks, rank: int, number: int, command: Command) -> None: ...

    def resolved(self, group: SimRanks, number: int) -> None: ...


def meeting_place(leader: SimProcess) -> str:
    """Where ranks find each other: one for each life of the leader (F30)."""
    return leader.name


class Groups:
    """Those of a cluster."""

    def __init__(
        self, world: World, topology: str, linger_s: float, prefill: PrefillConfig, timing: Timing
    ) -> None:
        """`linger_s`: ranks whose leader has died live on for so long, at most."""
        self.prefill = prefill
        self.timing = timing
        parsed = parse_groups(topology)
        names = [name for name, _ in name_instances([roles for roles, _ in parsed])]
        self.sizes = dict(zip(names, (num_ranks for _, num_ranks in parsed), strict=True))
        self.world = world
        self.watch = Watch()
        self.at: dict[str, SimRanks] = {}  # by meeting place
        self.followers: dict[SimProcess, SimFollower] = {}
        self.hosts = Hosts(world)
        self._linger_s = linger_s
        world.on_death.append(self._died)

    def _died(self, process: SimProcess) -> None:
        loop, random = self.world.loop, self.world.random
        for group in list(self.at.values()):
            if group.cables:
                continue  # see `Cable`
            if group.process is process:
                wait_s = self._linger_s * random.uniform("lingers", process.name)
                loop.call_outside(loop.now_s + wait_s, group.kill)
            for rank, member in group.members.items():
                if member.process is process:
                    ended = RankEnded(rank, "its process has ended")
                    group.to_leader(rank, group.ended, rank)
                    group.to_leader(rank, group.leader.fire, ended)

    def lead(
        self, process: SimProcess, engines: Engines, timing: Timing, make: MakeEngines
    ) -> None:
        """If the topology has several ranks here, let `process` lead a group, and start the
        others."""
        size = self.size_of(process.instance_id)
        if size == 1:
            return
        group = self.at[meeting_place(process)] = SimRanks(self, process, size)
        engines.ranks = group
        clock, journal = self.world.clock(process), self.world.journal(process)
        leader = Leader(process.instance_id, size, group, clock, timing, journal)
        group.leader = engines.leader = leader
        if isinstance(engines.vision, SimVisionEngine):
            share = SimTowerShare(group.gather, 0, engines.vision, group.begins)
            engines.vision = _WatchedTower(engines.vision, share, leader)
        if isinstance(own := engines.language, SimLanguageEngine):
            told = partial(self._resolved, group)
            group.rows.engines[0] = own
            engines.language = _Watched(own, group, told)
        engines.close = leader.close
        group.start(make)

    def size_of(self, instance_id: str) -> int:
        return self.sizes[instance_id]

    @property
    def most_ranks(self) -> int:
        return max(self.sizes.values())

    def _resolved(self, group: SimRanks, number: int, step: asyncio.Future[StepResult]) -> None:
        if not step.cancelled() and step.exception() is None:
            self.watch.resolved(group, number)

    def member(self, process: SimProcess | None) -> SimFollower | None:
        """What runs in this process, if it is a rank without roles."""
        return self.followers.get(process) if process is not None else None

    def leader_of(self, process: SimProcess) -> SimProcess:
        """Who leases the memory of this rank's part; itself, if it has roles."""
        follower = self.followers.get(process)
        return process if follower is None else follower.leader

    def rows_of(self, process: SimProcess, rows: SlotRows) -> list[bytes]:
        """What each rank of the group that this process leads would read."""
        return self.at[meeting_place(process)].rows.found(rows)

    def living(self) -> list[SimProcess]:
        found = (*self.followers, *(self.world.processes.get(host) for host in self.hosts))
        return [process for process in dict.fromkeys(found) if process and process.alive]

    def is_started_by_its_leader(self, process: SimProcess) -> bool:
        return process in self.followers and process.instance_id not in self.hosts


class _WatchedTower(GroupVisionEngine):
    """Reports what all ranks have at hand."""

    def __init__(self, own: SimVisionEngine, share: SimTowerShare, leader: Leader) -> None:
        super().__init__(own, share, leader)
        self._at_hand = partial(own.poison.work, own.device.process)

    async def encode(self, batch: Sequence[Patches]) -> Encoded:
        with self._at_hand([item.pixels.name for item in batch]) as begin:
            begin()
            return await super().encode(batch)


class _Watched(GroupLanguageEngine):
    """Reports the steps whose results its roles have, and what all ranks have at hand."""

    def __init__(
        self,
        own: SimLanguageEngine,
        group: SimRanks,
        resolved: Callable[[int, asyncio.Future[StepResult]], None],
    ) -> None:
        super().__init__(own, partial(group.step, own), group.leader, group)
        self._resolved = resolved
        self._at_hand = partial(own.poison.step, own.device.process)

    def step(self, batch: Batch, on_layers: OnLayers | None = None) -> asyncio.Future[StepResult]:
        launch = partial(super().step, batch, on_layers)
        over = self._at_hand(batch, lambda: asyncio.ensure_future(launch()))
        over.add_done_callback(partial(self._resolved, self._leader.machine.given))
        return over


class SimRanks(SimAsks):
    """The ports `Ranks` and `OtherRanks`, of one life of a leader."""

    leader: Leader

    def __init__(self, groups: Groups, process: SimProcess, size: int) -> None:
        super().__init__(groups.world, process)
        self.size = size
        self.members: dict[int, SimFollower] = {}
        self.cables: dict[int, Cable] = {}  # of ranks on other hosts
        self._groups = groups
        self._back: dict[int, Channel] = {}
        self.rows = RowsAtRanks(size)
        self.inside: dict[int, set[int]] = defaultdict(set)  # ranks, by the step that they are in
        self.executed: dict[int, dict[int, list[Outcome]]] = defaultdict(dict)  # by step and rank
        self._met: dict[int, asyncio.Future[None]] = {}
        self.gather = Gather(size, self._enter)
        self._halfway: dict[int, int] = {}  # by step: ranks that are to compute its first layer yet
        self._tell_layers: dict[int, OnLayers] = {}

    def start(self, make: MakeEngines) -> None:
        world = self._groups.world

        def begin(rank: int, process: SimProcess) -> None:
            device = SimDevice(world.loop, process, world.random, "device")
            engines = make(self.process, rank, device)
            SimFollower(self._groups, self.process, rank, process, device, engines)

        if self._groups.hosts:
            self._groups.hosts.start(self, begin)
            self.places += tuple((HOST, cable.rank.pid) for cable in self.cables.values())
            return
        for rank in range(1, self.size):
            spawned = world.spawn(f"{self.process.instance_id}.{rank}", partial(begin, rank))
            assert spawned.epoch == self.process.epoch  # a data plane of one epoch
            self.places += ((HOST, spawned.pid),)

    def join(self, rank: int, follower: SimFollower) -> None:
        """It has found this place."""
        self.members[rank] = follower
        if isinstance(follower.engines.language, SimLanguageEngine):
            self.rows.engines[rank] = follower.engines.language
        self.to_leader(rank, self.joined.__setitem__, rank, follower.part.joined())
        self.to_leader(rank, self.leader.fire, RankJoined(rank))

    def to_leader(self, rank: int, take: Callable[..., object], *what: object) -> None:
        if rank not in self._back:
            name = f"{self.process.name} from {rank}"
            self._back[rank] = Channel(self._groups.world, name, self.cables.get(rank))
        self._back[rank].send(self.process, take, *what)

    # --- the port ---------------------------------------------------------------------------------

    def send(self, number: int, command: Command) -> None:
        if isinstance(command, Step):
            command = replace(command, batch=[with_own_rows(each) for each in command.batch])
        if isinstance(command, Probe | ChangeAdapters):
            self._groups.watch.entered(self, 0, number, command)
        for member in self.members.values():
            member.commands.send_command(member.process, member.take, number, command)

    def send_ask(self, rank: int, serial: int, ask: AnyAsk) -> None:
        member = self.members[rank]
        member.commands.send(member.process, member.answers.take, serial, ask)

    def end(self) -> None:
        for member in self.members.values():
            member.commands.send(member.process, member.end)

    def kill(self) -> None:
        world = self._groups.world
        for cable in self.cables.values():
            cable.is_closed = True
        for follower in () if self.cables else self._groups.followers.values():
            if follower.leader is self.process:
                world.loop.call_next(world.exit, follower.process)

    # --- commands ---------------------------------------------------------------------------------

    def step(
        self, own: SimLanguageEngine, batch: Batch, on_layers: OnLayers | None
    ) -> Awaitable[StepResult]:
        """The leader's share."""
        number = self.leader.machine.given + 1
        step = own.step(self.rows.given(0, batch), self.at_layer(number, on_layers))
        return self.together(0, self.begins(Step(list(batch))), step)

    def begins(self, command: Command) -> int:
        """The next command, of the leader's share and of the others; its number."""
        number = self.leader.machine.given + 1
        self._groups.watch.entered(self, 0, number, command)
        return number

    def at_layer(self, number: int, tell: OnLayers | None = None) -> OnLayers:
        """A rank's report of a step's layers; none is over before every rank has computed it.
        `tell`: by the leader, who may be asked to."""
        self._halfway.setdefault(number, self.size)
        if tell is not None:
            self._tell_layers[number] = tell

        def computed(num_layers: int) -> None:
            self._halfway[number] -= 1
            if not self._halfway[number] and number in self._tell_layers:
                context = self.process.context
                loop = self._groups.world.loop
                loop.call_at(loop.now_s, self._tell_layers.pop(number), num_layers, context=context)

        return computed

    async def together(self, rank: int, number: int, step: Awaitable[StepResult]) -> StepResult:
        met = self._enter(rank, number)
        result = await step
        await asyncio.shield(met)
        self.executed[number][rank] = result.outcomes
        return result

    def _enter(self, rank: int, number: int) -> asyncio.Future[None]:
        """Ended when all ranks are in this command."""
        if number not in self._met:
            self._met[number] = asyncio.get_running_loop().create_future()
        inside, met = self.inside[number], self._met[number]
        inside.add(rank)
        if len(inside) == self.size:
            met.set_result(None)
        return met


class SimFollower:
    """A rank without roles: a process that executes commands."""

    def __init__(
        self,
        groups: Groups,
        leader: SimProcess,
        rank: int,
        process: SimProcess,
        device: SimDevice,
        engines: Engines,
    ) -> None:
        self.process = process
        self.device = device
        self.leader = leader  # which started it
        self.rank = rank
        self.engines = engines
        cable = groups.at[meeting_place(leader)].cables.get(rank)
        self.commands = Channel(groups.world, f"{process.name} to {rank}", cable)
        self._groups = groups
        self._group: SimRanks
        self._tower: SimTowerShare
        clock, beat_s = groups.world.clock(process), groups.timing.heartbeat_interval_s
        self._follower = Follower(self, self._answer, self._tell_beat, clock, beat_s)
        transfers = transfers_of(groups.world.fabric, process)
        self.part = RankPart(engines.language, transfers, groups.prefill, takes_kv=True)
        self.answers = SimAnswers(self.part, self._answer_ask)
        self._number = 0
        self._open = 0
        self._is_ending = False
        groups.followers[process] = self
        loop, random = groups.world.loop, groups.world.random
        loaded_s = loop.now_s + LOADING_S * random.uniform("loads", process.name) * process.slowness
        loop.call_at(loaded_s, self._loaded, context=process.context)

    def _loaded(self) -> None:
        group = self._groups.at.get(meeting_place(self.leader))
        if group is not None and group.process.alive:
            self._group = group
            if isinstance(vision := self.engines.vision, SimVisionEngine):
                self._tower = SimTowerShare(group.gather, self.rank, vision, self._begins)
            group.join(self.rank, self)
            self._follower.beat()

    def take(self, number: int, command: Command) -> None:
        self._open += 1
        self._number = number
        if isinstance(command, Probe | ChangeAdapters):
            self._groups.watch.entered(self._group, self.rank, number, command)
        self._follower.execute(number, command)

    def step(self, batch: Batch) -> Awaitable[StepResult]:
        assert self.engines.language is not None
        group, number = self._group, self._begins(Step(list(batch)))
        tell = group.at_layer(number)
        step = self.engines.language.step(group.rows.given(self.rank, batch), tell)
        return group.together(self.rank, number, step)

    def _begins(self, command: Command) -> int:
        self._groups.watch.entered(self._group, self.rank, self._number, command)
        return self._number

    def encode(self, batch: Sequence[Patches], num_turns: int) -> Awaitable[Encoded]:
        return self._tower.encode(batch, num_turns)

    def go_on(self) -> Awaitable[Encoded]:
        return self._tower.go_on()

    def change_adapters(self, dropped: Sequence[str], held: str) -> Awaitable[None]:
        assert self.engines.language is not None
        return self.engines.language.change_adapters(dropped, held)

    def _tell_beat(self) -> None:
        self._group.to_leader(self.rank, self._group.leader.fire, RankBeat(self.rank))

    def _answer_ask(self, serial: int, answer: Answer) -> None:
        self._group.to_leader(self.rank, self._group.answered, self.rank, serial, answer)

    def _answer(self, number: int, failure: str) -> None:
        self._open -= bool(number)
        executed = CommandExecuted(self.rank, number, bool(failure))
        ended = executed if number else RankEnded(self.rank, failure)
        self._group.to_leader(self.rank, self._group.leader.fire, ended)
        self._end_if_over()

    def end(self) -> None:
        self._is_ending = True
        self._end_if_over()

    def _end_if_over(self) -> None:
        if self._is_ending and not self._open:
            self._groups.world.loop.call_next(self._groups.world.exit, self.process)
