"""Adapters that are loaded and unloaded while the gateway serves: ADAPTER's effects.

The list of adapters has a number, which rises with each change.  A heartbeat has the number that
its instance has applied; who has another one gets the list again.

An instance that joins brings the last list that it got.  A gateway that has begun anew goes on with
the newest one of a former gateway: it loads what that has, and unloads what it lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from epd.config import Timing
from epd.frontend import Adapter, Refused
from epd.fsm.adapter import (
    Do,
    HeldFromStart,
    InstanceBehind,
    LastRequestEnded,
    ListApplied,
    LoadAsked,
    LoadedAdapter,
    LoadRefused,
    RequestEnded,
    TimedOut,
    UnloadAsked,
    nobody,
)
from epd.fsm.generation import Generation
from epd.fsm.instance import Instance
from epd.fsm.kernel import Event
from epd.messages import AdapterList, Address, Join
from epd.roles.base import Actor, Component, performs
from epd.roles.bell import Bell
from epd.roles.gateway.registry import Registry

LOAD_TIMEOUT_S = 60.0  # a file of a few hundred megabytes, from a slow disk


class Adapters(Component[LoadedAdapter]):
    """Implements `epd.frontend.AdapterDesk`."""

    fires = LoadedAdapter

    def __init__(
        self,
        actor: Actor,
        registry: Registry,
        timing: Timing,
        max_loras: int,
        open_ones: Callable[[], Iterable[Generation]],
    ) -> None:
        super().__init__(actor)
        self._registry = registry
        self._timing = timing
        self._max_loras = max_loras
        self._open_ones = open_ones
        self._adapters: dict[str, LoadedAdapter] = {}
        self._serial = 0  # of the list; 0: there is none yet
        self._owed: dict[str, Address] = {}  # whom the list is sent to, after the item at hand
        self.offered: dict[str, Adapter] = {}
        self._former = (0, 0)  # the newest list of a former gateway: that one's epoch, its serial
        registry.heartbeat_listeners += (self._heard,)
        registry.join_listeners += (self._joined,)

    def live(self) -> dict[str, int]:
        return {"adapters": sum(adapter.is_at_work for adapter in self._adapters.values())}

    # --- the API's side ---------------------------------------------------------------------------

    def begin(self, held: Mapping[str, Adapter]) -> None:
        for named in held.values():
            self.post(self._add(named, ""), HeldFromStart())
        self._change()

    async def load(self, adapter: Adapter, path: str) -> None:
        name = adapter.name
        if name in self._adapters:
            raise Refused(400, f"the adapter name {name} is taken; unload it, or give another name")
        if len(self._adapters) >= self._max_loras:
            limit = f"{self._max_loras} adapters are loaded, which is all that --max-loras admits"
            raise Refused(400, f"{limit}; unload one")
        machine, answered = self._add(adapter, path), Bell()
        self.post(machine, LoadAsked(answered.ring))
        await answered
        if machine.refusal is not None:
            raise machine.refusal

    async def unload(self, name: str) -> None:
        if self.offered.pop(name, None) is None:
            raise Refused(404, f"no adapter {name} is loaded; GET /v1/models lists those that are")
        answered = Bell()
        self.post(self._adapters[name], UnloadAsked(answered.ring))
        await answered

    def _add(self, named: Adapter, path: str) -> LoadedAdapter:
        machine = self._adapters[named.name] = LoadedAdapter(named, path, self.actor.journal)
        return machine

    # --- requests ---------------------------------------------------------------------------------

    def may_run(self, named: Adapter) -> bool:
        """Whether a request with this adapter, or with none, is placed."""
        machine = self._adapters.get(named.name)
        is_known = machine is not None and machine.named == named and machine.may_run
        return is_known or not named.name

    def request_ended(self, generation: Generation) -> None:
        named = generation.asked.adapter if generation.asked is not None else None
        if named is not None and (machine := self._adapters.get(named.name)) is not None:
            self.post(machine, RequestEnded())

    @performs(Do.COUNT_REQUESTS)
    def count_requests(self, machine: LoadedAdapter, event: Event) -> None:
        prompts = (one.asked for one in self._open_ones())
        if all(prompt is None or prompt.adapter != machine.named for prompt in prompts):
            self.post(machine, LastRequestEnded())

    # --- instances --------------------------------------------------------------------------------

    def _holders(self) -> list[Instance]:
        """Those that have to apply the list."""
        return [i for i in self._registry.instances if i.present and _holds(i)]

    @property
    def _list(self) -> tuple[int, int]:
        return self.actor.address.epoch, self._serial

    def _heard(self, instance: Instance) -> None:
        if not (_holds(instance) and self._serial):
            return
        if instance.load.adapter_list == self._list:
            self._look()
            return
        address = instance.info.address
        for machine in self._adapters.values():
            self.post(machine, InstanceBehind(address))
        if not self._adapters:  # it may hold some of the start, or of a former gateway
            self._owe(address)

    def _joined(self, join: Join) -> None:
        if (brought := join.adapters) is None or join.adapters_of == self.actor.address.epoch:
            return
        if (number := (join.adapters_of, brought.serial)) <= self._former:
            return
        self._former = number
        names = {name for _, _, name, _ in brought.adapters}
        for name in [name for name in self.offered if name not in names]:
            del self.offered[name]
            self.post(self._adapters[name], UnloadAsked(nobody))
        for digest, path, name, changes_tower in brought.adapters:
            if name not in self._adapters and len(self._adapters) < self._max_loras:
                named = Adapter(name, digest, changes_tower)
                self.post(self._add(named, path), LoadAsked(nobody))

    def peer_lost(self, peer: Address) -> None:
        """The others may have applied the list."""
        self.actor.mailbox.look("adapters held", self._look)

    def _look(self) -> None:
        """What came of the list, if everybody has applied it."""
        loads = [instance.load for instance in self._holders()]
        if any(load.adapter_list != self._list for load in loads):
            return
        refused = {digest: why for load in loads for digest, why in load.unheld}
        for machine in self._adapters.values():
            why = refused.get(machine.named.digest)
            told = ListApplied(len(loads)) if why is None else LoadRefused(why)
            self.post(machine, told)

    @performs(Do.SEND_LIST)
    def send_list(self, machine: LoadedAdapter, event: Event) -> None:
        self._change()

    def _change(self) -> None:
        self._serial += 1
        for instance in self._holders():
            self._owe(instance.info.address)

    @performs(Do.SEND_AGAIN)
    def send_again(self, machine: LoadedAdapter, event: InstanceBehind) -> None:
        self._owe(event.instance)

    def _owe(self, address: Address) -> None:
        self._owed[address.instance_id] = address
        self.actor.mailbox.look("adapters", self._send)

    def _send(self) -> None:
        listed = [one for one in self._adapters.values() if one.is_listed]
        told = tuple(
            (named.digest, one.path, named.name, named.changes_tower)
            for one in listed
            for named in (one.named,)
        )
        owed, self._owed = self._owed, {}
        for address in owed.values():
            self.actor.send(address, AdapterList(serial=self._serial, adapters=told))

    # --- effects ----------------------------------------------------------------------------------

    @performs(Do.OFFER)
    def offer(self, machine: LoadedAdapter, event: Event) -> None:
        self.offered[machine.key] = machine.named
        self.actor.log.info("adapter is offered", adapter=machine.key, path=machine.path)

    @performs(Do.WITHDRAW)
    def withdraw(self, machine: LoadedAdapter, event: Event) -> None:
        self.offered.pop(machine.key, None)

    @performs(Do.ANSWER)
    def answer(self, machine: LoadedAdapter, event: Event) -> None:
        machine.asker()

    @performs(Do.FREE_NAME)
    def free_name(self, machine: LoadedAdapter, event: Event) -> None:
        del self._adapters[machine.key]
        why = machine.refusal.message if machine.refusal is not None else "unloaded"
        self.actor.log.info("adapter is gone", adapter=machine.key, why=why)

    @performs(Do.ARM_LOADING)
    def arm_loading(self, machine: LoadedAdapter, event: Event) -> None:
        self.arm(machine, LOAD_TIMEOUT_S, TimedOut())

    @performs(Do.ARM_RETIRING)
    def arm_retiring(self, machine: LoadedAdapter, event: Event) -> None:
        self.arm(machine, self._timing.drain_timeout_s, TimedOut())

    @performs(Do.ARM_REMOVING)
    def arm_removing(self, machine: LoadedAdapter, event: Event) -> None:
        self.arm(machine, 2 * self._timing.lost_after_s, TimedOut())


def _holds(instance: Instance) -> bool:
    """Whether it computes: with a language model, or a tower."""
    return instance.info.kv_layout is not None or "encode" in instance.info.roles
