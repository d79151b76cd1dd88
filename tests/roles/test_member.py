"""What an instance does with the registry's word."""

from __future__ import annotations

from unittest import mock

from epd.messages import Address, Membership
from epd.sim.cluster import GATEWAY
from epd.transport.base import Received
from tests.roles.simulated import Simulated, simulated


def told(cluster: Simulated, name: str, lost: tuple[Address, ...] = ()) -> None:
    """The registry says again who is there, and who is lost."""
    member = cluster.instance(name).member
    present = tuple(i.info for i in cluster.gateway.registry.instances if i.present)
    epoch = cluster.gateway.actor.address.epoch
    message = Membership(member._version + 1, present, lost)
    cluster.within(name, member.on_membership, Received(GATEWAY, epoch, message))


def test_who_is_lost_is_told_to_every_role_once() -> None:
    with simulated("1e1p1d") as cluster:
        actor = cluster.instance("e0").actor
        role = mock.Mock()
        actor.roles.append(role)
        gone = Address("p9", 1, "")
        told(cluster, "e0", (gone,))
        told(cluster, "e0", (gone,))
        role.peer_lost.assert_called_once_with(gone)
        assert actor.is_lost(gone)


def test_peers_are_connected_once_and_nobody_to_itself() -> None:
    with simulated("1e1p1d") as cluster:
        actor = cluster.instance("e0").actor
        assert {"p0", "d0"} <= set(actor._connected) and "e0" not in actor._connected
        with mock.patch.object(actor, "connect") as connect:
            told(cluster, "e0")
        connect.assert_not_called()
