"""Who waits in a process for what is there already: every place in the roles where things wait.

Each place is asked from outside, by its own reckoning: free memory, grants, open tasks, timers that
are armed.  None asks the code that should have woken the waiter, which may be what is wrong.
Nothing here is called in service.

`PLACES` names what is made in `epd/roles` for somebody to wait in, by class and attribute; a test
compares it with the code.  `NOT_LOOKED_AT` has the reason why a place is not looked at.  Plain
dictionaries in which things wait (prepared images, KV in front of landing memory, tokens to be
sent, images that nobody has accepted) are looked at as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from epd.fsm import embedding, encoding, generation, offer
from epd.fsm import incoming as receipt
from epd.fsm import outgoing as transfer
from epd.keys import is_kv
from epd.roles.decode.landing import Landing
from epd.roles.encode.role import EncodeRole
from epd.roles.gateway.stream import Stream
from epd.roles.incoming import IncomingRooms
from epd.roles.outgoing import OutgoingRooms
from epd.roles.prefill.embeddings import Embeddings
from epd.roles.steps.requests import Requests
from epd.scheduling.pool import Lease, LeaseQueue
from epd_lab.sim.lives import Node
from epd_lab.sim.wedges import wedged

PLACES = {
    "EncodeRole._ahead": "_begins",
    "SendRing._queue": "_ring",
    "Embeddings._leases": "_slots",
    "Embeddings._budget": "_promises",
    "StepLoop._launch": "_steps",
    "Stream._news": "_streams",
    "Mailbox._news": "_items",
}
NOT_LOOKED_AT = {
    "_Asked.news": "no instance is profiled in simulation",
    "Adapters.load": "ADAPTER's clocks watch it; `adapters` looks for answers that do not come",
    "Adapters.unload": "likewise",
    "Instance._idle": "who drains looks again and again, and wakes itself",
    "._ended": "over when it is made",
    "FanOuts.write": "a write of OUTGOING, whose clocks watch it",
    "Leader.execute": "a step of a group; `groups` looks at those that do not end",
    **dict.fromkeys(
        ("Leader.ready", "Leader.lost", "Leader.closed"),
        "whoever starts and ends a process waits, no role; GROUP's timers end it",
    ),
}


def overlooked(node: Node) -> Iterator[str]:
    """What waits in this process though it could go on; nothing in a process whose turn is over."""
    instance = node.instance
    yield from _items(node)
    if node.gateway is not None:
        yield from _placements(node)
        yield from _streams(node)
    if instance is None:
        return
    if instance.encode is not None:
        yield from _begins(instance.encode, instance.outgoing)
        yield from _batches(instance.encode)
        yield from _ring(instance.encode, instance.outgoing)
        yield from _news(node, instance.encode)
    if instance.embeddings is not None:
        yield from _slots(instance.embeddings, instance.incoming)
        yield from _promises(instance.embeddings)
    if instance.decode is not None:
        yield from _landing(instance.decode._landing, instance.incoming)
    if instance.requests is not None:
        yield from () if wedged(instance) else _steps(instance.requests)
        yield from _blocks(instance.requests)


# --- at the gateway -------------------------------------------------------------------------------


def _placements(node: Node) -> Iterator[str]:
    """An attempt that is to be placed has a clock, and so has an image that nobody accepted."""
    assert node.gateway is not None
    role, timers = node.gateway.role, node.actor.timers
    for key, machine in role._open.items():
        between = (generation.S.MIGRATING, generation.S.AWAITING_TOPOLOGY)
        unplaced = machine.state in between or (
            machine.state is generation.S.QUEUED and key not in role.admission._queue
        )
        if unplaced and not timers.runs(machine, generation.PlacementDue):
            yield f"{key} is to be placed, and nobody will"
    for key, attempt in role._dispatcher.offers._offers.items():
        if attempt.untaken and not timers.runs(attempt, offer.RetryDue):
            yield f"images of {key} are not accepted, and nobody will offer them again"


def _streams(node: Node) -> Iterator[str]:
    assert node.gateway is not None
    for key, machine in node.gateway.role._open.items():
        stream = machine.stream
        assert isinstance(stream, Stream)
        if stream._updates and stream._news._waiter is not None:
            yield f"the client of {key} waits for what is there"


def _items(node: Node) -> Iterator[str]:
    if num_items := len(node.actor.mailbox):
        yield f"{num_items} items are in the inbox, and none is taken"


# --- at encode ------------------------------------------------------------------------------------


def _begins(encode: EncodeRole, outgoing: OutgoingRooms) -> Iterator[str]:
    """Of those that have a place in the queue, and of those whose state owns one."""
    ahead, is_first = encode._ahead, True
    used = sum(ahead._begun.values())
    machines = encode.encodings.values()
    pixels = sum(m.pixels_nbytes for m in machines if encoding.Own.PIXELS in m.state.owns)
    has_pixels = True  # for those who are looked at
    for machine, (nbytes, pixels_nbytes) in ahead._waiting.items():
        key, rooms = machine.key[:8], machine.rooms
        if machine.is_suspect and not encode.actor.hands.may_take(machine.key):
            continue
        fits = is_first and (not used or used + nbytes <= ahead.capacity_nbytes)
        is_first = False
        found = (outgoing.find(room) for room in rooms)
        if fits or any(room is not None and room.grant is not None for room in found):
            has_pixels &= not pixels or pixels + pixels_nbytes <= ahead.pixels_capacity_nbytes
            if has_pixels:
                yield f"{key} may be begun"
        elif not rooms:
            yield f"{key} waits to be begun, and nobody wants it"
    for machine in machines:
        if (machine.state is encoding.S.DEFERRED) != (machine in ahead._waiting):
            yield f"{machine.key[:8]} is {machine.state.name}, and the queue for work differs"


def _batches(encode: EncodeRole) -> Iterator[str]:
    if encode._prepared and not encode._num_batches:
        yield f"{len(encode._prepared)} images are prepared, and no batch is made"


def _ring(encode: EncodeRole, outgoing: OutgoingRooms) -> Iterator[str]:
    """By the slots that machines have, and the states of those that have none."""
    ring, rooms = encode.producer.ring, outgoing._rooms.values()
    for room in rooms:
        waits = ring is not None and room.key in ring._queue._waiting
        if (room.state is transfer.S.AWAITING_SLOTS) != waits:
            yield f"{room.key} is {room.state.name}, and the queue for slots of the ring differs"
    if ring is None or not ring._queue._waiting:
        return
    held: Counter[str] = Counter()
    for room in rooms:
        if not room.terminal:  # else they were returned
            held[room.peer.instance_id] += len(room.slots)
    lease = _next_lease(ring._queue, held)
    if lease is not None and lease.count <= ring.pool.num_free:
        yield f"{lease.key} may have its {lease.count} slots of the ring"


def _news(node: Node, encode: EncodeRole) -> Iterator[str]:
    if encode.events.log.has_news and not node.actor.timers.will_call(encode.events._publish):
        yield "news of the cache are not told"


# --- at prefill -----------------------------------------------------------------------------------


def _slots(embeddings: Embeddings, incoming: IncomingRooms) -> Iterator[str]:
    line = embeddings._leases
    if not line._waiting:
        return
    held: Counter[str] = Counter()
    for room in incoming._rooms.values():
        if room.slots and not (room.terminal or is_kv(room.key)):
            held[room.peer.instance_id] += len(room.slots)
    lease = _next_lease(line, held)
    if lease is None:
        return
    idle = sum(
        len(machine.slots)
        for machine in embeddings._embeddings.values()
        if machine.state is embedding.S.RESIDENT and not machine.waiters
    )
    if lease.count <= embeddings.pool.num_free + idle:
        yield f"{lease.key} may have its {lease.count} slots"


def _next_lease(line: LeaseQueue, held: Mapping[str, int]) -> Lease | None:
    """Whose turn it is: the first whose peer is within its quota."""
    for lease in line._waiting.values():
        held_by_peer = held[lease.peer]
        if not held_by_peer or held_by_peer + lease.count <= line._max_per_peer:
            return lease
    return None


def _promises(embeddings: Embeddings) -> Iterator[str]:
    budget = embeddings._budget
    if not budget._waiting:
        return
    size = budget.size - embeddings._leases.num_stranded
    used = sum(budget._promised.values())
    first = next((key for key, count in budget._waiting.items() if count <= size), None)
    if first is not None and used + budget._waiting[first] <= size:
        yield f"{first} may be promised its slots"


# --- at prefill and decode ------------------------------------------------------------------------


def _landing(landing: Landing, incoming: IncomingRooms) -> Iterator[str]:
    for room in incoming._rooms.values():
        if (room.state is receipt.S.AWAITING_LANDING) != (room.key in landing._queue):
            yield f"{room.key} is {room.state.name}, and the queue for landing differs"
    for key, received in landing._queue.items():
        if len(received) <= landing._pool.num_free:
            yield f"{key} may land"
        return


def _steps(requests: Requests) -> Iterator[str]:
    """Its turns end within one instant, so nobody is awake while nothing happens."""
    loop, scheduler = requests.loop, requests._scheduler
    if loop.is_awake:
        yield "the step loop is awake and has no turn"
    if loop._under_way:
        if loop._under_way[0].result.done():
            yield "a step is over, and nobody looks at it"
        return
    for entry in (*scheduler._prefilling.values(), *scheduler._decoding.values()):
        is_apart = entry.message.is_suspect and not entry.has_yielded
        if is_apart and not (entry.is_due and requests.actor.hands.may_take(entry.request_id)):
            continue
        if scheduler._num_due(entry) > 0:
            yield f"{entry.key} may be computed"
    if chunks := requests._outbox._chunks:
        yield f"tokens for {', '.join(chunks)} are not sent"


def _blocks(requests: Requests) -> Iterator[str]:
    """The first of the queue enters as soon as it may; while a step is under way a prompt waits for
    its end."""
    scheduler, pool = requests._scheduler, requests.pool
    reserving, prompt = scheduler._reservations.head(), scheduler._queue.head()
    if reserving is not None and (prompt is None or reserving.place[0] <= prompt.place[0]):
        first, spare = reserving.entry, 0
        count = scheduler.blocks_for(max(first.num_tokens + 1, first.num_promised))
    elif prompt is not None:
        if requests.loop._under_way or not scheduler._has_place():
            return
        first, spare = prompt.entry, scheduler._watermark
        count = scheduler.blocks_for(max(first.num_tokens, first.num_promised))
    else:
        return
    if count + spare + len(scheduler._lacking()) <= pool.num_free:
        yield f"{first.key} may have its {count} blocks"
