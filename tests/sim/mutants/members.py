"""Bugs of membership put back: of an instance's own half (MEMBERSHIP), of equal names, of drains,
of processes that go on as another epoch, and of several gateways."""

from __future__ import annotations

from unittest import mock

from epd.config import InstanceConfig
from epd.fsm import generation, request
from epd.fsm import instance as i
from epd.fsm import membership as m
from epd.fsm.kernel import Event
from epd.messages import Address, InstanceInfo
from epd.roles import holding
from epd.roles.base import Actor
from epd.roles.gateway.drains import Drains
from epd.roles.gateway.registry import Registry
from epd.roles.member import Member
from epd.roles.place import GatewayPlace
from epd.roles.rooms import Rooms
from epd.scheduling import placement
from epd_lab.sim.engine.device import SimDevice
from epd_lab.sim.planes.transfer import SimTransferEngine
from tests.sim.mutants.planting import Planted, mutant, patched, row

MEMBERSHIP = m.Membership.table


@mutant
def the_welcome_brings_no_time() -> Planted:
    """F57: an instance reads deadlines by the wall clock of its own start."""

    def nothing(self: Member, machine: m.Membership, event: Event) -> None:
        pass

    return patched(Member, "take_time", nothing)


@mutant
def whatever_the_clock_it_is_welcome() -> Planted:
    """F57: how far a wall clock is from the gateway's is not looked at."""

    def never(self: Member, wall_s: float) -> str:
        return ""

    return patched(Member, "_far_off", never)


@mutant
def a_silent_gateway_is_waited_for() -> Planted:
    """F17, F35: an instance does not ask a gateway that is silent, which may be a new one."""
    return row(MEMBERSHIP, m.S.MEMBER, m.GatewayFellSilent, None, (m.Do.DOUBT, m.Do.ARM_SILENCE))


@mutant
def a_join_is_said_once() -> Planted:
    """F17, F18: an instance that starts before its gateway is up waits for an answer for ever."""
    return row(MEMBERSHIP, m.S.OUTSIDE, m.JoinDue, m.S.JOINING, (m.Do.SEND_JOIN,))


@mutant
def who_joins_trusts_the_link() -> Planted:
    """F48: joins are said again and again over a link that carries none (swarm 1796000003421)."""
    return row(MEMBERSHIP, m.S.JOINING, m.JoinDue, None, (m.Do.SEND_JOIN, m.Do.ARM_JOIN))


@mutant
def whoever_has_the_name_is_the_next_life() -> Planted:
    """F78: who joins under the name of a living one takes its place."""

    def replaced(self: i.Instance, info: InstanceInfo) -> i.EpochReplaced:
        return i.EpochReplaced()

    return patched(i.Instance, "asked_for", replaced)


@mutant
def the_living_defend_no_name() -> Planted:
    """F78: a stranger under the name of a living one waits for ever, and nobody is told."""
    cells = i.TABLE.dispatch[i.S.HEALTHY]
    rows = cells[i.HeartbeatReceived]
    mute = tuple(
        (g, do, tuple(e for e in each if e is not i.Do.SHOW_ALIVE), to) for g, do, each, to in rows
    )
    return mock.patch.dict(cells, {i.HeartbeatReceived: mute})


@mutant
def who_returns_is_not_answered() -> Planted:
    """F78: a life that was lost, and whose name another has, beats its heart for nobody."""
    refuse = Registry._refuse

    def unless_followed(self: Registry, info: InstanceInfo, reason: str) -> None:
        known = self._instances.get(info.address.instance_id)
        if known is None or not known.present or known.info.address == info.address:
            refuse(self, info, reason)

    return patched(Registry, "_refuse", unless_followed)


@mutant
def a_life_begins_while_the_last_one_writes() -> Planted:
    """F7, F44: a process attests the end of an epoch whose bytes still move."""

    async def close(self: SimTransferEngine) -> bool:
        return True

    return patched(SimTransferEngine, "close", close)


@mutant
def a_life_begins_while_the_last_one_steps() -> Planted:
    """F29: a step of the former epoch writes into the pool of the next one."""

    async def rest(self: SimDevice) -> bool:
        return True

    return patched(SimDevice, "rest", rest)


@mutant
def the_lost_are_taken_for_ended() -> Planted:
    """F7: an epoch that was declared lost counts as ended by the word of its process."""

    def attests(self: Rooms[object, object], peer: Address) -> bool:  # type: ignore[type-var]
        return True

    return patched(Rooms, "_attests_end", attests)


@mutant
def nobody_believes_in_the_end_of_a_life() -> Planted:
    """F8: memory that an ended epoch was granted stays owned as long as its process goes on."""

    def attests(self: Rooms[object, object], peer: Address) -> bool:  # type: ignore[type-var]
        return False

    return patched(Rooms, "_attests_end", attests)


@mutant
def a_move_forgets_what_was_said() -> Planted:
    """What moves begins its answer anew."""

    def forget(machine: generation.Generation, event: generation.AttemptMoved) -> None:
        generation.begin_move(machine, event)
        machine.token_ids = []

    to, do = generation.S.PLACED, (generation.Do.ARM_ATTEMPT, generation.Do.HAND_OVER)
    return row(generation.TABLE, generation.S.STREAMING, generation.AttemptMoved, to, do, forget)


@mutant
def a_move_does_not_wait_for_steps() -> Planted:
    """F6: KV is handed over while the step that computes the next of it runs."""
    do = (request.Do.DEQUEUE, request.Do.BEQUEATH, request.Do.REPORT_SPANS)
    moved = request.MoveRequested
    return row(request.TABLE, request.S.DECODING, moved, request.S.FINISHED, do, request.keep_move)


@mutant
def what_moves_is_called_off() -> Planted:
    """The gateway takes tokens of the attempt that moves for those of one that is over."""
    reads = lambda machine, attempt: attempt == machine.attempt  # noqa: E731
    return patched(generation.Generation, "reads", reads)


@mutant
def who_switches_keeps_its_work() -> Planted:
    """Before it has other roles, what is open at the bound waits for its end."""
    move = Drains.move

    def unless_it_returns(drains: Drains) -> None:
        if not any(one.next_roles for one in drains._registry.instances):
            move(drains)

    return patched(Drains, "move", unless_it_returns)


@mutant
def other_roles_are_forgotten() -> Planted:
    """The next life of the process has the roles of the last one."""

    async def forget(held: holding.Holding) -> None:
        held.asked = ()

    return patched(holding.Holding, "renew", forget)


@mutant
def a_failed_switch_is_not_taken_back() -> Planted:
    """What could not be loaded is left out, and the former engines are gone."""
    load = holding.Holding._load

    async def once(held: holding.Holding, config: InstanceConfig) -> None:
        if config.kept_roles:
            held.config = config
        else:
            await load(held, config)

    return patched(holding.Holding, "_load", once)


@mutant
def a_failed_switch_has_no_reason() -> Planted:
    """An operator sees the former roles, as if nothing had been asked for."""
    return patched(holding, "MAX_REASON", 0)


@mutant
def who_drains_too_long_keeps_its_work() -> Planted:
    """What is open waits for the end of the instance, and is computed again as after a loss."""
    return patched(Drains, "move")


# --- several gateways -----------------------------------------------------------------------------


@mutant
def each_gateway_takes_its_own_encoder() -> Planted:
    """F37: where nobody else is known to work on an image, each gateway goes by its own books."""

    def chosen(
        image: placement.Image,
        encoders: list[placement.Candidate],
        prefill: placement.Candidate,
        finder: placement.Candidate | None,
        known: placement.Whereabouts,
        pick: placement.PickEncoder | None,
        rule: placement.Rule,
    ) -> placement.Candidate:
        return rule.encoder(image, encoders, prefill)

    return patched(placement, "_encoder_for", chosen)


@mutant
def all_gateways_have_one_clock() -> Planted:
    """Deadlines are read in the time of whichever gateway spoke last."""

    def until(self: Actor, deadline_s: float, gateway: str) -> float:
        return deadline_s - self.cluster_s()

    return patched(Actor, "until", until)


@mutant
def what_a_dead_gateway_asked_for_goes_on() -> Planted:
    """An instance works for a gateway that is gone until the deadline of each request."""
    return patched(Member, "_forsake", lambda self, place: place.forsake())


@mutant
def a_loss_stays_with_its_registry() -> Planted:
    """F44: a life that one gateway has declared lost goes on at the other one, and is fenced."""
    return patched(GatewayPlace, "lists", lambda self, life: False)
