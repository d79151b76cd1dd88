"""What is held stays within the configuration, at every step by which it rises.

`BOUNDS` names the settings that bound something which a simulated process holds, and when to look:
at the transition or the call of an engine by which it grows.  `IDLE` are amounts that a role brings
down before its turn is over, looked at while nothing happens.  `durations` bounds states in time.
Every other number of the configuration is in `unseen`, with the reason; a test compares all of them
with the classes of `epd.config`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from epd.fsm import encoding, generation, incoming, request
from epd.fsm.kernel import Event, Machine, State
from epd.roles.prefill.held_prompts import MAX_SHARE
from epd.scheduling.slots import CACHE_ROWS, sized
from epd_lab.sim.checkers.base import Checker, Context
from epd_lab.sim.checkers.memory.ahead import Ahead
from epd_lab.sim.checkers.memory.quotas import over_quota
from epd_lab.sim.cluster import Settings
from epd_lab.sim.core.process import SimProcess
from epd_lab.sim.engine import golden
from epd_lab.sim.engine.golden import ROW_NBYTES
from epd_lab.sim.lives import Node
from epd_lab.sim.signs import is_longer_for_a_picture

Held = tuple[float, float]  # how much there is, and the most that may be
Grows = Callable[[Node, Settings, Any], Held]
Works = Callable[[Any, Settings], Held]
Rests = Callable[[Node, Settings], Held]

TIER = "encode.cache_device_nbytes"
PIXELS = "encode.pixels_nbytes"
ASKED = (request.TextOnly, request.EmbeddingsRequired)


# --- by transitions -------------------------------------------------------------------------------


def _generations(node: Node, settings: Settings, machine: Any) -> Held:
    assert node.gateway is not None
    return len(node.gateway.role._open), settings.limits.max_open_requests


def _images(node: Node, settings: Settings, machine: Any) -> Held:
    assert node.instance is not None
    assert node.instance.encode is not None
    return len(node.instance.encode._askers), settings.encode.max_queue


def _requests(node: Node) -> int:
    assert node.instance is not None
    assert node.instance.requests is not None
    table = node.instance.requests._requests.values()
    return sum(machine.state is not request.S.HELD for machine in table)


def _prompts(node: Node, settings: Settings, machine: Any) -> Held:
    return _requests(node), settings.prefill.max_queue


def _offers(node: Node, settings: Settings, machine: Any) -> Held:
    return _requests(node), settings.decode.max_queue


def _receive_pool(node: Node, settings: Settings, machine: Any) -> Held:
    assert node.instance is not None
    embeddings = node.instance.embeddings
    if embeddings is None:
        return 0, 0
    nbytes = embeddings.pool.num_leased * embeddings.region.remote.slot_nbytes
    return nbytes, settings.prefill.pool_nbytes


def _attempts(node: Node, settings: Settings, machine: Any) -> Held:
    """That failed for one kind of reason, and the one that begins."""
    return 1 + max(machine.failures.values(), default=0), settings.timing.max_attempts


def _early(node: Node, settings: Settings, machine: Any) -> Held:
    """What lacks until a prompt may begin before its images."""
    lacking = [item.offset for item in machine.message.items if item.room in machine.missing]
    if machine.state is not request.S.WAITING or not lacking:
        return 0, 0
    left = machine._story[-1][1] is request.S.WAITING_FOR_EMBEDDINGS
    return left * (settings.prefill.min_early_tokens - min(lacking)), 0


GROWS: tuple[tuple[str, tuple[type[Event], ...], Grows], ...] = (
    ("limits.max_open_requests", (generation.Admitted,), _generations),
    ("encode.max_queue", (encoding.Requested,), _images),
    ("prefill.max_queue", ASKED, _prompts),
    ("decode.max_queue", (request.KvOffered,), _offers),
    ("prefill.pool_nbytes", (incoming.SlotsLeased,), _receive_pool),
    ("prefill.min_early_tokens", (request.EmbeddingsPromised, request.EmbeddingReady), _early),
    ("timing.max_attempts", (generation.Placed,), _attempts),
)


# --- by calls of an engine ------------------------------------------------------------------------


def _step_tokens(batch: Any, settings: Settings) -> Held:
    return sum(len(sequence.token_ids) for sequence in batch), settings.engine.max_step_tokens


def _chunk_tokens(batch: Any, settings: Settings) -> Held:
    most = settings.engine.max_chunk_tokens
    cut = (s for s in batch if not (settings.max_uncut and is_longer_for_a_picture(most, s)))
    return max((len(s.token_ids) - s.num_drafts for s in cut), default=0), most


def _running(batch: Any, settings: Settings) -> Held:
    return len(batch), settings.decode.max_running


def _drafts(batch: Any, settings: Settings) -> Held:
    most = max(sequence.num_drafts for sequence in batch)
    return most, settings.engine.speculative.num_speculative_tokens


def _patches(batch: Any, settings: Settings) -> Held:
    """One image alone may have more."""
    total = sum(item.num_patches for item in batch)
    return (0 if len(batch) == 1 else total), settings.encode.max_batch_patches


WORKS: tuple[tuple[str, str, Works], ...] = (
    ("engine.max_step_tokens", "step", _step_tokens),
    ("engine.max_chunk_tokens", "step", _chunk_tokens),
    ("decode.max_running", "step", _running),
    ("engine.speculative.num_speculative_tokens", "step", _drafts),
    ("encode.max_batch_patches", "encode", _patches),
)


# --- when a turn is over --------------------------------------------------------------------------


def _device_tier(node: Node, settings: Settings) -> Held:
    return _idle_nbytes(
        node, "device", sized(settings.encode.cache_device_nbytes, CACHE_ROWS, ROW_NBYTES)
    )


def _host_tier(node: Node, settings: Settings) -> Held:
    return _idle_nbytes(node, "host", settings.encode.cache_host_nbytes)


def _idle_nbytes(node: Node, name: str, capacity: int) -> Held:
    """Of rows that nobody reads: what is read may be more, and goes when its readers have left."""
    assert node.instance is not None
    encode = node.instance.encode
    assert encode is not None
    order = getattr(encode.tiers.books, name).order
    if order.used <= capacity:
        return 0, capacity
    machines, sizes = encode.encodings, order._sizes
    read = {key for key in sizes if key in machines and not encode.tiers._is_idle(key)}
    return sum(size for key, size in sizes.items() if key not in read), capacity


def _ring(node: Node, settings: Settings) -> Held:
    assert node.instance is not None
    assert node.instance.encode is not None
    ring = node.instance.encode.producer.ring
    held = ring.pool.num_leased * ring._slot_nbytes if ring is not None else 0
    return held, settings.encode.send_buffer_nbytes


def _pixels(node: Node, settings: Settings) -> Held:
    """Of several images that are at work."""
    assert node.instance is not None
    assert node.instance.encode is not None
    machines = node.instance.encode.encodings.values()
    held = [m.pixels_nbytes for m in machines if encoding.Own.PIXELS in m.state.owns]
    return (sum(held) if len(held) > 1 else 0), settings.encode.pixels_nbytes


def _held_blocks(node: Node, settings: Settings) -> Held:
    assert node.instance is not None
    prefill = node.instance.prefill
    held = prefill.held._held.values() if prefill is not None else ()
    return sum(len(machine.block_table) for machine in held), settings.num_blocks * MAX_SHARE


def _window_blocks(node: Node, settings: Settings) -> Held:
    """What steps see of one request, and those of a beginning found."""
    assert node.instance is not None
    assert node.instance.requests is not None
    if not settings.window:
        return 0, 0
    rows = golden.layout_with(settings.window).rows
    depth = 2 if settings.engine.async_scheduling else 1
    reach = depth * max(settings.engine.max_chunk_tokens, settings.max_uncut)
    found = rows.live(1) + settings.engine.speculative.num_speculative_tokens
    held = (
        rows.num_windowed(len(one.block_table)) - one.num_passed
        for one in node.instance.requests._requests.values()
        if one.has_blocks
    )
    return max(held, default=0), rows.live(reach) + found


IDLE: tuple[tuple[str, str, Rests], ...] = (
    ("blocks of a window", "requests", _window_blocks),
    ("encode.cache_device_nbytes", "encode", _device_tier),
    ("encode.cache_host_nbytes", "encode", _host_tier),
    ("encode.send_buffer_nbytes", "encode", _ring),
    ("held_prompts.MAX_SHARE", "prefill", _held_blocks),
)
QUOTAS = ("prefill.max_slots_share_per_peer", "encode.max_send_share_per_peer")
BOUNDS = (*(name for name, _, _ in (*GROWS, *WORKS, *IDLE)), *QUOTAS, PIXELS)


class Bounds(Checker):
    name = "bounds"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._settings = context.cluster.settings  # as they are meant, whatever roles are told
        self._grows: dict[type[Event], list[tuple[str, Grows]]] = {}
        self._told: Counter[str] = Counter()
        for name, events, held in GROWS:
            for event in events:
                self._grows.setdefault(event, []).append((name, held))
        self._ahead = Ahead(lambda: context.world.loop.now_s)
        context.world.watch(self._watch, *self._grows, incoming.SlotsLeased)
        context.world.watch(self._left, encoding.RoomClosed)
        context.cluster.on_call = self._called
        context.world.loop.on_idle.append(self._look)

    def _watch(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        node = self.context.cluster.nodes[process.name]
        for name, held in self._grows[type(event)]:
            self._compare(process, name, *held(node, self._settings, machine))
        if isinstance(event, incoming.SlotsLeased):
            self._over(process, over_quota(node, self._settings, machine))

    def _left(
        self, process: SimProcess, machine: Machine, event: Any, source: State, target: State
    ) -> None:
        if isinstance(machine, encoding.Encoding):
            node = self.context.cluster.nodes[process.name]
            self._ahead.left(node, machine, event.room)

    def _called(self, process: SimProcess, what: str, batch: Any) -> None:
        for name, call, held in WORKS:
            if call == what:
                self._compare(process, name, *held(batch, self._settings))
        node = self.context.cluster.nodes[process.name]
        if what == "preprocess":
            self._compare(
                process, f"run-ahead in {TIER}", *self._ahead.began(node, batch, self._settings)
            )
            self._compare(process, PIXELS, *_pixels(node, self._settings))
        elif what == "copy_out":
            self._over(process, over_quota(node, self._settings, None))

    def _look(self) -> None:
        for node in self.context.cluster.living():
            instance = node.instance
            if instance is None or node.process.stalled or node.actor.closing:
                continue
            for name, role, held in IDLE:
                if getattr(instance, role) is not None:
                    self._compare(node.process, name, *held(node, self._settings))

    def at_end(self) -> None:
        self._look()

    def _compare(self, process: SimProcess, name: str, held: float, limit: float) -> None:
        if held > limit:
            self._tell(process, name, f"{held:g} are held, and {name} is {limit:g}")

    def _over(self, process: SimProcess, found: Iterator[tuple[str, str]]) -> None:
        for name, text in found:
            self._tell(process, name, text)

    def _tell(self, process: SimProcess, name: str, text: str) -> None:
        """Once per setting and process: what is above a bound mostly stays there."""
        self._told[f"{process.name} {name}"] += 1
        if self._told[f"{process.name} {name}"] == 1:
            self.violate(f"{process.name}: {text}")
