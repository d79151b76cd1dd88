"""What two instances died of goes to no third one, and nothing else is held to be poison.

A pill (`epd_lab/sim/poison.py`) ends two instances at most, and its requests end with that error.
That request has asked for what two lives computed when they were lost, or since their last beat, by
the engines; beside a pill alone, for the pill.  Nothing else counts at an end.  Where messages are
lost, a list of what was at hand may be.
"""

from __future__ import annotations

from collections import defaultdict

from epd.fsm import instance
from epd.fsm.kernel import Event, Machine, State
from epd.scheduling.deaths import MAX_DEATHS
from epd_lab.sim.checkers.base import Checker, Context
from epd_lab.sim.client import Record
from epd_lab.sim.core.process import SimProcess
from epd_lab.sim.wedges import wedged
from epd_lab.sim.workload import mm_hash_of

MUFFLES = ("partition", "block", "reset", "mute", "haunt", "stall", "sleep", "raise", "raise_late")
SLACK_S = 0.1  # for a beat that is on its way when another life has joined
ENDS = ("kill", "lose_device", "lose_thread", "hang", "group_lost")


class Poison(Checker):
    name = "poison"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._died_of: defaultdict[str, set[str]] = defaultdict(set)  # by input
        self._ended_s: dict[str, float] = {}  # by process
        self.world.watch(self._lost, instance.HeartbeatsEnded, instance.EpochReplaced)
        self.world.on_death.append(self._ended)

    @property
    def _is_muffled(self) -> bool:
        return self.context.bus_loses or any(self.world.fired[kind] for kind in MUFFLES)

    def _ended(self, process: SimProcess) -> None:
        self._ended_s[process.name] = self.world.loop.now_s

    def _lost(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        if target is not instance.S.LOST:
            return
        ended_s = self._ended_s.get(machine.key, self.world.loop.now_s)
        beat_s = self.context.cluster.settings.timing.heartbeat_interval_s
        counts = self.world.poison.at_hand(machine.key, ended_s - beat_s - SLACK_S)
        held = self._held(process, machine.key)
        if wedged(self.context.cluster.nodes[machine.key].instance):
            counts |= held  # what its frozen loop held has not reached an engine
        elif not self._is_muffled:
            for key in held - counts:
                self.violate(f"the end of {machine.key} counts against {key}, not at hand there")
        for key in counts:
            self._died_of[key].add(machine.key)

    def _held(self, gateway: SimProcess, life: str) -> set[str]:
        """What counts now: at hand there, or left without a later beat."""
        node = self.context.cluster.nodes[gateway.name].gateway
        assert node is not None
        name, _, epoch = life.rpartition(":")
        held = node.dispatcher.suspects.deaths.held((name, int(epoch)))
        asks = [one.ask for one in self.context.clients.records]
        names = {mm_hash_of(image): image.name for ask in asks for _, image in ask.images}
        return {*(names.get(image, image) for image in held.images), *held.requests}

    def at_end(self) -> None:
        if self._is_muffled:
            return
        deaths, records = self.world.poison.deaths, self.context.clients.records
        told = [one for one in records if one.error is not None and one.error.kind == "poison"]
        is_alone = bool(deaths) and not any(self.world.fired[kind] for kind in ENDS)
        for key, lives in deaths.items():
            if len(lives) > MAX_DEATHS:
                self.violate(f"{', '.join(lives)} died of {key}")
            gone = any(one.hung_up or one.gateway_died for one in records)
            if len(lives) == MAX_DEATHS and not (told or gone):
                self.violate(f"{' and '.join(lives)} died of {key}, and nobody was told")
        for record in told:
            self._check(record, is_alone=is_alone)

    def _check(self, record: Record, *, is_alone: bool) -> None:
        who = f"request {record.ask.index} ({record.request_id})"
        keys = self._inputs(record)
        if is_alone and not self.world.poison.deaths.keys() & set(keys):
            self.violate(f"{who} is held to be poison, and stood beside it")
        content = set().union(*(self._died_of[key] for key in keys if key.startswith("gateway")))
        images = [len(self._died_of[key]) for key in keys]
        if max(len(content), *images) < MAX_DEATHS:
            self.violate(f"{who} is held to be poison: {[*map(self._died_of.get, keys)]}")

    def _inputs(self, record: Record) -> list[str]:
        """Its images, and the ids of all who asked for the same."""
        alike = _content(record)
        others = [one for one in self.context.clients.records if _content(one) == alike]
        return [*(image.name for _, image in record.ask.images), *(o.request_id for o in others)]


def _content(record: Record) -> object:
    ask = record.ask
    return ask.placed(), ask.tenant, ask.max_tokens, ask.wishes, ask.stops_at_eos
