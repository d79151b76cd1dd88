"""Invariant 3: what is published under a hash are the rows encoded for it, and no write lands in
memory that its lease no longer owns.

The consumer's INCOMING machine has the lease of a slot or block: it owns its slots from the grant
to the end of the transfer.  A write that lands must belong to such a machine, and to the very life
of the peer that it was granted to.  A block of the pool that KV lands in is leased, and of no
request (F6).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from epd.engine.base import Rows, SlotRows
from epd.fsm import embedding, incoming
from epd.fsm.kernel import Event, Machine, State
from epd.keys import is_kv
from epd_lab.sim.checkers.base import Checker, Context
from epd_lab.sim.core.process import SimProcess
from epd_lab.sim.planes.near import NEAR, is_near
from epd_lab.sim.planes.transfer import SimWrite
from epd_lab.sim.workload import Ask, mm_hash_of

MOST_FOUND = 3
_MAY_BE_WRITTEN = frozenset(
    {
        incoming.S.RESERVED,
        incoming.S.CANCEL_PENDING,
        incoming.S.EXPIRE_PENDING,
        incoming.S.QUARANTINED,
    }
)


class Integrity(Checker):
    name = "integrity"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._leases: dict[tuple[str, str, int], incoming.Incoming] = {}
        self._rows: dict[str, bytes] = {}
        self.expect(record.ask for record in context.clients.records)
        context.world.watch(self._watch, incoming.SlotsLeased, embedding.Loaded)
        context.world.fabric.on_land = self._landed
        context.cluster.on_found = self._found
        self._num_found: Counter[str] = Counter()  # by process

    def expect(self, asks: Iterable[Ask]) -> None:
        """The images of these requests will come."""
        for ask in asks:
            for _, image in ask.images:
                self._rows[mm_hash_of(image)] = image.rows()

    def _watch(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        if isinstance(event, incoming.SlotsLeased) and isinstance(machine, incoming.Incoming):
            region = self._region(process, machine) if is_kv(machine.key) else "rows"
            for slot in machine.slots:
                self._leases[process.name, region, slot] = machine
        elif isinstance(event, embedding.Loaded) and isinstance(machine, embedding.Embedding):
            self._published(process, machine)

    def _region(self, process: SimProcess, machine: incoming.Incoming) -> str:
        """Where KV of this room lands."""
        fabric = self.context.world.fabric
        ends = (process.instance_id, machine.peer.instance_id)
        return f"kv-{NEAR}" if all(is_near(fabric, end) for end in ends) else "kv"

    def _published(self, process: SimProcess, machine: embedding.Embedding) -> None:
        expected = self._rows.get(machine.key)
        rows: Any = machine.rows
        if isinstance(rows, SlotRows):  # at several ranks
            each = self.context.cluster.groups.rows_of(process, rows)
        else:
            each = [b"".join([rows.buffer()] if isinstance(rows, Rows) else rows)]
        if expected is not None and any(found != expected for found in each):
            self.violate(
                f"{process.name} published {machine.key[:8]} from room {machine.room} with bytes "
                "that were not encoded for it"
            )

    def _landed(self, write: SimWrite, owner: SimProcess, slots: Sequence[int]) -> None:
        leader_of = self.context.cluster.groups.leader_of
        owner, writes = leader_of(owner), leader_of(write.writer)
        writer = (writes.instance_id, writes.epoch)
        for slot in slots:
            lease = self._leases.get((owner.name, write.target.region_id, slot))
            place = f"slot {slot} of {write.target.region_id} at {owner.name}"
            if lease is None or lease.state not in _MAY_BE_WRITTEN:
                state = "leased to nobody" if lease is None else f"{lease.key} {lease.state.name}"
                self.violate(f"{write.writer.name} wrote {place}, which is {state} (F7)")
            elif (lease.peer.instance_id, lease.peer.epoch) != writer:
                self.violate(
                    f"{write.writer.name} wrote {place}, which is leased for {lease.key} to "
                    f"{lease.peer.instance_id}:{lease.peer.epoch}"
                )
            elif is_kv(lease.key) and (owners := self._owners(owner, write, slot)):
                self.violate(f"{write.writer.name} wrote {place}, which is {owners}'s by now (F6)")

    def _owners(self, process: SimProcess, write: SimWrite, slot: int) -> str:
        """Who has the block of the pool that this slot is of, beside its room."""
        node = self.context.cluster.nodes[process.name]
        if node.language is None or node.instance is None or node.instance.requests is None:
            return ""
        if not (node.language.kv_in_place or write.target.region_id.endswith(NEAR)):
            return ""
        block, requests = slot // node.language.kv_layout.slots_per_block, node.instance.requests
        if not requests.pool.holds((block,)):
            return "nobody"
        owners = (r for r in requests._requests.values() if r.has_blocks and block in r.blocks)
        return ", ".join(request.key for request in owners)

    def _found(self, process: SimProcess, text: str) -> None:
        """By an engine, in its own memory: the first of each are enough to read."""
        self._num_found[process.name] += 1
        if self._num_found[process.name] <= MOST_FOUND:
            self.violate(f"{process.name}: {text}")
