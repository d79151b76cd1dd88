"""The rooms of one instance: whose message and whose loss they heed."""

from __future__ import annotations

from unittest import mock

import pytest

from epd.fsm import incoming
from epd.fsm.outgoing import Manifest, S
from epd.messages import Address
from epd_lab.sim.hash_states import layout_of
from tests.roles.desk import desk
from tests.roles.simulated import simulated
from tests.roles.test_hand_over import offered


@pytest.mark.parametrize("happens", ["peer_lost", "peer_silent"])
def test_what_befalls_one_life_of_a_peer_is_not_its_successors(happens: str) -> None:
    """F44: the loss, or the silence, of the first life of d0 ends no room of the second."""
    with simulated("1e1p1d") as cluster:
        rooms = cluster.instance("p0").outgoing
        befalls = getattr(rooms, happens)
        peer, offer = Address("d0", 2, ""), Manifest(None, 1, mock.Mock())
        room = ("room", 1, peer, mock.Mock(), "request", offer, 1e9)
        transfer = cluster.within("p0", rooms.open, *room)
        for other in (Address("d0", 1, ""), Address("d1", 2, "")):
            cluster.within("p0", befalls, other)
            assert transfer.state is S.PENDING, other
        cluster.within("p0", befalls, peer)
        assert transfer.state is S.FAILED


def test_each_rank_of_a_lost_group_is_fenced_that_no_registry_has_told_of() -> None:
    """F7: by its offer they are three, and each of them may write."""
    with desk("1e1p1d", "d0", "decode") as at:
        _, room = offered(at, layout=layout_of(0, 3, has_state=False), source="p7")
        assert at.actor.peer_info(room.peer) is None
        fence = mock.AsyncMock(return_value=True)
        with mock.patch.object(at.actor.ports.transfers, "fence", fence):
            at.do(at.cluster.instance("d0").incoming.peer_lost, room.peer)
        named = [asked.args[0].instance_id for asked in fence.await_args_list]
        assert named == ["p7", "p7.1", "p7.2"] and room.state is incoming.S.FAILED
