"""Slots that one peer may write into, or that are read for it, stay within its quota (F41).

What counts is what machines of rooms own, quarantined or not, and not the books of the queue that
hands slots out.  A single lease may be larger than the quota: it would never be served else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from epd.fsm.incoming import Incoming
from epd.fsm.kernel import Machine
from epd.keys import is_kv
from epd.roles.incoming import IncomingRooms
from epd.roles.outgoing import OutgoingRooms
from epd_lab.sim.cluster import Settings
from epd_lab.sim.lives import Node


@dataclass(slots=True)
class _Peer:
    num_slots: int = 0
    num_leases: int = 0

    def take(self, count: int) -> None:
        self.num_slots += count
        self.num_leases += 1


def over_quota(node: Node, settings: Settings, leased: Machine | None) -> Iterator[tuple[str, str]]:
    """The setting, and who has more than it gives; looked at when slots are leased.

    `leased`: the consumer's end of a room; None: slots of the send ring.
    """
    assert node.instance is not None
    instance = node.instance
    if isinstance(leased, Incoming):
        if is_kv(leased.key) or instance.embeddings is None:
            return
        name, share = "prefill.max_slots_share_per_peer", settings.prefill.max_slots_share_per_peer
        size, held = instance.embeddings.pool.size, _held(instance.incoming)
    else:
        ring = instance.encode.producer.ring if instance.encode is not None else None
        if ring is None:
            return
        name, share = "encode.max_send_share_per_peer", settings.encode.max_send_share_per_peer
        size, held = ring.pool.size, _held(instance.outgoing)
    quota = max(1, int(size * share))
    for peer, has in held.items():
        if has.num_slots > quota and has.num_leases > 1:
            text = f"{peer} has {has.num_slots} of {size} slots, and {name} gives it {quota} (F41)"
            yield name, text


def _held(rooms: IncomingRooms | OutgoingRooms) -> dict[str, _Peer]:
    held: dict[str, _Peer] = {}
    for room in rooms._rooms.values():
        if room.slots and not (room.terminal or is_kv(room.key)):
            held.setdefault(room.peer.instance_id, _Peer()).take(len(room.slots))
    return held
