"""Bugs of the scheduler put back: preemption, and waiting in the middle of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

from epd import messages
from epd.engine.base import PENDING, OnLayers, StepSequence
from epd.frontend import Adapter
from epd.fsm import generation, outgoing, request
from epd.fsm.encoding import Encoding
from epd.fsm.incoming import Incoming
from epd.fsm.outgoing import Outgoing
from epd.fsm.request import TABLE as REQUEST
from epd.groups.data import RankKv
from epd.messages import Grant
from epd.roles.decode.landing import Landing
from epd.roles.decode.role import DecodeRole
from epd.roles.outgoing import Staged
from epd.roles.prefill.kv_producer import KvProducer
from epd.roles.steps.record import Record
from epd.roles.steps.step import _spans as spans
from epd.roles.steps.step import sequence_of
from epd.scheduling.batching import BatchScheduler
from epd.scheduling.prefix_keys import PrefixKeys
from epd_lab.sim.engine.engines import SimLanguageEngine
from tests.sim.mutants.planting import Planted, mutant, patched, row, several

R = request.S
LAST = (request.Do.EMIT_TOKENS, request.Do.REPORT_SPANS)


@mutant
def preempted_says_it_again() -> Planted:
    """F24: a preempted request begins its answer anew, without knowing what it has said."""

    def forget(machine: request.Request, event: request.Scheduled) -> None:
        request.keep_blocks(machine, event)
        machine.output.clear()

    return row(REQUEST, R.PREEMPTED, request.Scheduled, R.RUNNING, (), forget)


@mutant
def preempted_keeps_blocks() -> Planted:
    """F24: who gives way forgets its blocks instead of returning them."""
    do = (request.Do.DEQUEUE, request.Do.ENQUEUE)
    return row(REQUEST, R.DECODING, request.Preempted, R.PREEMPTED, do)


@mutant
def preempted_without_its_rows() -> Planted:
    """F24: who decodes gives way although the rows to compute its prompt again are gone."""
    victim = BatchScheduler.victim

    def anybody(self: BatchScheduler[request.Request]) -> request.Request | None:
        running = [*self._prefilling.values(), *self._decoding.values()]
        return victim(self) and max(running, key=lambda entry: entry.rank)

    return patched(BatchScheduler, "victim", anybody)


@mutant
def prompt_runs_over_its_image() -> Planted:
    """F10: a chunk is computed although its image's rows are not here: as if they were zero."""

    def present(machine: request.Request, record: Record, start: int, count: int) -> list[Any]:
        items = [i for i in machine.message.items if i.room in record.rows]
        some = mock.Mock(message=mock.Mock(items=items))
        return list(spans(some, record, start, count))

    return several(
        patched(request.Request, "num_ready", lambda *_: None),
        mock.patch("epd.roles.steps.step._spans", present),
    )


@mutant
def mid_prompt_is_forgotten() -> Planted:
    """F10: who waits in the middle of its prompt is not scheduled again when its rows are here."""
    state, event = R.WAITING_MID_PROMPT, request.EmbeddingReady
    return row(REQUEST, state, event, R.RUNNING, (), request.keep_rows)


@mutant
def leaving_mid_prompt_keeps_blocks() -> Planted:
    """F43: the blocks of who leaves in the middle of its prompt are forgotten."""
    do = (
        request.Do.DEQUEUE,
        request.Do.RELEASE_EMBEDDINGS,
        request.Do.WITHDRAW_OFFER,
        request.Do.SEND_ABORTED,
    )
    return row(REQUEST, R.WAITING_MID_PROMPT, request.AbortReceived, R.FINISHED, do)


@mutant
def prefix_ignores_images() -> Planted:
    """A block's key says nothing of images: two of one size are taken for one."""
    init = PrefixKeys.__init__

    def blind(self: PrefixKeys, size: int, items: Any, scope: str) -> None:
        init(self, size, (), scope)

    return patched(PrefixKeys, "__init__", blind)


@mutant
def keys_say_nothing_of_who_asks() -> Planted:
    """F53: one tenant finds the KV of another's prompt."""
    init = PrefixKeys.__init__

    def for_all(self: PrefixKeys, size: int, items: Any, scope: str, adapter: str = "") -> None:
        init(self, size, items, "", adapter)

    return patched(PrefixKeys, "__init__", for_all)


@mutant
def decode_is_not_told_who_asks() -> Planted:
    """F53: prefill keeps tenants apart, and the KV that decode holds tells who came before."""
    offer = messages.KvOffer

    def nameless(**fields: Any) -> messages.KvOffer:
        return offer(**fields | {"scope": ""})

    return mock.patch("epd.roles.prefill.kv_producer.KvOffer", nameless)


@mutant
def keys_say_nothing_of_the_adapter() -> Planted:
    """F53: KV that one adapter has made answers for another, and for the model itself."""
    init = PrefixKeys.__init__

    def plain(self: PrefixKeys, size: int, items: Any, scope: str, adapter: str = "") -> None:
        init(self, size, items, scope)

    return patched(PrefixKeys, "__init__", plain)


@mutant
def an_image_without_its_adapter() -> Planted:
    """F53: the gateway sends an image without the adapter that its rows depend on."""
    return patched(Adapter, "of_rows", "")


@mutant
def a_tower_without_its_adapter() -> Planted:
    """F53: the tower computes rows of an adapter as if there were none."""
    init = Encoding.__init__

    def plain(self: Encoding, *what: Any, adapter: str = "", **more: Any) -> None:
        init(self, *what, **more)

    return patched(Encoding, "__init__", plain)


@mutant
def decode_is_not_told_the_adapter() -> Planted:
    """What prefill begins with an adapter goes on without it."""
    offer = messages.KvOffer

    def plain(**fields: Any) -> messages.KvOffer:
        return offer(**fields | {"adapter": ""})

    return mock.patch("epd.roles.prefill.kv_producer.KvOffer", plain)


@mutant
def prefix_ignores_what_is_before() -> Planted:
    """A block's key says nothing of the blocks before it."""
    key = PrefixKeys._key

    def alone(self: PrefixKeys, start: int, token_ids: Sequence[int]) -> bytes:
        fresh = PrefixKeys(self._block_size, self._items, self._scope)
        return key(fresh, start, token_ids)

    return patched(PrefixKeys, "_key", alone)


@mutant
def first_blocks_are_sent() -> Planted:
    """F28: decode holds the beginning of a prompt and is sent it again, in place of its end."""

    stage = KvProducer.stage

    async def first_ones(self: KvProducer, machine: Outgoing, grant: Grant) -> Staged | None:
        staged = await stage(self, machine, grant)
        request = self._requests.get(machine.owner)
        if staged is None or request is None:
            return staged
        size = self._requests.engine.kv_layout.slots_per_block
        first = [block * size + n for block in request.block_table for n in range(size)]
        first = first[: len(staged.slots)]
        return Staged(await self._requests.engine.fetch_kv(first, in_place=False), staged.slots)

    return patched(KvProducer, "stage", first_ones)


@mutant
def commit_before_the_last_layer() -> Planted:
    """F28: with a part landed, the commit says that all has."""

    def claim(machine: Outgoing, event: outgoing.WriteSucceeded) -> None:
        machine.part_nbytes = machine.sent_nbytes - machine.written_nbytes
        outgoing.keep_written(machine, event)

    state, to = outgoing.S.WRITING, outgoing.S.WRITTEN
    do = (outgoing.Do.SEND_COMMIT, outgoing.Do.ARM_RETRY)
    return row(outgoing.TABLE, state, outgoing.WriteSucceeded, to, do, claim)


@mutant
def layers_are_final_too_early() -> Planted:
    """F2: a layer is said to be computed when the one before it is."""
    halfway = SimLanguageEngine._halfway

    def boast(self: SimLanguageEngine, batch: Any, before: Any, on_layers: OnLayers) -> None:
        halfway(self, batch, before, lambda num_layers: on_layers(num_layers + 1))

    return patched(SimLanguageEngine, "_halfway", boast)


@mutant
def parts_are_not_held() -> Planted:
    """F6: a write reads blocks that its request may give up under it."""

    def nothing(self: KvProducer, machine: Outgoing) -> None:
        """As if the request's own lease were enough."""

    return patched(KvProducer, "hold_part", nothing)


@mutant
def preempted_is_silent() -> Planted:
    """F20: the gateway takes a stream that waits for blocks again for a lost one."""
    return row(generation.TABLE, generation.S.STREAMING, generation.Accepted, None)


@mutant
def last_token_frees_blocks() -> Planted:
    """F6: a last token gives the blocks back while the step ahead still writes into them."""
    do = (request.Do.DEQUEUE, request.Do.RELEASE_BLOCKS, *LAST)
    event, keep = request.LastTokenSampled, request.keep_last_token
    return row(REQUEST, R.DECODING, event, R.FINISHED, do, keep)


@mutant
def who_has_ended_stays_in_the_batch() -> Planted:
    """Who waits for the step ahead is put into the next one, and so on."""
    event, keep = request.LastTokenSampled, request.keep_last_token
    return row(REQUEST, R.DECODING, event, R.FINISHING, LAST, keep)


@mutant
def a_stale_token() -> Planted:
    """The step ahead takes the last token that the host knows, not the one that is on its way."""

    def stale(machine: request.Request, *args: Any) -> StepSequence:
        sequence = sequence_of(machine, *args)
        if tuple(sequence.token_ids) == (PENDING,):
            sequence.token_ids = machine.tokens(machine.num_tokens - 1, machine.num_tokens)
        return sequence

    return mock.patch("epd.roles.steps.requests.sequence_of", stale)


@mutant
def gives_way_under_a_step() -> Planted:
    """F6: who gives way returns its blocks although a step is writing into them."""
    do = (request.Do.DEQUEUE, request.Do.RELEASE_BLOCKS, request.Do.ENQUEUE)
    return row(REQUEST, R.DECODING, request.Preempted, R.PREEMPTED, do)


@mutant
def who_waits_to_land_is_not_woken() -> Planted:
    """F24: memory to land in is free again, and who is first in its queue does not hear of it."""
    take = DecodeRole._take

    def silently(self: DecodeRole, transfer: Incoming) -> tuple[int, ...]:
        with patched(self, "_let_land"):
            return take(self, transfer)

    return patched(DecodeRole, "_take", silently)


@mutant
def who_was_called_off_waits_to_land() -> Planted:
    """F43: a room that is over keeps its place in the queue for memory to land in."""
    return patched(Landing, "leave")


@mutant
def a_near_pool_is_taken_for_landing_blocks() -> Planted:
    """F7: a device near by writes to the pool, by the numbers of blocks in front of it."""
    return patched(RankKv, "is_pool", lambda self, transport: self._engine.kv_in_place)
