"""The control plane in simulation: what a ZMQ bus over TCP can show, and under stress a bit more.

Theory of operation
-------------------
A link is one direction between two instance ids, with the sender's life.  Messages are really
packed and unpacked by the production codec.  Each gets an arrival time of its own; arrivals on one
link keep their order (one TCP connection), arrivals on different links do not.

As a real bus, this one has delay and jitter.  A partition holds messages back until it heals (TCP
repeats them) or resets the connection (they are gone).  Messages in flight to a process are gone
when it dies; later ones wait for the next process there and are refused if they are for another
life.  A stalled peer's messages wait; a full queue refuses (`send` is False); `disconnect` and
`reopen` drop what has not left yet.  A connection may go mute for good, in one direction, and only
a new one helps (fault F48).  A process's messages may arrive when its successor is there
(`withheld.py`).

Stress, only where a drill asks: `loss` and `duplication` of single messages, which the contract of
messages allows (idempotent, at most once).  `reordering` within a link, which it does not allow, is
for experiments.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from epd.messages import Address, Message
from epd.transport.base import Buffer, Received, Unsendable
from epd.transport.codec import FrameLimits, FrameRejected, frames_of, unpack
from epd_lab.sim.core.loop import SimLoop
from epd_lab.sim.core.process import SimProcess
from epd_lab.sim.core.rand import KeyedRandom
from epd_lab.sim.planes import strangers
from epd_lab.sim.planes.spelling import describe
from epd_lab.sim.planes.withheld import Withheld

Trace = Callable[..., None]
MAX_TEXTS = 8192  # of one link that are remembered


@dataclass(frozen=True, slots=True)
class Conditions:
    """How links behave; seconds and probabilities per message."""

    delay_s: float = 0.0002
    jitter_s: float = 0.0006
    slow_share: float = 0.01  # of messages that take `slow_s` more
    slow_s: float = 0.02
    loss: float = 0.0
    duplication: float = 0.0
    late_copy_s: float = 0.0  # how long after its original a copy may come
    reordering: bool = False
    max_queue: int = 1000


@dataclass(slots=True)
class Parcel:
    """One message under way; `occurrence` of this text on its link: both make the key of draws."""

    header: bytes
    payloads: tuple[Buffer, ...]
    text: str
    occurrence: int

    @property
    def kind(self) -> str:
        """The type of the message."""
        return self.text.partition(" ")[0]


class Link:
    """One direction from one life of an instance to an instance id."""

    __slots__ = (
        "chances",
        "generation",
        "held",
        "last_arrival_s",
        "mute_since_s",
        "name",
        "num_in_flight",
        "peer",
        "source",
    )

    def __init__(self, source: SimProcess, peer: Address, chances: Chances) -> None:
        self.source = source
        self.peer = peer
        self.chances = chances
        self.name = (source.instance_id, peer.instance_id)
        self.generation = 0  # raised by a reset: what is in flight then never arrives
        self.num_in_flight = 0
        self.held: deque[Parcel] = deque()  # nobody listens there, or a partition
        self.last_arrival_s = 0.0
        self.mute_since_s: float | None = None  # nothing gets through, until it is replaced


class Chances:
    """The draws of one link's messages, whatever lives the link has: keyed by text and occurrence.

    Texts of long ago are forgotten: their ids never come again.
    """

    __slots__ = ("_occurrences", "delays", "random")

    def __init__(self, random: KeyedRandom, source: str, instance_id: str) -> None:
        self.random = random
        self.delays = random.stream("delay", "", source, instance_id)
        self._occurrences: dict[str, int] = {}

    def occurrence(self, text: str) -> int:
        seen = self._occurrences
        count = seen[text] = seen.get(text, 0) + 1
        if len(seen) > MAX_TEXTS:
            for old in list(islice(seen, MAX_TEXTS // 2)):
                del seen[old]
        return count


class Network:
    """All links of a world."""

    def __init__(
        self, loop: SimLoop, random: KeyedRandom, trace: Trace, conditions: Conditions
    ) -> None:
        self.loop = loop
        self.random = random
        self.trace = trace
        self.conditions = conditions
        self.per_link: dict[tuple[str, str], Conditions] = {}
        self.buses: dict[str, SimBus] = {}
        self.links: dict[tuple[str, str], Link] = {}
        self.blocked: set[tuple[str, str]] = set()
        self.counters: Counter[str] = Counter()
        self.on_message: list[Callable[[str, str, Message], None]] = []  # each is told who sends
        self.on_loss: list[Callable[[str, str, Message], None]] = []  # of a single message
        self.on_hearing: list[Callable[[SimProcess, Received], None]] = []  # and who is told
        self.withheld: Withheld[tuple[Link, Parcel]] = Withheld()
        self._chances: dict[tuple[str, str], Chances] = {}

    def hear(self, process: SimProcess, take: Callable[..., None], received: Received) -> None:
        """A process takes a message out of its inbox."""
        for told in self.on_hearing:
            told(process, received)
        take(received)

    # --- faults -----------------------------------------------------------------------------------

    def block(self, source: str, target: str) -> None:
        """Nothing gets from `source` to `target`; what is sent waits."""
        self.blocked.add((source, target))

    def heal(self, source: str, target: str) -> None:
        self.blocked.discard((source, target))
        self.flush(target)

    def heal_all(self) -> None:
        """No partition, no stress: the network a liveness check may rely on."""
        self.conditions = Conditions()
        self.per_link.clear()
        self.counters["never heard"] += self.withheld.clear()
        for source, target in sorted(self.blocked):
            self.heal(source, target)

    def reset(self, source: str, target: str) -> None:
        """The connection breaks: what is in flight is lost, what comes later takes a new one."""
        for link in self._links(source, target):
            self.counters["reset"] += link.num_in_flight
            link.generation += 1
            link.num_in_flight = 0

    def reopen(self, source: str, target: str) -> None:
        """One end gives the connection up: what is in flight or waits in it is lost."""
        link = self.links.pop((source, target), None)
        if link is not None:
            link.generation += 1
            link.held.clear()

    def mute(self, source: str, target: str) -> bool:
        """The connection carries nothing from now on, without a notice to either end; another one
        would.  What is in flight is lost.  False: there is none."""
        links = [link for link in self._links(source, target) if link.mute_since_s is None]
        for link in links:
            link.mute_since_s = self.loop.now_s
            link.generation += 1
            link.num_in_flight = 0
        return bool(links)

    def let_go(self, life: str) -> None:
        """What was kept of this life's messages arrives, whatever became of it."""
        for link, parcel in self.withheld.let_go(life):
            self.counters["former messages"] += 1
            self.counters[f"former {parcel.kind}"] += 1
            link.num_in_flight += 1
            self._arrive(link, parcel, link.generation)

    def process_died(self, process: SimProcess) -> None:
        """Its unsent messages die with it; what was under way to it is lost."""
        for key, link in list(self.links.items()):
            if link.source is process:
                link.held.clear()
                del self.links[key]
            elif strangers.is_of(link.peer, process):
                link.generation += 1
                link.num_in_flight = 0
                link.mute_since_s = None  # the connection to its successor is another
        strangers.forget(self.buses, process.name, process.instance_id)

    # --- sending ----------------------------------------------------------------------------------

    def link(self, source: SimProcess, peer: Address) -> Link:
        key = (source.name, peer.instance_id)
        link = self.links.get(key)
        if link is not None and link.peer.epoch == 0:
            link.peer = peer  # learnt who it is: the same connection
        if link is None or link.peer.epoch != peer.epoch:
            link = self.links[key] = Link(source, peer, self.chances(*key))
        return link

    def _links(self, source: str, target: str) -> list[Link]:
        return [
            link
            for link in self.links.values()
            if link.source.instance_id == source and link.peer.instance_id == target
        ]

    def chances(self, source: str, instance_id: str) -> Chances:
        """`source`: a process's name, with its epoch."""
        found = self._chances.get((source, instance_id))
        if found is None:
            found = Chances(self.random, source, instance_id)
            self._chances[source, instance_id] = found
        return found

    def submit(self, link: Link, message: Message, parcel: Parcel) -> bool:
        """Take a parcel onto its way; False when the link's queue is full."""
        conditions = self.conditions
        if self.per_link:
            conditions = self.per_link.get(link.name, conditions)
        if link.num_in_flight + len(link.held) >= conditions.max_queue:
            return False
        for look in self.on_message:
            look(*link.name, message)
        if conditions.loss and self._chance(conditions.loss, "loss", link, parcel):
            self.counters["lost"] += 1
            self.trace("lost", *link.name, parcel.text)
            for look in self.on_loss:
                look(*link.name, message)
            return True
        self._send(link, parcel, conditions)
        if (share := conditions.duplication) and self._chance(share, "duplicate", link, parcel):
            self.counters["duplicated"] += 1
            self._send(link, parcel, conditions, "again")
        return True

    def _chance(self, probability: float, what: str, link: Link, parcel: Parcel) -> bool:
        return self.random.chance(probability, what, *self._key(link, parcel))

    def _key(self, link: Link, parcel: Parcel) -> tuple[str, str, str, int]:
        return link.source.name, link.peer.instance_id, parcel.text, parcel.occurrence

    def _send(self, link: Link, parcel: Parcel, conditions: Conditions, copy: str = "") -> None:
        if self.withheld and self.withheld.takes(link.source.name, parcel.kind, (link, parcel)):
            return
        if link.held or link.mute_since_s is not None or self._is_blocked(link):
            link.held.append(parcel)
            return
        delays = link.chances.delays
        if copy:
            delays = self.random.stream("delay", copy, link.source.name, link.peer.instance_id)
        drawn = delays.hashed(f"{parcel.text}\x1f{parcel.occurrence}")  # two draws in one
        delay_s = conditions.delay_s + conditions.jitter_s * ((drawn & 0xFFFFFF) / 0x1000000)
        if (drawn >> 24 & 0xFFFFFF) / 0x1000000 < conditions.slow_share:
            delay_s += conditions.slow_s
        if copy and conditions.late_copy_s:
            delay_s += conditions.late_copy_s * self.random.uniform(
                "late copy", *self._key(link, parcel)
            )
        arrival_s = self.loop.now_s + delay_s
        if not conditions.reordering:  # a copy may come late, after newer messages; never first
            arrival_s = max(arrival_s, link.last_arrival_s)
            if not copy:
                link.last_arrival_s = arrival_s
        link.num_in_flight += 1
        self.loop.call_outside(arrival_s, self._arrive, link, parcel, link.generation)

    def _is_blocked(self, link: Link) -> bool:
        return bool(self.blocked) and link.name in self.blocked

    def _arrive(self, link: Link, parcel: Parcel, generation: int) -> None:
        if generation != link.generation:
            return
        bus = strangers.listener(self.buses, link.peer)
        if bus is None or not bus.listening or (self.blocked and link.name in self.blocked):
            link.num_in_flight -= 1
            if link.source.alive or link.source.exited:
                link.held.append(parcel)
            return
        process = bus.process
        self.trace("arrive", link.source.name, process.name, parcel.text)
        if process.runs:
            link.num_in_flight -= 1
            process.context.run(bus.receive, parcel)
        else:  # a stalled one counts against the sender's queue
            self.loop.call_soon(
                self._hand_over, link, bus, parcel, generation, context=process.context
            )

    def _hand_over(self, link: Link, bus: SimBus, parcel: Parcel, generation: int) -> None:
        """In the receiver's process, when that goes on."""
        if generation == link.generation:
            link.num_in_flight -= 1
        bus.receive(parcel)

    def flush(self, target: str) -> None:
        """Somebody listens at `target` again, or a partition is over."""
        for link in list(self.links.values()):
            is_mute = link.mute_since_s is not None
            if link.peer.instance_id != target or is_mute or self._is_blocked(link):
                continue
            waiting, link.held = link.held, deque()
            for parcel in waiting:
                self._send(link, parcel, self.per_link.get(link.name, self.conditions), "")


class SimBus:
    """The `Bus` port of one simulated process."""

    def __init__(self, network: Network, process: SimProcess, endpoint: str = "") -> None:
        self.process = process
        self.dropped: Counter[str] = Counter()
        self.address = Address(
            process.instance_id, process.epoch, endpoint or f"sim://{process.instance_id}"
        )
        self._network = network
        self._peers: dict[str, Address] = {}
        self._deliver: Callable[[Received], None] | None = None
        self.listening = False
        self._limits = FrameLimits()
        self._closed = False
        strangers.listen(network.buses, process, self)

    def connect(self, peer: Address) -> None:
        known = self._peers.get(peer.instance_id)
        if known is not None and known != peer and known.epoch not in (0, peer.epoch):
            self.disconnect(peer.instance_id)
        if not self._closed:
            self._peers[peer.instance_id] = peer

    def disconnect(self, instance_id: str) -> None:
        peer = self._peers.pop(instance_id, None)
        if peer is not None:
            self._network.reopen(self.process.name, instance_id)

    def reopen(self, instance_id: str) -> None:
        if instance_id in self._peers:
            self._network.reopen(self.process.name, instance_id)

    def send(self, instance_id: str, message: Message, payloads: Sequence[Buffer] = ()) -> bool:
        peer = self._peers.get(instance_id)
        if peer is None or self._closed:
            self._network.counters["no_peer"] += 1
            return False
        try:
            header, _ = frames_of(self.address, peer.epoch, message, payloads, self._limits)
        except Unsendable:
            self.dropped["unsendable"] += 1
            raise
        views = tuple(memoryview(payload).cast("B") for payload in payloads)
        network = self._network
        link = network.link(self.process, peer)
        text = describe(message)
        parcel = Parcel(header, views, text, link.chances.occurrence(text))
        return network.submit(link, message, parcel)

    def start(self, deliver: Callable[[Received], None]) -> None:
        self._deliver, self.listening = deliver, True
        self._network.flush(self.process.instance_id)

    async def close(self) -> None:
        """What was sent before is on its way; nobody listens here any more."""
        self._closed = True
        self._deliver, self.listening = None, False
        strangers.forget(self._network.buses, self.process.name, self.process.instance_id)

    def receive(self, parcel: Parcel) -> None:
        """Unpack and deliver, as production does it."""
        if self._deliver is None:
            return
        try:
            received = unpack(parcel.header, parcel.payloads, self.address.epoch, self._limits)
        except FrameRejected as rejected:
            self.dropped[rejected.kind] += 1
            return
        try:
            self._deliver(received)
        except Exception:
            self.dropped["handler_error"] += 1
