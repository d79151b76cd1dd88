"""Bugs of giving up, put back: messages that are not said again, memory freed on a hope."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

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
from epd_lab.sim.transfer import SimTransferEngine
from tests.sim.planting import mutant, row, several


@mutant
def only_the_first_part_is_summed() -> Iterator[None]:
    """F54: what landed behind the first part of a room is taken for what was sent."""
    check = IncomingRooms.check_bytes

    async def first(self: IncomingRooms, room: Any, *how: Any) -> Event:
        head, *rest = room.parts
        with mock.patch.object(room, "parts", [head, *((n, 0) for n, _ in rest)]):
            return await check(self, room, *how)

    with mock.patch.object(IncomingRooms, "check_bytes", first):
        yield


@mutant
def open_rooms_are_not_told() -> Iterator[None]:
    """F16: an encoder that missed the end of a room does not ask, and holds it to the deadline."""
    with mock.patch.object(Askers, "_tell", lambda self: None):
        yield


@mutant
def attempts_are_not_called_off() -> Iterator[None]:
    """F41: only prefill, which may be out of reach, tells encoders that an attempt is over."""
    withdraw = Dispatcher.withdraw

    def silently(self: Dispatcher, machine: generation.Generation) -> None:
        self.offers.answered(machine)
        withdraw(self, machine)

    with open_rooms_are_not_told(), mock.patch.object(Dispatcher, "withdraw", silently):
        yield


@mutant
def only_the_messenger_is_avoided() -> Iterator[None]:
    """F14: prefill tells of its encoder's failure, and all attempts go to that encoder again."""
    fail = GatewayRole.attempt_failed

    def messenger(
        self: GatewayRole, machine: generation.Generation, blamed: Any, *rest: Any
    ) -> None:
        fail(self, machine, {machine.placement.prefill.instance_id} & set(blamed), *rest)

    with mock.patch.object(GatewayRole, "attempt_failed", messenger):
        yield


@mutant
def rooms_wait_for_ever() -> Iterator[None]:
    """F48: an encoder that answers and does nothing keeps its rooms as long as clients wait."""
    with mock.patch.object(IncomingRooms, "bound_wait", lambda self, room, timeout_s: None):
        yield


@mutant
def a_lost_device_goes_on() -> Iterator[None]:
    """F49: an instance whose device fails everything at once stays, idle and attractive."""
    with mock.patch.object(Actor, "fault", _count_only):
        yield


def _count_only(self: Actor, where: str, error: Exception) -> None:
    self.counters["faults"] += 1
    self.log.warning("faults", where=where, error=repr(error))


@mutant
def no_pause_between_attempts() -> Iterator[None]:
    """F20: all attempts are spent within milliseconds on an instance that is about to leave."""

    def at_once(self: GatewayRole, machine: generation.Generation, event: Event) -> None:
        self._place(machine)

    with mock.patch.object(GatewayRole, "place_again", at_once):
        yield


@mutant
def the_living_are_fenced() -> Iterator[None]:
    """F7: who was slow once, but never lost, is barred for good."""
    with mock.patch.object(Actor, "is_listed", lambda self, address: False):
        yield


@mutant
def a_new_registry_is_whole_at_once() -> Iterator[None]:
    """F35: whom a restarted gateway has not heard yet is fenced, and so barred for good."""
    hear = Member.on_membership

    def forget_first(self: Member, received: Received) -> None:
        hear(self, received)
        self.forget_absent(self.membership, AbsenceSettled())

    handlers = {**Member.handlers, Membership: "on_membership"}
    with (
        mock.patch.object(Member, "on_membership", forget_first),
        mock.patch.object(Member, "handlers", handlers),
    ):
        yield


@mutant
def doubt_frees_the_source() -> Iterator[None]:
    """F8: the engine still reads the source of a write that it has given up."""
    do = (outgoing.Do.RELEASE_SOURCE, outgoing.Do.SEND_DOUBT, outgoing.Do.CONCLUDE_FAILED)
    state, to, note = outgoing.S.WRITING, outgoing.S.FAILED, outgoing.keep_refusal
    with row(outgoing.TABLE, state, outgoing.WriteOutcomeUnknown, to, do, note):
        yield


@mutant
def doubt_frees_the_slots() -> Iterator[None]:
    """F8: what lands late lands in the slots of somebody else."""
    do = (incoming.Do.RELEASE_SLOTS, incoming.Do.CONCLUDE_FAILED)
    state, to = incoming.S.RESERVED, incoming.S.FAILED
    with row(incoming.TABLE, state, incoming.DoubtReceived, to, do, keep_failure):
        yield


@mutant
def doubt_waits_for_a_death() -> Iterator[None]:
    """F8: nobody asks whether a write in doubt has ended, so its memory is owned for ever."""

    async def settle(self: SimTransferEngine, peer: Any) -> bool:
        return False

    with mock.patch.object(SimTransferEngine, "settle", settle):
        yield


@mutant
def nobody_asks_for_last_messages() -> Iterator[None]:
    """F20: a lost last message is missed only by the clock of the last resort."""

    def wait(self: GatewayTimers, machine: generation.Generation, left_s: float) -> None:
        self._listen(machine, left_s)

    with mock.patch.object(GatewayTimers, "_inquire", wait):
        yield


@mutant
def who_waits_is_silent_when_inquired_after() -> Iterator[None]:
    """F16, F20: signs of life that are lost are missed by the clock of the last resort alone."""
    inquired = Requests.on_inquiry

    def silent(self: Requests, received: Received) -> None:
        with mock.patch.object(self, "_tell_alive"):
            inquired(self, received)

    with mock.patch.object(Requests, "on_inquiry", silent):
        yield


@mutant
def prefill_says_the_first_token() -> Iterator[None]:
    """F20: so the gateway believes that decode has the request, and does not miss prefill."""
    tell_alive = Requests._tell_alive

    def tell(self: Requests, key: str) -> None:
        request = self._requests[key]
        if not request.ended_for_client and self.record(request).num_sent < len(request.output):
            self._tell_tokens(request)
        tell_alive(self, key)

    with mock.patch.object(Requests, "_tell_alive", tell):
        yield


# --- slips planted by hand ------------------------------------------------------------------------


@mutant
def each_attempt_has_its_own_deadline() -> Iterator[None]:
    """The time that a request has begins anew with each of its attempts."""

    def anew(self: Dispatcher, when_s: float) -> float:
        return self._actor.clock.wall_s() + self._timing.request_timeout_s

    with mock.patch.object(Dispatcher, "_at", anew):
        yield


@mutant
def the_end_of_its_time_is_an_error() -> Iterator[None]:
    """An answer that was paid for is taken back when the time for the whole is over."""
    state, event, do = generation.S.STREAMING, generation.DeadlinePassed, generation.Do
    fail = (do.ABORT_ATTEMPT, do.ANSWER_ERROR, do.CLOSE)
    failed, note = generation.S.FAILED, generation.note_deadline
    with row(generation.TABLE, state, event, failed, fail, note):
        yield


@mutant
def patience_has_no_end() -> Iterator[None]:
    """F15: nothing bounds the wait for a token while instances say that they are there."""

    def nothing(self: GatewayTimers, machine: generation.Generation, event: Event) -> None:
        self._arm(machine, generation.TokenTimedOut, machine.limits.total_s, lambda: None)

    with mock.patch.object(GatewayTimers, "arm_patience", nothing):
        yield


@mutant
def patience_is_not_renewed() -> Iterator[None]:
    """The clock of the first token goes on while tokens come."""
    state, event, do = generation.S.STREAMING, generation.TokensArrived, generation.Do
    effects, keep = (do.DELIVER, do.ARM_ATTEMPT), generation.append_tokens
    with several(
        row(generation.TABLE, state, event, state, effects, keep),
        row(generation.TABLE, generation.S.PLACED, event, state, effects, keep),
    ):
        yield


@mutant
def run_ahead_is_never_given_back() -> Iterator[None]:
    """F4: an encoder counts rows that are gone, and in the end begins only what was granted."""
    leave = RunAhead.leave

    def keep(self: RunAhead[Any], key: Any) -> None:
        used = self.used
        leave(self, key)
        self.used = used

    with mock.patch.object(RunAhead, "leave", keep):
        yield


@mutant
def both_lives_are_members() -> Iterator[None]:
    """F44: a new life of an instance joins, and the earlier one is not told to be over."""
    on_join = Registry.on_join

    def not_replaced(self: Registry, received: Received) -> None:
        known = self._instances.get(received.source)
        if known is not None and known.info.address.epoch < received.epoch:
            del self._instances[received.source]
        on_join(self, received)

    with mock.patch.object(Registry, "on_join", not_replaced):
        yield


@mutant
def refusals_are_not_told() -> Iterator[None]:
    """F24: decode refuses what it can never hold, and does not say why."""
    on_offer = DecodeRole.on_kv_offer

    def silently(self: DecodeRole, received: Received) -> None:
        send = Actor.send

        def but_no_reason(actor: Actor, to: Any, message: Any, payloads: Any = ()) -> bool:
            if isinstance(message, CancelTransfer):
                message = CancelTransfer(room=message.room, attempt=message.attempt)
            return send(actor, to, message, payloads)

        with mock.patch.object(Actor, "send", but_no_reason):
            on_offer(self, received)

    with mock.patch.object(DecodeRole, "on_kv_offer", silently):
        yield


@mutant
def who_is_away_is_counted() -> Iterator[None]:
    """F61: an instance that drains uses up the attempts of whoever waits for it."""
    with mock.patch.object(FailureKind, "is_counted", True):
        yield
