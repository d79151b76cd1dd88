"""The rooms of one instance: what is written and published."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from epd.fsm import incoming, outgoing
from epd.fsm.incoming import Incoming
from epd.messages import (
    Address,
    TransportOffer,
)
from epd.transport.base import WriteFailed, WriteUnknown, Written
from tests.roles.desk import Desk
from tests.roles.rooms import (
    PEER,
    REGION,
    consume,
    grant,
    produce,
    rooms,
)

# --- writing and publishing -----------------------------------------------------------------------


def outcome(at: Desk, work: Any) -> Any:
    """What this coroutine comes to."""
    done: list[Any] = []

    async def run() -> None:
        done.append(await work)

    at.cluster.within(at.name, at.cluster.world.loop.create_task, run())
    at.cluster.pass_time(0.0)
    return done[0]


def writing(at: Desk) -> tuple[Any, Any, Any]:
    owner = produce(at)
    transfer = at.role.find("r")
    transfer.grant = grant(at)
    owner.stage = mock.AsyncMock(return_value=SimpleNamespace(views=["v"], slots=[0]))
    return owner, transfer, at.actor.ports.transfers


ENDS = [
    (Written(4, 17), outgoing.WriteSucceeded(17)),
    (WriteFailed("no route"), outgoing.WriteRefused("no route")),
    (WriteUnknown("cut"), outgoing.WriteOutcomeUnknown("cut")),
]


@pytest.mark.parametrize(("end", "event"), ENDS)
def test_what_a_write_comes_to(end: Any, event: Any) -> None:
    with rooms() as at:
        _, transfer, plane = writing(at)
        with mock.patch.object(plane, "write", mock.AsyncMock(return_value=end)) as write:
            assert outcome(at, at.role.start_write(transfer, None)) == event
        write.assert_awaited_once_with(["v"], REGION, [0])


def test_a_write_that_raises_may_have_written_and_one_that_never_began_has_not() -> None:
    with rooms() as at:
        owner, transfer, plane = writing(at)
        with mock.patch.object(plane, "write", mock.AsyncMock(side_effect=OSError("x"))):
            event = outcome(at, at.role.start_write(transfer, None))
            assert event == outgoing.WriteOutcomeUnknown("OSError('x')")
            assert at.actor.counters["faults"] == 1
            owner.stage.side_effect = OSError("y")
            event = outcome(at, at.role.start_write(transfer, None))
            assert event == outgoing.WriteRefused("OSError('y')")
            assert at.actor.counters["faults"] == 2
            owner.stage = mock.AsyncMock(return_value=None)
            assert isinstance(
                outcome(at, at.role.start_write(transfer, None)), outgoing.WriteRefused
            )
            assert at.actor.counters["faults"] == 2


def test_an_owner_that_cannot_publish_has_failed() -> None:
    with rooms("incoming") as at:
        owner, transfer = consume(at)
        owner.publish = mock.AsyncMock(return_value=incoming.Published())
        assert outcome(at, at.role.publish(transfer, None)) == incoming.Published()
        owner.publish.side_effect = OSError("x")
        event = outcome(at, at.role.publish(transfer, None))
        assert event == incoming.PublishFailed("OSError('x')") and at.actor.counters["faults"] == 1


def test_what_landed_is_what_was_written_part_by_part() -> None:
    with rooms("incoming") as at:
        _, transfer = consume(at)
        region = mock.Mock(remote=SimpleNamespace(slot_nbytes=10))
        region.views = lambda slots, nbytes: (tuple(slots), nbytes)
        sums = {((3, 4), 15): 111, ((5,), 10): 222, ((6,), 1): 333}

        async def checksum(views: Any) -> int:
            return sums[views]

        def checked(*parts: tuple[int, int], nbytes: int = 26) -> Any:
            transfer.parts, transfer.nbytes = parts, nbytes
            return outcome(at, at.role.check_region(transfer, region, (3, 4, 5, 6)))

        with mock.patch.object(at.actor.ports.transfers, "checksum", checksum):
            right = (15, 111), (10, 222), (1, 333)
            assert checked(*right) == incoming.Published()
            assert checked(right[0], (10, 0), right[2]) == incoming.Published(), (
                "it computed no sum"
            )
            wrong = checked(*right[:2], (1, 9))
            assert isinstance(wrong, incoming.PublishFailed) and "0x9" in wrong.reason
            short = checked(*right, nbytes=27)
            assert short == incoming.PublishFailed("26 of 27 bytes were written")


@pytest.mark.parametrize(("peer", "name"), [("d0", "sim"), ("p0", "local")])
def test_a_hop_is_noted_once_with_its_transport(peer: str, name: str) -> None:
    with rooms() as at:
        owner = produce(at, peer=Address(peer, 1, ""))
        transfer = at.role.find("r")
        transfer.grant = grant(at)
        with mock.patch.object(at.actor.times, "note_hop") as note:
            at.do(at.role.conclude_delivered, transfer, None)
        note.assert_called_once_with(transfer, name)
        owner.concluded.assert_called_once_with(transfer, None)


def test_how_a_peer_reaches_own_memory() -> None:
    with rooms("incoming") as at:
        plane = at.actor.ports.transfers
        with mock.patch.object(plane, "descriptor") as descriptor:
            known = Incoming("r", 1, PEER, "o", 1, 9.0, "gateway", at.actor.journal)
            at.role.descriptor("region", known)
        offered = plane.offers[0].name
        descriptor.assert_called_once_with("region", offered)
        best, other = (
            TransportOffer(name="shm", domain="here"),
            TransportOffer(name="tcp", domain=""),
        )
        its: Any = SimpleNamespace(transports=(other, best))
        with (
            mock.patch.object(plane, "descriptor") as descriptor,
            mock.patch.object(type(plane), "offers", (best, other)),
            mock.patch.object(at.actor, "peer_info", return_value=its),
        ):
            fresh = Incoming("s", 1, PEER, "o", 1, 9.0, "gateway", at.actor.journal)
            at.role.descriptor("region", fresh)
            assert at.role.landing("region", fresh) == "region"
            at.role.descriptor("region", known)
        assert descriptor.call_args_list == [
            mock.call("region", "shm"),
            mock.call("region", offered),
        ]


def test_what_is_ready_is_its_owners_to_hold() -> None:
    with rooms() as at:
        owner = produce(at)
        transfer = at.role.find("r")
        at.do(at.role.hold_part, transfer, None)
        owner.hold_part.assert_called_once_with(transfer)
