"""The rooms of one instance: whose message and whose loss they heed."""

from __future__ import annotations

from unittest import mock

import pytest

from epd.fsm.outgoing import Manifest, S
from epd.messages import Address
from tests.roles.simulated import simulated


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
