"""The rooms of one instance: whose message and whose loss they heed."""

from __future__ import annotations

from unittest import mock

import pytest

from epd.fsm import incoming
from epd.fsm.outgoing import Manifest, S
from epd.messages import Address, Grant
from tests.roles.desk import desk
from tests.roles.prefill.test_hand_over import offered
from tests.roles.simulated import DEFAULTS, simulated


@pytest.mark.parametrize("happens", ["peer_lost", "peer_silent"])
def test_what_befalls_one_life_of_a_peer_is_not_its_successors(happens: str) -> None:
    """F44: the loss, or the silence, of the first life of d0 ends no room of the second."""
    with simulated("1e1p1d") as cluster:
        rooms = cluster.instance("p0").outgoing
        befalls = getattr(rooms, happens)
        peer, offer = Address("d0", 2, ""), Manifest(None, 1, mock.Mock())
        room = ("room", 1, peer, mock.Mock(), "request", offer, 1e12, "gateway")
        transfer = cluster.within("p0", rooms.open, *room)
        for other in (Address("d0", 1, ""), Address("d1", 2, "")):
            cluster.within("p0", befalls, other)
            assert transfer.state is S.PENDING, other
        cluster.within("p0", befalls, peer)
        assert transfer.state is S.FAILED


def test_who_is_lost_before_a_registry_told_of_it_was_granted_nothing() -> None:
    """F7: where to fence it nobody can tell, so it has to need no fence."""
    with desk("1e1p1d", "d0", "decode") as at:
        rooms = at.cluster.instance("d0").incoming
        num_free = at.whole.requests.pool.num_free
        _, room = offered(at, source="p7")
        at.cluster.pass_time(3 * DEFAULTS.timing.retry_interval_s)
        assert "p7" not in dict(at.said) and room.state is incoming.S.RESERVED
        fence = mock.AsyncMock(return_value=False)
        with mock.patch.object(at.actor.ports.transfers, "fence", fence):
            at.do(rooms.peer_lost, room.peer)
        assert room.state is incoming.S.FAILED and not fence.called
        assert at.whole.requests.pool.num_free == num_free


def test_who_is_told_of_later_is_granted_memory_by_the_transport_of_the_pair() -> None:
    with desk("1e1p1d", "d0", "decode") as at:
        rooms = at.cluster.instance("d0").incoming
        _, room = offered(at, source="p7")
        assert at.said == [] and rooms.transport_of(room) == ""
        at.actor.peers["p7", 1] = next(iter(at.actor.peers.values()))
        at.cluster.pass_time(1.5 * DEFAULTS.timing.retry_interval_s)
        assert [type(said) for to, said in at.said if to == "p7"] == [Grant]
        assert rooms.transport_of(room) == "sim"
