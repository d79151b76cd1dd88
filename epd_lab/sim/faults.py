"""Faults as data, and who makes them happen.

A fault happens at a time, at the nth occurrence of a protocol point, or at a step of the loop.  A
point is `MACHINE:FROM>TO`, `MACHINE:Event`, or `MESSAGE:Type`, of what a leader asks a rank, too.
Its target and its `other` are the name of an instance, `here` (where the point occurred) or `peer`
(the other end of that transfer, or the message's receiver).
"""

from __future__ import annotations

from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from epd.frontend import Refused
from epd.fsm.instance import Instance, JoinAccepted
from epd.fsm.kernel import Event, Machine, State
from epd_lab.sim import wedges
from epd_lab.sim.cluster import GATEWAY, Cluster
from epd_lab.sim.core.process import SimProcess
from epd_lab.sim.world import World

HAUNTED_RESTART_S = 0.1


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a plan."""

    kind: str  # a method of `Injector`
    target: str
    at_s: float = 0.0
    point: str = ""
    nth: int = 1
    at_step: int = 0
    duration_s: float = 0.0  # until it is undone; 0: it stays until the world heals
    other: str = ""  # the second end of a link
    call: str = ""  # of a port (`breaks.py`); a kind of message; what a write is of
    factor: float = 1.0

    def __str__(self) -> str:
        when = f"at {self.nth}. {self.point}" if self.point else f"at {self.at_s:.4f} s"
        if self.at_step:
            when = f"at step {self.at_step}"
        other = f"-{self.other}" if self.other else ""
        other += f" {self.call}" if self.call else ""
        lasts = f" for {self.duration_s:.3f} s" if self.duration_s else ""
        return f"{self.kind} {self.target}{other} {when}{lasts}"


class Injector:
    """Makes the faults of a plan happen; `World.fired` counts what really did."""

    def __init__(self, world: World, cluster: Cluster, faults: tuple[Fault, ...]) -> None:
        self.world = world
        self.cluster = cluster
        self._points: dict[str, list[Fault]] = {}
        self._seen: Counter[str] = Counter()
        self._steps = sorted((f for f in faults if f.at_step), key=lambda f: f.at_step)
        self._haunted: dict[
            str, tuple[int, float]
        ] = {}  # by name: which life; when its messages come
        self.enabled = True
        if any(fault.kind == "haunt" for fault in faults):
            world.watch(self._joined, JoinAccepted)
        for fault in faults:
            if fault.point:
                self._points.setdefault(fault.point, []).append(fault)
            elif not fault.at_step:
                world.loop.call_at(fault.at_s, self.inject, fault, fault.target)
        if any(not point.startswith("MESSAGE") for point in self._points):
            world.watchers.append(self._watch)
        if any(point.startswith("MESSAGE") for point in self._points):
            world.network.on_message.append(self._message)
            world.on_ask.append(self._message)
        if self._steps:
            world.loop.after_step = self._count_step

    # --- when -------------------------------------------------------------------------------------

    def _watch(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        name = machine.table.name
        peer = getattr(machine, "peer", None)
        peer_id = peer.instance_id if peer is not None else ""
        self._reach(f"{name}:{type(event).__name__}", process.instance_id, peer_id)
        if source is not target:
            self._reach(f"{name}:{source.name}>{target.name}", process.instance_id, peer_id)

    def _message(self, source: str, target: str, message: object) -> None:
        self._reach(f"MESSAGE:{type(message).__name__}", source, target)

    def _reach(self, point: str, here: str, peer: str) -> None:
        faults = self._points.get(point)
        if not faults:
            return
        self._seen[point] += 1
        for fault in faults:
            if fault.nth == self._seen[point]:
                ends = {"here": here, "peer": peer}
                target = ends.get(fault.target, fault.target)
                other = ends.get(fault.other, fault.other)
                if target:
                    self.world.loop.call_next(self.inject, replace(fault, other=other), target)

    def _count_step(self) -> None:
        while self._steps and self.world.loop.steps >= self._steps[0].at_step:
            fault = self._steps.pop(0)
            self.inject(fault, fault.target)
        if not self._steps:
            self.world.loop.after_step = None

    def _joined(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        """A successor is a member, or, of a gateway, has members: the dead may speak."""
        address = machine.info.address if isinstance(machine, Instance) else process
        for joined in (address, process):
            life, delay_s = self._haunted.get(joined.instance_id, (0, 0.0))
            if 0 < life < joined.epoch:
                del self._haunted[joined.instance_id]
                former = f"{joined.instance_id}:{life}"
                loop = self.world.loop
                loop.call_outside(loop.now_s + delay_s, self.world.network.let_go, former)

    # --- what -------------------------------------------------------------------------------------

    def inject(self, fault: Fault, target: str) -> None:
        if not self.enabled:
            return
        if target != "all" and target not in self.world.processes:
            return
        if getattr(self, f"do_{fault.kind}")(fault, target):
            self.world.fired[fault.kind] += 1
            self.world.trace("fault", str(fault), target)

    def _later(self, fault: Fault, undo: Any, *args: Any) -> None:
        if fault.duration_s:
            loop = self.world.loop
            loop.call_outside(loop.now_s + fault.duration_s, undo, *args)

    def do_kill(self, fault: Fault, target: str) -> bool:
        """kill -9; started anew after `duration_s`, if that is given."""
        if not self.world.kill(target):
            return False
        self._later(fault, self.cluster.spawn, target)
        return True

    def do_power_off(self, fault: Fault, target: str) -> bool:
        """The host of a rank: nobody there closes its connection with its leader."""
        self.do_partition(replace(fault, other=self.cluster.groups.hosts.leader_of(target)), target)
        return self.do_kill(fault, target)

    def do_impersonate(self, fault: Fault, target: str) -> bool:
        """Somebody starts another instance under its name, on another host."""
        self.world.spawn(target, self.cluster.run_instance, is_stranger=True)
        return True

    def do_poison(self, fault: Fault, target: str) -> bool:
        """From now on the first input of kind `call` (`poison.py`) that is computed kills each
        process that computes it.  Who dies is started anew after `duration_s`."""

        def kill(process: SimProcess) -> None:
            self.world.loop.call_next(self._die_of_it, fault, process)

        self.world.poison.arm(fault.call, kill)
        return False  # it counts when somebody dies

    def _die_of_it(self, fault: Fault, process: SimProcess) -> None:
        if self.enabled and process.alive:
            self.world.fired["poison"] += 1
            self.world.kill(process.instance_id)
            self._later(fault, self.cluster.spawn, process.instance_id)

    def do_haunt(self, fault: Fault, target: str) -> bool:
        """Its messages from now on (`call`: those of this kind) are kept back.  It is killed after
        `duration_s`, with `other`, and started anew; its messages arrive `factor` seconds after its
        successor has joined."""
        process = self.world.processes[target]
        if not process.alive:
            return False
        self.world.network.withheld.hold(process.name, fault.call)
        self._haunted[target] = process.epoch, fault.factor
        self._later(fault, self._bury, process, fault.other)
        return True

    def _bury(self, process: SimProcess, other: str) -> None:
        if not (self.enabled and process.alive):
            return
        for name in filter(None, (process.instance_id, other)):
            self.world.kill(name)
            self.cluster.restart_later(name, HAUNTED_RESTART_S)

    def do_stall(self, fault: Fault, target: str) -> bool:
        if not self.world.stall(target):
            return False
        self._later(fault, self.world.resume, self.world.processes[target])
        return True

    def do_drain(self, fault: Fault, target: str) -> bool:
        """SIGTERM: finish what is open, leave, end; the supervisor starts it anew."""
        node = self.cluster.node(target)
        if node is None or node.instance is None or node.process.stalled:
            return False
        process = node.process
        if not self.cluster.is_formed(process) or self.cluster.lives.is_loading(process):
            self.world.exit(process)  # there is nothing to drain
        else:
            self.cluster.lives.drain(node)
        return True

    def do_ask_drain(self, fault: Fault, target: str) -> bool:
        """`epd drain --within duration_s`; the supervisor starts it anew.  With `call`, roles: `epd
        role`."""
        node, asked = self.cluster.node(target), self.cluster.node(GATEWAY)
        if node is None or node.instance is None or asked is None or asked.gateway is None:
            return False
        drain = asked.gateway.role.drain
        roles = tuple(filter(None, fault.call.split(",")))
        if not roles:
            node.instance.member.on_drain_asked = lambda *_: self.cluster.lives.drain(node)

        def ask() -> None:
            with suppress(Refused):  # it drains already, or is no member yet
                drain(target, fault.duration_s, forced=True, restarts=True, roles=roles)

        asked.process.context.run(asked.gateway.actor.mailbox.put, "drain", ask)
        return True

    def do_roll_out(self, fault: Fault, target: str) -> bool:
        """Every instance is asked, one after the other, `factor` seconds apart."""
        loop = self.world.loop
        for n, name in enumerate(sorted(set(self.world.processes) - {GATEWAY})):
            one = replace(fault, kind="ask_drain", target=name)
            loop.call_outside(loop.now_s + n * fault.factor, self.inject, one, name)
        return True

    def do_slow(self, fault: Fault, target: str) -> bool:
        process = self.world.processes[target]
        process.slowness = fault.factor
        self._later(fault, setattr, process, "slowness", 1.0)
        return process.alive

    def do_hang(self, fault: Fault, target: str) -> bool:
        """The device takes work and finishes none."""
        node = self.cluster.node(target)
        member = self.cluster.groups.member(self.world.processes[target])
        devices = node.devices if node is not None else [member.device] if member else []
        for device in devices:
            device.hung = True
            self._later(fault, device.release)
        return bool(devices)

    def do_wedge(self, fault: Fault, target: str) -> bool:
        """Its step loop takes no turn any more."""
        node = self.cluster.node(target)
        return node is not None and wedges.stop_turns(node.instance)

    def do_freeze(self, fault: Fault, target: str) -> bool:
        """The thread that copies for its transport moves nothing any more."""
        node = self.cluster.node(target)
        if node is None:
            return False
        wedges.freeze(self.world.fabric, node.process.name)
        self._later(fault, wedges.thaw, self.world.fabric)
        return True

    def do_oom(self, fault: Fault, target: str) -> bool:
        """The next `factor` works of the device fail."""
        node = self.cluster.node(target)
        if node is None or not node.devices:
            return False
        node.devices[0].fail_next += int(fault.factor)
        return True

    def do_lose_device(self, fault: Fault, target: str) -> bool:
        """A sticky error: the device fails everything at once until its process ends."""
        node = self.cluster.node(target)
        if node is None or not node.devices:
            return False
        node.devices[0].lost = True
        return True

    def do_lose_thread(self, fault: Fault, target: str) -> bool:
        """The thread that launches on the device ends; `call` "pool": one that prepares."""
        node = self.cluster.node(target)
        if node is None or not node.devices:
            return False
        node.devices[fault.call == "pool"].lose_thread()
        return True

    def do_lose_command(self, fault: Fault, target: str) -> bool:
        """The next `factor` commands to a rank do not arrive."""
        member = self.cluster.groups.member(self.world.processes[target])
        if member is None or not member.process.alive:
            return False
        member.commands.lose_next += int(fault.factor)
        return True

    def do_raise(self, fault: Fault, target: str) -> bool:
        """The next `factor` calls of this name raise at once."""
        self.world.processes[target].breaks.plan(fault.call, int(fault.factor), late=False)
        return True

    def do_raise_late(self, fault: Fault, target: str) -> bool:
        """The same, after the time that they take."""
        self.world.processes[target].breaks.plan(fault.call, int(fault.factor), late=True)
        return True

    def do_corrupt(self, fault: Fault, target: str) -> bool:
        """A bit of what its next `factor` writes move lands as another."""
        waiting = self.world.fabric.corrupt_next.setdefault(target, deque())
        waiting.extend([fault.call] * int(fault.factor))
        return True

    # --- what: adapters ---------------------------------------------------------------------------

    def do_adapter(self, fault: Fault, target: str) -> bool:
        """Somebody has one loaded (`call`: "NAME=DIGEST") at the gateway; undone: unloaded."""
        self._later(fault, self._ask_desk, target, fault.call.partition("=")[0])
        return self._ask_desk(target, fault.call)

    def _ask_desk(self, target: str, text: str) -> bool:
        node = self.cluster.node(target)
        if node is None or node.gateway is None:
            return False
        return self.cluster.desk.ask(node.process, node.gateway, text)

    def do_spoil(self, fault: Fault, target: str) -> bool:
        """The files of the adapter `call` are others at this instance."""
        self.cluster.desk.spoil(target, fault.call)
        if (node := self.cluster.node(target)) is not None and node.language is not None:
            node.language.spoiled = self.cluster.desk.spoils(target)
        return True

    # --- what: time -------------------------------------------------------------------------------

    def _named(self, target: str) -> list[SimProcess]:
        processes = self.world.processes
        return [*processes.values()] if target == "all" else [processes[target]]

    def do_jump(self, fault: Fault, target: str) -> bool:
        """The wall clock of its host, or of "all", is set by `factor` s, for `duration_s`."""
        for process in self._named(target):
            self.world.set_clock(process, fault.factor)
            self._later(fault, self.world.set_clock, process, -fault.factor)
        return True

    def do_drift(self, fault: Fault, target: str) -> bool:
        """Its monotonic clock goes `factor` times as fast from now on."""
        return self.world.drift(self.world.processes[target], fault.factor)

    def do_sleep(self, fault: Fault, target: str) -> bool:
        """The machine sleeps: nobody on it runs, and the wall clock is ahead at once when it
        wakes.  So is the monotonic one, unless `call` is "stops": then it lacks that time."""
        asleep = [p for p in self._named(target) if p.alive and self.world.stall(p.instance_id)]
        for process in asleep:
            self._later(fault, self._wake, process, fault.duration_s * (fault.call == "stops"))
        return bool(asleep)

    def _wake(self, process: SimProcess, lost_s: float) -> None:
        process.clock_offset_s -= lost_s
        self.world.resume(process)

    def do_skew(self, fault: Fault, target: str) -> bool:
        self.world.processes[target].wall_skew_s = fault.factor
        return True

    def do_partition(self, fault: Fault, target: str) -> bool:
        self.do_block(fault, target)
        self._block(fault, fault.other, target)
        return True

    def do_block(self, fault: Fault, target: str) -> bool:
        """One way: nothing from target gets to `other`."""
        self._block(fault, target, fault.other)
        return True

    def _block(self, fault: Fault, source: str, target: str) -> None:
        self.world.network.block(source, target)
        self._later(fault, self.world.network.heal, source, target)

    def do_mute(self, fault: Fault, target: str) -> bool:
        """The connection from target to `other` carries nothing any more, without a notice."""
        return self.world.network.mute(target, fault.other)

    def do_reset(self, fault: Fault, target: str) -> bool:
        """Connections between the two break; what was in flight is lost."""
        before = self.world.network.counters["reset"]
        self.world.network.reset(target, fault.other)
        self.world.network.reset(fault.other, target)
        return self.world.network.counters["reset"] > before
