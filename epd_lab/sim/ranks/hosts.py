"""Ranks of other hosts: each requests a place of its leader, over a cable that may be cut.

`epd.groups.meeting` decides who gets one.  A request goes to the address of the leader, so it may
come to a later life than the one that was meant.  A connection is what kernels make of one.  What
is sent while the cable is cut arrives once it is mended; after `lost_after_s` without an answer
each end finds the connection closed.  The end of a process is noticed sooner only where the cable
carries.  A rank whose connection is over ends, and its command starts the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from epd.fsm.group import RankEnded
from epd.groups.leader import Leader
from epd.groups.meeting import Meeting, PlaceAsked
from epd_lab.sim.core.process import SimProcess
from epd_lab.sim.world import World

VERSION = "simulated"
RETRY_S = 0.1
PREPARES_S = 0.2  # between a leader's first frame and the question, up to
LOOK_S = 0.02  # how soon an end is seen where the cable carries


@dataclass(frozen=True, slots=True)
class FirstFrame:
    """Of a leader, to a rank that calls."""

    epoch: int


class Led(Protocol):
    """The ranks of one life of a leader, as its connections need them."""

    process: SimProcess
    leader: Leader
    cables: dict[int, Cable]

    def ended(self, rank: int) -> None: ...


class Cable:
    """The connection of a rank's process with its leader."""

    def __init__(self, hosts: Hosts, leader: SimProcess, rank: SimProcess) -> None:
        self.leader, self.rank = leader, rank
        self.group: Led | None = None  # once it has begun
        self.cut_since_s: float | None = None
        self.is_closed = self.is_over = False
        self._hosts = hosts
        self._held: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._look()

    @property
    def is_cut(self) -> bool:
        ends = self.leader.instance_id, self.rank.instance_id
        return not self._hosts.world.network.blocked.isdisjoint((ends, ends[::-1]))

    def carries(self, send: Callable[..., None], *what: Any) -> bool:
        """Now; else `send(*what)` is for later, in order, or for nobody."""
        if self.is_cut or self._held or self.is_over:
            self._held.append((send, what))
            return False
        return True

    def _look(self) -> None:
        loop = self._hosts.world.loop
        is_cut = self.is_cut
        if is_cut and self.cut_since_s is None:
            self.cut_since_s = loop.now_s
            for look in self._hosts.on_cut:
                look(self)
        elif not is_cut:
            self.cut_since_s = None
            held, self._held = self._held, []
            for send, what in held:
                send(*what)
        if self._ends(loop.now_s):
            self.is_over = True
            self._hosts.world.fired["given_up_when_cut"] += is_cut
            self._hosts.ended(self)
        else:
            loop.call_outside(loop.now_s + LOOK_S, self._look)

    def _ends(self, now_s: float) -> bool:
        if self.cut_since_s is not None:
            return now_s - self.cut_since_s >= self._hosts.lost_after_s
        return self.is_closed or not (self.leader.alive and self.rank.alive)


class _Gathering:
    """Of one life of a leader."""

    def __init__(self, leader: SimProcess, num_places: int, begin: Callable[[], None]) -> None:
        self.leader = leader
        self.begin = begin
        self.meeting = Meeting(leader.instance_id, leader.epoch, VERSION, num_places)
        self.there: dict[str, tuple[Cable, int]] = {}  # by host; the life that each means
        self.has_begun = False


class Hosts:
    """Of all ranks that do not lead; there are none before `use`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.lost_after_s = 0.0
        self.on_begin: list[Callable[[Led, dict[int, int]], None]] = []  # and the lives meant
        self.on_cut: list[Callable[[Cable], None]] = []
        self._gatherings: dict[str, _Gathering] = {}  # of a leader's latest life, by its name
        self._leaders: dict[str, str] = {}

    def use(self, sizes: dict[str, int], lost_after_s: float) -> None:
        """Every rank that does not lead is on a host of its own."""
        self.lost_after_s = lost_after_s
        for name, size in sizes.items():
            self._leaders |= {f"{name}.{number}": name for number in range(1, size)}

    def __len__(self) -> int:
        return len(self._leaders)

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaders)

    def main(self, name: str) -> Callable[[SimProcess], None] | None:
        """What the command of this host runs."""
        return self._call if name in self._leaders else None

    def leader_of(self, name: str) -> str:
        return self._leaders[name]

    # --- a leader ---------------------------------------------------------------------------------

    def awaited(self, leader: SimProcess, begin: Callable[[], None]) -> bool:
        """Whether it has to wait for its ranks, and `begin` follows when all are there."""
        name = leader.instance_id
        gathering = self._gatherings.get(name)
        num_places = sum(of == name for of in self._leaders.values())
        if not num_places or (gathering and gathering.leader is leader):
            return False
        self._gatherings[name] = _Gathering(leader, num_places, begin)
        return True

    def start(self, group: Led, begin: Callable[[int, SimProcess], None]) -> None:
        """Each gets its number and begins to load, if it means this life."""
        gathering = self._gatherings[group.process.instance_id]
        ranks = dict(enumerate((gathering.there[host] for host in sorted(gathering.there)), 1))
        for look in self.on_begin:
            look(group, {rank: epoch for rank, (_, epoch) in ranks.items()})
        for rank, (cable, epoch) in ranks.items():
            cable.group, process = group, cable.rank
            group.cables[rank] = cable
            process.epoch = epoch  # its data plane is of the leader's life
            process.name = f"{process.instance_id}:{epoch}"
            if cable.is_over:  # since it has its place
                self.ended(cable)
            elif epoch == group.process.epoch:
                self._at(process, begin, rank, process)

    def _taken(self, process: SimProcess, epoch: int) -> bool:
        """By the life of its leader to which the request comes; it means life `epoch`."""
        gathering = self._gatherings[self._leaders[process.instance_id]]
        asked = PlaceAsked(
            version=VERSION,
            leader=gathering.leader.instance_id,
            epoch=epoch,
            host_id=process.instance_id,
            pid=process.pid,
            nonce=b"",
            proof=b"",
        )
        self._say(gathering.leader, process, asked)
        if gathering.meeting.take(asked) is not None:
            self.world.fired["place_refused"] += 1
            return False
        cable = Cable(self, gathering.leader, process)
        gathering.there[process.instance_id] = cable, epoch
        if not gathering.meeting.num_absent:
            gathering.has_begun = True
            self._at(gathering.leader, gathering.begin)
        return True

    def ended(self, cable: Cable) -> None:
        """Each end finds its connection closed."""
        self._at(cable.rank, self.world.exit, cable.rank)
        if (group := cable.group) is not None:
            rank = next(rank for rank, its in group.cables.items() if its is cable)
            self._at(group.process, group.ended, rank)
            self._at(group.process, group.leader.fire, RankEnded(rank, "its connection is closed"))
            return
        gathering = self._gatherings[cable.leader.instance_id]
        if gathering.leader is cable.leader and not gathering.has_begun:
            self.world.fired["place_left"] += 1
            gathering.there.pop(cable.rank.instance_id)
            gathering.meeting.free((cable.rank.instance_id, cable.rank.pid))

    # --- a rank -----------------------------------------------------------------------------------

    def _call(self, process: SimProcess) -> None:
        """Get the leader's first frame, which has its epoch."""
        gathering = self._reached(process)
        if gathering is None:
            self._at(process, self._call, process, after_s=RETRY_S)
            return
        self._say(gathering.leader, process, FirstFrame(gathering.meeting.epoch))
        drawn = self.world.random.uniform("prepares", process.name, self.world.loop.now_s)
        after_s = PREPARES_S * drawn * process.slowness
        self._at(process, self._ask, process, gathering.meeting.epoch, after_s=after_s)

    def _ask(self, process: SimProcess, epoch: int) -> None:
        if self._reached(process) is None or not self._taken(process, epoch):
            self._at(process, self._call, process, after_s=RETRY_S)

    def _reached(self, process: SimProcess) -> _Gathering | None:
        name = self._leaders[process.instance_id]
        ends, gathering = (name, process.instance_id), self._gatherings.get(name)
        if not self.world.network.blocked.isdisjoint((ends, ends[::-1])):
            return None
        return gathering if gathering is not None and gathering.leader.runs else None

    def _say(self, leader: SimProcess, rank: SimProcess, message: object) -> None:
        """To who looks at what passes between them."""
        for look in self.world.on_ask:
            look(leader.instance_id, rank.instance_id, message)

    def _at(
        self, process: SimProcess, call: Callable[..., object], *what: Any, after_s: float = 0.0
    ) -> None:
        loop = self.world.loop
        loop.call_at(loop.now_s + after_s, partial(call, *what), context=process.context)
