"""Bugs of giving up, put back: messages that are not said again, memory freed on a hope."""

from __future__ import annotations

from typing import Any

from epd.failure import FailureKind
from epd.fsm import generation, incoming, outgoing
from epd.fsm.kernel import Event
from epd.fsm.membership import AbsenceSettled
from epd.fsm.room import keep_failure
from epd.messages import CancelTransfer, Membership
from epd.roles.base import Actor
from epd.roles.decode.role import DecodeRole
from epd.roles.encode.askers import Askers
from epd.roles.gateway.clocks import GatewayTimers
from epd.roles.gateway.dispatch import Dispatcher
from epd.roles.gateway.registry import Registry
from epd.roles.gateway.role import GatewayRole
from epd.roles.incoming import IncomingRooms
from epd.roles.member import Member
from epd.roles.steps.requests import Requests
from epd.scheduling.run_ahead import RunAhead
from epd.transport.base import Received
from epd_lab.sim.planes.transfer import SimTransferEngine
from tests.sim.mutants.planting import Planted, mutant, patched, row, several


@mutant
def only_the_first_part_is_summed() -> Planted:
    """F54: what landed behind the first part of a room is taken for what was sent."""
    check = IncomingRooms.check_bytes

    async def first(self: IncomingRooms, room: Any, *how: Any) -> Event:
        head, *rest = room.parts
        with patched(room, "parts", [head, *((n, 0) for n, _ in rest)]):
            return await check(self, room, *how)

    return patched(IncomingRooms, "check_bytes", first)


@mutant
def open_rooms_are_not_told() -> Planted:
    """F16: an encoder that missed the end of a room does not ask, and holds it to the deadline."""
    return patched(Askers, "_tell", lambda self: None)


@mutant
def attempts_are_not_called_off() -> Planted:
    """F41: only prefill, which may be out of reach, tells encoders that an attempt is over."""
    withdraw = Dispatcher.withdraw

    def silently(self: Dispatcher, machine: generation.Generation) -> None:
        self.offers.answered(machine)
        withdraw(self, machine)

    return several(open_rooms_are_not_told(), patched(Dispatcher, "withdraw", silently))


@mutant
def only_the_messenger_is_avoided() -> Planted:
    """F14: prefill tells of its encoder's failure, and all attempts go to that encoder again."""
    fail = GatewayRole.attempt_failed

    def messenger(
        self: GatewayRole, machine: generation.Generation, blamed: Any, *rest: Any
    ) -> None:
        fail(self, machine, {machine.placement.prefill.instance_id} & set(blamed), *rest)

    return patched(GatewayRole, "attempt_failed", messenger)


@mutant
def rooms_wait_for_ever() -> Planted:
    """F48: an encoder that answers and does nothing keeps its rooms as long as clients wait."""
    return patched(IncomingRooms, "bound_wait", lambda self, room, timeout_s: None)


@mutant
def a_lost_device_goes_on() -> Planted:
    """F49: an instance whose device fails everything at once stays, idle and attractive."""
    return patched(Actor, "fault", _count_only)


def _count_only(self: Actor, where: str, error: Exception) -> None:
    self.counters["faults"] += 1
    self.log.warning("faults", where=where, error=repr(error))


@mutant
def no_pause_between_attempts() -> Planted:
    """F20: all attempts are spent within milliseconds on an instance that is about to leave."""

    def at_once(self: GatewayRole, machine: generation.Generation, event: Event) -> None:
        self._place(machine)

    return patched(GatewayRole, "place_again", at_once)


@mutant
def the_living_are_fenced() -> Planted:
    """F7: who was slow once, but never lost, is barred for good."""
    return patched(Actor, "is_listed", lambda self, address: False)


@mutant
def a_new_registry_is_whole_at_once() -> Planted:
    """F35: whom a restarted gateway has not heard yet is fenced, and so barred for good."""
    hear = Member.on_membership

    def forget_first(self: Member, received: Received) -> None:
        hear(self, received)
        self.forget_absent(self.places[0].machine, AbsenceSettled())

    handlers = {**Member.handlers, Membership: "on_membership"}
    return several(
        patched(Member, "on_membership", forget_first), patched(Member, "handlers", handlers)
    )


@mutant
def doubt_frees_the_source() -> Planted:
    """F8: the engine still reads the source of a write that it has given up."""
    do = (outgoing.Do.RELEASE_SOURCE, outgoing.Do.SEND_DOUBT, outgoing.Do.CONCLUDE_FAILED)
    state, to, note = outgoing.S.WRITING, outgoing.S.FAILED, outgoing.keep_refusal
    return row(outgoing.TABLE, state, outgoing.WriteOutcomeUnknown, to, do, note)


@mutant
def doubt_frees_the_slots() -> Planted:
    """F8: what lands late lands in the slots of somebody else."""
    do = (incoming.Do.RELEASE_SLOTS, incoming.Do.CONCLUDE_FAILED)
    state, to = incoming.S.RESERVED, incoming.S.FAILED
    return row(incoming.TABLE, state, incoming.DoubtReceived, to, do, keep_failure)


@mutant
def doubt_waits_for_a_death() -> Planted:
    """F8: nobody asks whether a write in doubt has ended, so its memory is owned for ever."""

    async def settle(self: SimTransferEngine, peer: Any) -> bool:
        return False

    return patched(SimTransferEngine, "settle", settle)


@mutant
def nobody_asks_for_last_messages() -> Planted:
    """F20: a lost last message is missed only by the clock of the last resort."""

    def wait(self: GatewayTimers, machine: generation.Generation, left_s: float) -> None:
        self._listen(machine, left_s)

    return patched(GatewayTimers, "_inquire", wait)


@mutant
def who_waits_is_silent_when_inquired_after() -> Planted:
    """F16, F20: signs of life that are lost are missed by the clock of the last resort alone."""
    inquired = Requests.on_inquiry

    def silent(self: Requests, received: Received) -> None:
        with patched(self, "_tell_alive"):
            inquired(self, received)

    return patched(Requests, "on_inquiry", silent)


@mutant
def who_was_forsaken_gets_no_answer() -> Planted:
    """A gateway that stood still asks after what was given up meanwhile, until its last clock."""
    bury = Requests._bury

    def silently(self: Requests, key: str, *, ended_here: bool = True) -> None:
        request = self._requests.get(key)
        bury(self, key, ended_here=ended_here and (request is None or request.decode_here))

    return patched(Requests, "_bury", silently)


@mutant
def prefill_says_the_first_token() -> Planted:
    """F20: so the gateway believes that decode has the request, and does not miss prefill."""
    tell_alive = Requests._tell_alive

    def tell(self: Requests, key: str) -> None:
        request = self._requests[key]
        if not request.ended_for_client and self.record(request).num_sent < len(request.output):
            self._tell_tokens(request)
        tell_alive(self, key)

    return patched(Requests, "_tell_alive", tell)


# --- slips planted by hand ------------------------------------------------------------------------


@mutant
def each_attempt_has_its_own_deadline() -> Planted:
    """The time that a request has begins anew with each of its attempts."""

    def anew(self: Dispatcher, when_s: float) -> float:
        return self._actor.clock.wall_s() + self._timing.request_timeout_s

    return patched(Dispatcher, "_at", anew)


@mutant
def the_end_of_its_time_is_an_error() -> Planted:
    """An answer that was paid for is taken back when the time for the whole is over."""
    state, event, do = generation.S.STREAMING, generation.DeadlinePassed, generation.Do
    fail = (do.ABORT_ATTEMPT, do.ANSWER_ERROR, do.CLOSE)
    failed, note = generation.S.FAILED, generation.note_deadline
    return row(generation.TABLE, state, event, failed, fail, note)


@mutant
def patience_has_no_end() -> Planted:
    """F15: nothing bounds the wait for a token while instances say that they are there."""

    def nothing(self: GatewayTimers, machine: generation.Generation, event: Event) -> None:
        self._arm(machine, generation.TokenTimedOut, machine.limits.total_s, lambda: None)

    return patched(GatewayTimers, "arm_patience", nothing)


@mutant
def patience_is_not_renewed() -> Planted:
    """The clock of the first token goes on while tokens come."""
    state, event, do = generation.S.STREAMING, generation.TokensArrived, generation.Do
    effects, keep = (do.DELIVER, do.ARM_ATTEMPT), generation.append_tokens
    return several(
        row(generation.TABLE, state, event, state, effects, keep),
        row(generation.TABLE, generation.S.PLACED, event, state, effects, keep),
    )


@mutant
def run_ahead_is_never_given_back() -> Planted:
    """F4: an encoder counts rows that are gone, and in the end begins only what was granted."""
    leave = RunAhead.leave

    def keep(self: RunAhead[Any], key: Any) -> None:
        used = self.used
        leave(self, key)
        self.used = used

    return patched(RunAhead, "leave", keep)


@mutant
def pixels_are_never_given_back() -> Planted:
    """F4: images that were decoded long ago keep all others waiting."""
    return patched(RunAhead, "free_pixels", lambda self, key: None)


@mutant
def both_lives_are_members() -> Planted:
    """F44: a new life of an instance joins, and the earlier one is not told to be over."""
    on_join = Registry.on_join

    def not_replaced(self: Registry, received: Received) -> None:
        known = self._instances.get(received.source)
        if known is not None and known.info.address.epoch < received.epoch:
            del self._instances[received.source]
        on_join(self, received)

    return patched(Registry, "on_join", not_replaced)


@mutant
def refusals_are_not_told() -> Planted:
    """F24: decode refuses what it can never hold, and does not say why."""
    on_offer = DecodeRole.on_kv_offer

    def silently(self: DecodeRole, received: Received) -> None:
        send = Actor.send

        def but_no_reason(actor: Actor, to: Any, message: Any, payloads: Any = ()) -> bool:
            if isinstance(message, CancelTransfer):
                message = CancelTransfer(room=message.room, attempt=message.attempt)
            return send(actor, to, message, payloads)

        with patched(Actor, "send", but_no_reason):
            on_offer(self, received)

    return patched(DecodeRole, "on_kv_offer", silently)


@mutant
def who_is_away_is_counted() -> Planted:
    """F61: an instance that drains uses up the attempts of whoever waits for it."""
    return patched(FailureKind, "is_counted", True)
