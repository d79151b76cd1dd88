"""The actor: a coroutine that takes messages in, fires events, and performs their effects.

Theory of operation
-------------------
An `Actor` is one process's place on the bus. It owns what its components share: mailbox, timers,
supervised tasks, and the counters of what went wrong. A `Component` is a part of it. Its methods
marked `@receives(Message)` turn a message into an event on some machine; its methods marked
`@performs(Effect)` carry out the effects that come back. A performer that is a coroutine runs as a
supervised task, and the event it returns is fired on the same machine. All that happens waits in
one inbox, and `Actor.run` takes each item to its end before the next (`mailbox.py`).

At its start the actor checks that each effect has exactly one performer, each message one receiver.

Nothing here blocks, and nothing escapes: an illegal event or an exception concludes its own object
and is counted, and the actor goes on (faults F13, F14, F16). Tasks are never cancelled as a change
of state; only closing the actor ends them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from types import CoroutineType
from typing import ClassVar, Generic, Never, TypeVar

from epd.dropped import DropLog
from epd.engine.base import DeviceLost
from epd.failure import Failure, FailureKind
from epd.fsm.kernel import Effect, Event, IllegalEvent, Machine
from epd.messages import Address, InstanceInfo, LinkProbe, Message, Span
from epd.roles.behind_gateways import BehindGateways
from epd.roles.hands import Hands
from epd.roles.mailbox import Mailbox, OutOfTurn
from epd.roles.ports import Ports
from epd.roles.progress import InstanceProgress
from epd.roles.timers import Timers
from epd.roles.watching.stage_times import StageTimes
from epd.transport.base import Buffer, Received, Unsendable

F = TypeVar("F", bound=Callable[..., object])
M = TypeVar("M", bound=Machine, contravariant=True)  # noqa: PLC0105 (as it is called everywhere)
T = TypeVar("T")
Work = Coroutine[object, None, T]  # that a task does
Then = Callable[[T], None]  # with what it came to


def receives(*messages: type[Message]) -> Callable[[F], F]:
    """Mark a method `(self, received)` as the handler of these messages."""

    def mark(method: F) -> F:
        method.__dict__["epd_receives"] = messages
        return method

    return mark


def performs(*effects: Effect) -> Callable[[F], F]:
    """Mark a method `(self, machine, event)` as the performer of these effects."""

    def mark(method: F) -> F:
        method.__dict__["epd_performs"] = effects
        return method

    return mark


class Actor(BehindGateways):
    """One process's place on the bus, shared by its components."""

    def __init__(self, ports: Ports) -> None:
        super().__init__(ports.clock)
        self.ports = ports
        self.bus = ports.bus
        self.journal = ports.journal
        self.log = ports.log
        self.address = ports.bus.address
        self._self = self.address.instance_id, self.address.epoch
        self.components: list[Component[Never]] = []
        self.times = StageTimes(ports.clock.now_s)
        self.peers: dict[tuple[str, int], InstanceInfo] = {}
        self.listed: set[tuple[str, int]] = set()  # by a registry, and missed by none since
        self.lost: set[tuple[str, int]] = set()  # epochs that will never be trusted again
        self._connected: dict[str, int] = {}  # the epoch of each peer that the bus talks to
        self.closing = False
        self.doubt: Callable[[Address], None] = lambda peer: None  # its answer did not come
        self._handlers: dict[type[Message], Callable[[Received], None]] = {}
        self.mailbox = Mailbox(self.fault)
        self.hands = Hands()
        self.progress = InstanceProgress(ports.clock.now_s)
        self.timers = Timers(ports.clock, self.mailbox)
        self._tasks: dict[str, tuple[asyncio.Task[None], Work[object]]] = {}
        self._runs: asyncio.Task[None] | None = None
        self._serial = 0
        self.on_device_lost: Callable[[str], None] = lambda reason: None
        self.admits: Callable[[Received], bool] = lambda received: True  # who may say that to us
        self.on_unsent: Callable[[str, Message, Failure], None] = lambda to, message, why: None
        self._drops = DropLog(ports.log.warning, ports.clock.now_s)

    def add(self, component: Component[Never]) -> None:
        self.components.append(component)
        for message, name in component.handlers.items():
            if message in self._handlers:
                raise ValueError(f"two components of one actor receive {message.__name__}")
            self._handlers[message] = getattr(component, name)

    def start(self) -> None:
        for component in self.components:
            component.check()
        self._runs = self.ports.start_task(self.run(), "actor")
        self.bus.start(self.deliver)
        for component in self.components:
            component.start()

    async def run(self) -> None:
        """From the start to the end of the process: wait for items, and take one after the other.
        An item is a handler that fires events (`Component.fire`); then come the looks at queues."""
        while not self.closing:
            for name, item, arguments in await self.mailbox.batch():
                self.mailbox.take(name, item, arguments)

    # --- messages ---------------------------------------------------------------------------------

    def deliver(self, received: Received) -> None:
        """A decoded message, for the inbox; where that is full it is lost, as on its way."""
        if self.mailbox.is_full:
            self.counters["inbox_full"] += 1
        elif not self.closing:
            self.mailbox.put(type(received.message).__name__, self.take, received)

    def take(self, received: Received) -> None:
        """Hand one message to its component."""
        found = self._handlers.get(type(received.message))
        if found is None:
            self.counters["message_without_role"] += 1
        elif (received.source, received.epoch) == self._self or self.admits(received):
            found(received)
        else:
            self.counters["message_of_stranger"] += 1
            if not isinstance(received.message, LinkProbe):  # of one whose join is on its way
                self._drops.note("stranger", type(received.message).__name__, received.source)

    def connect(self, peer: Address) -> None:
        """Learn how to reach a peer; from now on, messages for its earlier lives are dropped."""
        self._connected[peer.instance_id] = peer.epoch
        self.bus.connect(peer)

    def disconnect(self, instance_id: str) -> None:
        """Forget a peer, and what is queued for it."""
        self._connected.pop(instance_id, None)
        self.bus.disconnect(instance_id)

    def send(self, to: Address | str, message: Message, payloads: Sequence[Buffer] = ()) -> bool:
        """Queue a message; to this very instance it takes the inbox, without a socket.  An
        `Address` means one life of the peer, not its successor: that would write into slots leased
        to the dead (F44).  False: the peer takes no message now.  What cannot be sent at all goes
        to `on_unsent`."""
        instance_id = to if isinstance(to, str) else to.instance_id
        if isinstance(to, Address) and self._connected.get(instance_id, 0) not in (0, to.epoch):
            self.counters["message_to_other_epoch"] += 1
            return False
        if instance_id == self.address.instance_id:
            self.deliver(Received(instance_id, self.address.epoch, message, tuple(payloads)))
            return True
        try:
            sent = self.bus.send(instance_id, message, payloads)
        except Unsendable as error:
            which = getattr(message, "room", getattr(message, "request_id", ""))
            self.fault(f"send {type(message).__name__} {which} to {instance_id}", error)
            self.on_unsent(instance_id, message, Failure(FailureKind.INTERNAL, str(error)))
            return True  # nobody else would take it
        if not sent:
            self.counters["message_not_queued"] += 1
            if (epoch := self._connected.get(instance_id)) is not None:
                self.doubt(Address(instance_id, epoch, ""))
        return sent

    def tell_gateways(self, message: Message) -> None:
        """Each that has welcomed it."""
        for name in self.known_by():
            self.send(name, message)

    def is_self(self, address: Address) -> bool:
        own = self.address
        return address.instance_id == own.instance_id and address.epoch == own.epoch

    # --- tasks ------------------------------------------------------------------------------------

    def spawn(self, name: str, work: Work[T], then: Then[T] | None = None) -> None:
        """Run a supervised task, when the effects at hand are performed; its result comes to the
        inbox, for `then`.  A failure is counted and logged, never lost."""
        if self.mailbox.has_item:
            self.mailbox.post(name, self._begin, name, work, then)
        else:
            self._begin(name, work, then)

    def _begin(self, name: str, work: Work[T], then: Then[T] | None) -> None:
        self._serial += 1
        key = f"{name}#{self._serial}"
        task = self.ports.start_task(self._supervise(key, name, work, then), key)
        if not task.done():  # as one may be that had nothing to wait for
            self._tasks[key] = task, work

    async def _supervise(self, key: str, name: str, work: Work[T], then: Then[T] | None) -> None:
        try:
            result = await work
            if then is not None and not self.closing:
                self.mailbox.put(name, then, result)
        except Exception as error:
            self.fault(name, error)
        finally:
            self._tasks.pop(key, None)

    def fault(self, where: str, error: Exception) -> None:
        """Count and log what escaped.  A lost device ends the process, behind the items at hand."""
        name = "illegal_events" if isinstance(error, IllegalEvent) else "faults"
        self.counters[name] += 1
        self.log.warning(name, where=where, error=repr(error))
        if isinstance(error, DeviceLost) and not self.closing:
            self.mailbox.post("device lost", self.on_device_lost, str(error))

    async def close(self) -> None:
        """End everything of this process; the only place where tasks are cancelled."""
        self.closing = True
        self.timers.close()
        self.mailbox.close()
        begun = [*self._tasks.values()]
        tasks = [*(task for task, _ in begun), *([self._runs] if self._runs is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _, work in begun:
            work.close()  # where its task was cancelled before it began
        await self.bus.close()

    # --- peers ------------------------------------------------------------------------------------

    def is_lost(self, address: Address) -> bool:
        """Whether this life of a peer is over: declared lost, or replaced by a later one."""
        key = (address.instance_id, address.epoch)
        return key in self.lost or self._connected.get(address.instance_id, 0) > address.epoch

    def is_listed(self, address: Address) -> bool:
        """Whether the registry counts this life of a peer among the living."""
        return (address.instance_id, address.epoch) in self.listed and not self.is_lost(address)

    def peer_info(self, address: Address) -> InstanceInfo | None:
        return self.peers.get((address.instance_id, address.epoch))

    def spans(self, *machines: Machine | None, gateway: str = "") -> tuple[Span, ...]:
        """The machines' stories, for the timeline of that gateway; by default the own."""
        return tuple(
            Span(
                machine=machine.table.name,
                state=entry.target,
                at_s=entry.at_s + self.told_offset_s(gateway),
                key=machine.key,
            )
            for machine in machines
            if machine is not None
            for entry in machine.story
            if entry.source != entry.target
        )


class Component(Generic[M]):
    """A part of an actor: handlers of messages, performers of the effects of its machines `M`."""

    handlers: ClassVar[dict[type[Message], str]] = {}
    performers: ClassVar[dict[Effect, str]] = {}
    fires: ClassVar[type[Machine] | None] = None  # the machines that it owns

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.handlers, cls.performers = dict(cls.handlers), dict(cls.performers)
        for name, method in list(vars(cls).items()):
            marks = getattr(method, "__dict__", {})
            cls.handlers.update(dict.fromkeys(marks.get("epd_receives", ()), name))
            cls.performers.update(dict.fromkeys(marks.get("epd_performs", ()), name))

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self.clock = actor.clock
        self._mailbox = actor.mailbox
        self._keep_timers = actor.timers.keep
        self._perform = {effect: getattr(self, name) for effect, name in self.performers.items()}
        actor.add(self)

    def extend(self, part: Component[M]) -> None:
        """Let another component perform some effects of the machines that this one fires."""
        if twice := self._perform.keys() & part._perform.keys():
            raise ValueError(f"two components perform {', '.join(effect.name for effect in twice)}")
        self._perform.update(part._perform)

    def check(self) -> None:
        """Raises ValueError if an effect of its machines' table has no performer."""
        effects = self.fires.table.effects if self.fires is not None else ()
        if missing := [effect.name for effect in effects if effect not in self._perform]:
            raise ValueError(f"{type(self).__name__}: nobody performs {', '.join(missing)}")

    def start(self) -> None:
        """Called once, on the loop, when the bus is receiving."""

    def fire(self, machine: M, event: Event) -> None:
        """Now, to its end.  First all that was posted is done.  Then the machine changes its state,
        the event's effects are performed, and all that these have posted is done.  For an item or a
        look; OutOfTurn inside a performer, or outside the inbox."""
        if not self._mailbox.may_fire:
            raise OutOfTurn(f"{machine.key}: {type(event).__name__} is to be posted")
        self._mailbox.to_the_end(machine.key, self._apply, machine, event)

    def post(self, machine: M, event: Event) -> None:
        """Fire it behind the effects at hand and what is posted; as an item, if there is none."""
        if self._mailbox.has_item:
            self._mailbox.post(machine.key, self._apply, machine, event)
        else:
            self._mailbox.put(machine.key, self.fire, machine, event)

    def _apply(self, machine: M, event: Event) -> None:
        """Perform the effects one by one; each is guarded on its own."""
        source = machine.state
        try:
            effects = machine.fire(event)
        except Exception as error:
            self.actor.fault(machine.key, error)
            return
        if (state := machine.state) is not source:
            self._keep_timers(machine, machine.table.running[state])
        for effect in effects:
            try:
                outcome = self._perform[effect](machine, event)
                if type(outcome) is CoroutineType:
                    then = partial(self._performed, machine)
                    self.actor.spawn(f"{effect._name_} {machine.key}", outcome, then)
            except Exception as error:
                self.actor.fault(f"{effect.name} {machine.key}", error)
        try:
            self.fired(machine, event)
        except Exception as error:
            self.actor.fault(machine.key, error)

    def arm(self, machine: M, delay_s: float, event: Event) -> None:
        """(Re)start its timer of this event; it ends with the states in which it runs."""
        self.actor.timers.arm(machine, type(event), delay_s, partial(self.fire, machine, event))

    def _performed(self, machine: M, event: Event | None) -> None:
        if event is not None:
            self.fire(machine, event)

    def fired(self, machine: M, event: Event) -> None:
        """The event's effects are performed."""
        if machine.terminal:
            self.ended(machine)

    def ended(self, machine: M) -> None:
        """A machine is in a terminal state (may be called again for late events)."""

    def drained(self) -> None:
        """This instance takes no new work from now on."""

    def peer_lost(self, peer: Address) -> None:
        """The gateway declared this epoch of a peer lost."""

    def peer_silent(self, peer: Address) -> None:
        """This life of a peer has not answered for long; it may be alive."""

    def live(self) -> dict[str, int]:
        """What this component owns now, by kind; all zero when nothing is open (invariant 4)."""
        return {}
