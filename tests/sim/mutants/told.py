"""Bugs of who is told what put back: copies, refusals, failures, lists; and of forgetting."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from epd.fsm.embedding import Embedding
from epd.fsm.encoding import Encoding
from epd.fsm.kernel import Event
from epd.fsm.request import Request
from epd.messages import Address, CancelTransfer, KvOffer
from epd.roles.decode import role as decode
from epd.roles.decode.role import DecodeRole
from epd.roles.encode.role import EncodeRole
from epd.roles.member import Member
from epd.roles.outgoing import OutgoingRooms
from epd.roles.place import GatewayPlace
from epd.roles.prefill.embeddings import Embeddings
from epd.roles.rooms import AskOfRank, Rooms
from epd.roles.steps.reports import Reports
from epd.roles.steps.requests import Requests
from epd.transport.base import Received
from tests.sim.mutants.planting import Planted, mutant, patched, several


@mutant
def who_drains_refuses_what_it_has() -> Planted:
    """F42: decode asks whether it takes an offer before it looks whether it has taken it."""
    on_offer = DecodeRole.on_kv_offer

    def refusing(self: DecodeRole, received: Received) -> None:
        offer: KvOffer = received.message
        source = Address(received.source, received.epoch, "")
        if (refusal := self._refusal(offer, source)) is not None:
            self.actor.send(
                received.source,
                CancelTransfer(room=offer.room, attempt=offer.attempt, failure=refusal),
            )
        else:
            on_offer(self, received)

    return patched(DecodeRole, "on_kv_offer", refusing)


@mutant
def what_failed_at_prefill_goes_on() -> Planted:
    """F20: an attempt that failed at prefill is taken for one that decode goes on with."""
    ended = Requests.ended

    def goes_on(self: Requests, machine: Request) -> None:
        is_open = self.get(machine.key) is not None
        ended(self, machine)
        if is_open and not machine.decode_here and not machine.finish_reason:
            self._bury(machine.key, ended_here=False)

    return patched(Requests, "ended", goes_on)


@mutant
def what_was_said_counts_twice() -> Planted:
    """F20, F24: of an attempt that goes on, what was said is in its prompt and still to come."""

    def twice(offer: KvOffer) -> int:
        return offer.num_prompt_tokens + int(offer.sampling.max_tokens)

    return patched(decode, "_num_tokens", twice)


@mutant
def a_list_outlives_its_registry() -> Planted:
    """F35: a new gateway's list is compared with the number of the former one's."""
    follow = Member._follow

    def keeping(self: Member, place: GatewayPlace, epoch: int) -> None:
        version = place.version
        follow(self, place, epoch)
        place.version = version

    return patched(Member, "_follow", keeping)


def _the_untold_are_heard() -> AbstractContextManager[object]:
    """As before F77, whose cure stands in front of that of F65."""
    return patched(Member, "_admits", lambda self, received: True)


@mutant
def the_untold_are_fenced() -> Planted:
    """F7, F65: a fence is asked of whom no registry has told: where it runs nobody can say."""
    all_hold = Rooms._all_hold

    async def of_anybody(self: Rooms[Any, Any], room: Any, asked: AskOfRank) -> bool:
        if self.actor.peer_info(room.peer) is not None:
            return await all_hold(self, room, asked)
        return await self._holds(room, asked(room.peer, "", 0))

    return several(_the_untold_are_heard(), patched(Rooms, "_all_hold", of_anybody))


@mutant
def the_untold_are_written_to() -> Planted:
    """F7, F8, F65: what is in doubt there, nobody is asked about, and its source is given away."""
    known = patched(OutgoingRooms, "_is_known", lambda self, room: True)
    return several(_the_untold_are_heard(), known)


@mutant
def an_abort_is_confirmed_when_asked_again() -> Planted:
    """F42, F43: who calls a request off hears nothing until its clock has passed."""
    send, told = Reports.send_aborted, set[int]()

    def second_time(self: Reports, request: Request, event: Event) -> None:
        if id(request) in told:
            send(self, request, event)
        told.add(id(request))

    return patched(Reports, "send_aborted", second_time)


@mutant
def a_failed_encode_alone_says_nothing() -> Planted:
    """F43: who asked for rows alone is forgotten first, and then never told of a failure."""
    fail = EncodeRole.fail_rooms

    def forgotten(self: EncodeRole, encoding: Encoding, event: Event) -> None:
        with patched(self._askers, "keeper", lambda room: None):
            fail(self, encoding, event)

    return patched(EncodeRole, "fail_rooms", forgotten)


@mutant
def what_rests_counts_as_busy() -> Planted:
    """F3: prefill's book of images at work keeps those that rest, and those that are gone."""
    fired = Embeddings.fired

    def keeping(self: Embeddings, machine: Embedding, event: Event) -> None:
        fired(self, machine, event)
        self._busy[machine.key] = machine

    return patched(Embeddings, "fired", keeping)
