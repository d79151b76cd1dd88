"""Bugs that change no answer: each is noticed by one checker, and by nothing else there is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

from msgspec.structs import replace as replace_struct

from epd.config import Timing
from epd.failure import Failure, FailureKind
from epd.frontend import Generation as Prepared
from epd.frontend import GenerationStream
from epd.fsm import encoding, generation, incoming
from epd.fsm.incoming import Incoming
from epd.fsm.instance import Instance
from epd.fsm.kernel import Event
from epd.fsm.link import EchoReceived, Link
from epd.fsm.request import Request
from epd.messages import Address, TokenLogprobs
from epd.roles.base import Actor
from epd.roles.encode.role import EncodeRole
from epd.roles.encode.row_tiers import RowTiers
from epd.roles.gateway.affinity import Affinity
from epd.roles.gateway.dispatch import Dispatcher
from epd.roles.gateway.losses import Losses
from epd.roles.gateway.registry import Registry
from epd.roles.gateway.role import GatewayRole
from epd.roles.links import Links
from epd.roles.prefill.embeddings import Embeddings
from epd.roles.rooms import Rooms
from epd.roles.steps import step
from epd.roles.steps.requests import Requests
from epd.scheduling.batching import BatchScheduler, Share
from epd.scheduling.placement import Placement, Unplaceable
from epd.scheduling.pool import LeaseQueue
from epd.scheduling.run_ahead import RunAhead
from epd.transport.base import Received
from tests.sim.mutants.planting import Planted, mutant, patched, row, several

# --- wake-ups -------------------------------------------------------------------------------------


@mutant
def who_leaves_the_queue_wakes_nobody() -> Planted:
    """F24, F43: who stood behind a request that left waits until something else happens."""

    def leave(self: Requests, key: str) -> None:
        self._scheduler.remove(key)

    return patched(Requests, "leave_queue", leave)


@mutant
def what_is_not_stranded_any_more_is_kept() -> Planted:
    """F41: slots of an abandoned load that was delivered after all are promised to nobody."""
    concluded, promise = Embeddings.concluded, Embeddings.promise
    pump_budget = Embeddings._pump_budget
    not_looked_at: set[Embeddings] = set()  # until somebody new asks

    def quietly(self: Embeddings, room: Incoming, failure: Failure | None) -> None:
        concluded(self, room, failure)
        not_looked_at.add(self)

    def asked(self: Embeddings, *arguments: Any) -> None:
        not_looked_at.discard(self)
        promise(self, *arguments)

    def unless_quiet(self: Embeddings) -> None:
        if self not in not_looked_at:
            pump_budget(self)

    return several(
        patched(Embeddings, "concluded", quietly),
        patched(Embeddings, "promise", asked),
        patched(Embeddings, "_pump_budget", unless_quiet),
    )


# --- bounds and durations -------------------------------------------------------------------------


@mutant
def no_peer_has_a_quota() -> Planted:
    """F41: one peer may have all slots."""
    return patched(LeaseQueue, "_within_quota", lambda self, lease: True)


@mutant
def an_encoder_runs_ahead_for_ever() -> Planted:
    """F4: whatever is asked of an encoder is begun, and its rows have to be kept."""
    turns = RunAhead.turns

    def begin_all(self: RunAhead[Any]) -> list[Any]:
        with patched(self, "capacity_nbytes", 1 << 40):
            return turns(self)

    return patched(RunAhead, "turns", begin_all)


@mutant
def any_number_of_pixels_is_held() -> Planted:
    """F46: an encoder decodes all images that it is asked for, and its host has no such memory."""
    turns = RunAhead.turns

    def begin_all(self: RunAhead[Any]) -> list[Any]:
        with patched(self, "pixels_capacity_nbytes", 1 << 40):
            return turns(self)

    return patched(RunAhead, "turns", begin_all)


@mutant
def rows_above_the_budget_stay() -> Planted:
    """F31: a copy that is done makes no room in the tier that it has come to."""
    fire = EncodeRole.fire
    copied = (encoding.PromotionSucceeded, encoding.DemotionSucceeded)

    def quietly(self: EncodeRole, machine: encoding.Encoding, event: Event) -> None:
        make_room = self.tiers.make_room if not isinstance(event, copied) else mock.Mock()
        with patched(self.tiers, "make_room", make_room):
            fire(self, machine, event)

    return patched(EncodeRole, "fire", quietly)


@mutant
def a_step_takes_all_who_decode() -> Planted:
    """F27: KV that arrives enters any step, however many sequences that has."""
    plan = BatchScheduler.plan

    def all_at_once(self: BatchScheduler[Request], *apart: Any) -> list[Share[Request]]:
        with patched(self, "_bounds", replace(self._bounds, max_running=1 << 30)):
            return plan(self, *apart)

    return patched(BatchScheduler, "plan", all_at_once)


@mutant
def the_silent_are_lost_late() -> Planted:
    """F15: an instance is declared lost a quarter later than the configuration says."""
    watch_on = Registry.watch_on

    def patiently(self: Registry, instance: Instance, event: Event) -> None:
        timing = self._timing
        later_s = 1.25 * timing.lost_after_s
        with patched(self, "_timing", replace_struct(timing, lost_after_s=later_s)):
            watch_on(self, instance, event)

    return patched(Registry, "watch_on", patiently)


@mutant
def rows_are_stored_when_they_are_gone() -> Planted:
    """F12: the rows are looked at when their storing begins, and the last room has let them go."""

    async def late(self: RowTiers, machine: encoding.Encoding, event: Event) -> None:
        if self.has_storage:
            await self._store(machine, machine.rows)

    return patched(RowTiers, "store_rows", late)


# --- attempts -------------------------------------------------------------------------------------


@mutant
def whoever_used_the_lost_is_tried_again() -> Planted:
    """F20: a stream that decodes elsewhere is given up when the prefill that began it is lost."""

    def fail_all(self: Losses, lost: Address) -> None:
        for machine in self._owner.open_ones():
            if machine.placed is not None and lost in machine.placed.addresses():
                name = lost.instance_id
                failure = Failure(FailureKind.LOST, f"instance {name} was lost")
                self._owner.attempt_failed(machine, {name}, failure)

    return patched(Losses, "_fail_attempts", fail_all)


@mutant
def the_next_attempt_goes_where_it_failed() -> Planted:
    """F19: nobody is avoided, whatever has failed there."""
    choose = Dispatcher.choose

    def anywhere(self: Dispatcher, machine: generation.Generation) -> Placement | Unplaceable:
        machine.avoided.clear()
        return choose(self, machine)

    return patched(Dispatcher, "choose", anywhere)


@mutant
def a_message_of_the_last_attempt_ends_this_one() -> Planted:
    """F38: a failure that was said of an earlier attempt is taken for the present one's."""
    on_failed = GatewayRole.on_failed

    def of_any(self: GatewayRole, received: Received) -> None:
        def current(request_id: str, attempt: int) -> generation.Generation | None:
            return self._open.get(request_id)

        with patched(self, "current", current):
            on_failed(self, received)

    return patched(GatewayRole, "on_failed", of_any)


@mutant
def the_next_attempt_takes_its_time() -> Planted:
    """F20: every attempt waits a second before it is placed again."""

    def later(self: GatewayRole, machine: generation.Generation, event: Event) -> None:
        self._place_later(machine, 1.0)

    return patched(GatewayRole, "place_again", later)


# --- the first token ------------------------------------------------------------------------------


@mutant
def a_grant_waits_for_its_retry() -> Planted:
    """F1: a grant is said for the first time when it would be said again."""
    table, state, to = incoming.TABLE, incoming.S.PENDING, incoming.S.RESERVED
    do = (incoming.Do.ARM_RETRY,)
    return row(table, state, incoming.SlotsLeased, to, do, incoming.keep_slots)


# --- tombstones -----------------------------------------------------------------------------------


@mutant
def what_was_aborted_is_forgotten() -> Planted:
    """F42: a late copy of a request that has ended is taken for a new one."""
    return patched(Requests, "_bury", lambda self, key, *, ended_here=True: None)


@mutant
def rooms_are_forgotten_at_once() -> Planted:
    """F42: the tombstone of a room lasts no longer than its last message."""
    init = Rooms.__init__

    def hurried(self: Rooms[Any, Any], actor: Actor, timing: Timing) -> None:
        init(self, actor, replace_struct(timing, tombstone_s=0.001))

    return patched(Rooms, "__init__", hurried)


@mutant
def an_abort_is_confirmed_once() -> Planted:
    """F42, F43: who asks again whether an attempt is over hears nothing."""
    on_abort = Requests.on_abort

    def once(self: Requests, received: Received) -> None:
        message = received.message
        if not self.has_ended(f"{message.request_id}/{message.attempt}"):
            on_abort(self, received)

    return patched(Requests, "on_abort", once)


# --- what clients see, and what nobody does -------------------------------------------------------


@mutant
def an_answer_stops_before_its_end() -> Planted:
    """Decode says that a word ends the answer, and the last token never comes."""
    finish_reason = step._finish_reason

    def early(request: Request, token: TokenLogprobs, total: int) -> str:
        if total == request.sampling.max_tokens - 1:
            return "stop"
        return finish_reason(request, token, total)

    return patched(step, "_finish_reason", early)


@mutant
def a_new_gateway_begins_late() -> Planted:
    """F35: whoever asks a gateway that has restarted is kept waiting, though all are there."""
    start = GatewayRole.start_generation

    def later(self: GatewayRole, stream: GenerationStream, prepared: Prepared) -> None:
        def begin() -> None:
            start(self, stream, prepared)

        if self.actor.address.epoch > 1:
            self.actor.timers.call_later(4.0, begin)
        else:
            begin()

    return patched(GatewayRole, "start_generation", later)


@mutant
def a_handler_fails_when_its_work_is_done() -> Planted:
    """F14: its message is handled, and an exception is dropped with it each time."""
    on_heartbeat = Registry.on_heartbeat

    def and_fail(self: Registry, received: Received) -> None:
        on_heartbeat(self, received)
        raise LookupError("it is done")

    return patched(Registry, "on_heartbeat", and_fail)


@mutant
def keys_of_what_is_over_go_by_a_clock() -> Planted:
    """F43: what a gateway holds for a request comes back long after its answer."""
    ended = Affinity.ended

    def later(self: Affinity, machine: generation.Generation) -> None:
        kept = self._open.get(machine.key)
        ended(self, machine)

        def forget() -> None:
            self._open.pop(machine.key, None)

        if kept is not None:
            self._open[machine.key] = kept
            self.actor.timers.call_later(12.0, forget)

    return patched(Affinity, "ended", later)


@mutant
def mute_links_are_given_up() -> Planted:
    """F48: what waits goes on elsewhere, and the connection stays as it is."""
    give_up = Links.give_up

    def and_forget(self: Links, machine: Link, event: Event) -> None:
        give_up(self, machine, event)

        def forget() -> None:
            self.fire(machine, EchoReceived())

        self.actor.timers.call_later(0.01, forget)

    return several(patched(Links, "_open_anew"), patched(Links, "give_up", and_forget))
