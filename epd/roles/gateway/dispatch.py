"""Where an attempt runs, and sending it there.

A policy chooses a placement over the registry's view and the gateway's own records, because
heartbeats report late what was just assigned. It avoids instances that failed a generation. Equal
images meet in one encoder while an attempt with one of them is open; afterwards they go to an
encoder that reported their rows. An attempt goes out as one `EncodeRequest` for each image, to its
encoder (OFFER), and the `PrefillRequest`. The bus may lose any of them. The attempt's own time-out
covers the silence of prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from math import inf, prod

from epd.config import Timing
from epd.failure import FailureKind
from epd.frontend import Adapter, JsonObject, PreparedItem, TransferParams
from epd.fsm.generation import Generation, TokenTimedOut
from epd.keys import RoomKey
from epd.messages import Address, EncodeRequest, MediaItem, PrefillRequest, RoomAdded
from epd.observed import StageLoad
from epd.roles.base import Actor
from epd.roles.gateway.affinity import Affinity
from epd.roles.gateway.holds import Holds
from epd.roles.gateway.offers import Image as Offered
from epd.roles.gateway.offers import Offers
from epd.roles.gateway.registry import Registry
from epd.roles.gateway.suspects import Suspects
from epd.scheduling.backlog import Attempt, Books
from epd.scheduling.hedging import pays
from epd.scheduling.placement import (
    Candidate,
    Image,
    MakeRule,
    Needs,
    PickEncoder,
    Placement,
    Unplaceable,
    another_encoder,
    holding,
    lacking,
    place,
)
from epd.scheduling.predicted_rule import Outlook, PredictedRule, outlook, predicted_loads
from epd.scheduling.residency import CacheIndex, Said

DEADLINE_GRACE_S = 0.5  # between the two who know a deadline: one ends it in order, one in any case


class Dispatcher:
    """The books of one gateway's attempts: what is assigned where."""

    def __init__(
        self,
        actor: Actor,
        registry: Registry,
        timing: Timing,
        index: CacheIndex,
        affinity: Affinity | None = None,
        pick: PickEncoder | None = None,
        silent: Callable[[], Iterable[str]] = tuple,
        make_rule: MakeRule = PredictedRule,
    ) -> None:
        """`affinity`: None places without regard to prefixes; `pick`: see `place`; `silent`: who
        answers us nothing."""
        self._actor = actor
        self._registry = registry
        self._timing = timing
        self._index = index
        self._affinity = affinity
        self._pick = pick
        self.holds = Holds(actor, timing)
        self.offers = Offers(actor, timing)
        self._silent = silent
        self._make_rule = make_rule
        self.books = Books()
        self.suspects = Suspects(actor, registry, silent, timing.heartbeat_interval_s)
        self._started_s = actor.clock.now_s()
        self.first_join_within_s = inf  # of the start; later no first instance is waited for
        self.may_run: Callable[[Adapter], bool] = lambda adapter: True  # requests that name it
        self.on_began: Callable[[], None] = lambda: None
        self.on_ended: Callable[[Generation], None] = lambda machine: None

    # --- placement --------------------------------------------------------------------------------

    def candidates(self) -> list[Candidate]:
        return [
            Candidate(i.info, i.load, self.books.assigned_to(name), self.books.at(name))
            for i in self._registry.takers()
            for name in (i.info.address.instance_id,)
        ]

    def _holding(self, adapter: Adapter) -> list[Candidate]:
        """Those that requests with this adapter may be placed at."""
        return holding(self.candidates(), adapter.digest, changes_tower=adapter.changes_tower)

    def loads(self) -> tuple[StageLoad, ...]:
        """What waits at each instance, in seconds."""
        return tuple(predicted_loads(self.candidates()))

    def outlook(self, *, with_images: bool) -> Outlook:
        """What one more request would find."""
        return outlook(self.candidates(), with_images=with_images)

    def amounts(self, machine: Generation) -> tuple[float, float]:
        """Patches to encode for it, and tokens of its prompt to compute; without what is cached."""
        images = {item.mm_hash: prod(item.grid_thw) for item in machine.prompt.items}
        new = [h for h in images if not (self.in_flight(h) or self._index.resident(h))]
        candidates = self.candidates()
        held = self._affinity.shares(machine, candidates) if self._affinity is not None else {}
        num_tokens = len(machine.prompt.token_ids) * (1.0 - max(held.values(), default=0.0))
        return sum(images[mm_hash] for mm_hash in new), num_tokens

    def num_least_decoding(self) -> int:
        """Sequences at the instance that has the fewest, decoding or about to."""
        all_ = self.candidates()
        return min((c.backlog.num_sequences for c in all_ if "decode" in c.roles), default=0)

    def is_vacant(self) -> bool:
        """No instance has ever joined, and none is about to."""
        age_s = self._actor.clock.now_s() - self._started_s
        return not self._registry.instances and age_s >= self.first_join_within_s

    def lacking(self, *, with_images: bool) -> str:
        """Why nothing could be placed now; empty if it could."""
        infos = [i.info for i in self._registry.takers()]
        return lacking(infos, with_images=with_images, finds=True)

    def choose(self, machine: Generation) -> Placement | Unplaceable:
        """Instances for the next attempt of this generation."""
        if self.suspects.is_barred(machine):
            return Unplaceable("what an instance may have died of is being computed elsewhere")
        if not self.may_run(adapter := machine.prompt.adapter):
            return Unplaceable(f"the adapter {adapter.name} was unloaded")
        candidates = self._holding(adapter)
        avoid = machine.avoided.union(self._silent())
        held = self._affinity.shares(machine, candidates) if self._affinity is not None else {}
        asked = Needs(
            tuple(map(_image, machine.prompt.items)),
            len(machine.prompt.token_ids) + len(machine.token_ids),
            machine.prompt.sampling.max_tokens,
            Said(self, machine.prompt.encoded_at),
            held,
        )
        is_absent = _is_absent(machine)
        chosen = place(
            candidates,
            asked,
            self._make_rule,
            avoid,
            finds=not is_absent,
            at=self.holds.claimed_by(machine),
            pick=self._pick,
        )
        if is_absent and isinstance(chosen, Unplaceable):
            told = f"the rows of an image are not in the shared storage, and {chosen.reason}"
            return Unplaceable(told)
        if isinstance(chosen, Unplaceable) and adapter.name:
            return Unplaceable(f"{chosen.reason} and holds the adapter {adapter.name}")
        return chosen

    def another_encoder(
        self, machine: Generation, index: int, but: Collection[str]
    ) -> Address | None:
        """For the image of that index of the present attempt: whom to ask instead of `but`."""
        image, at = _image(machine.prompt.items[index]), machine.placement.prefill
        candidates = self._holding(machine.prompt.adapter)
        barred = self.suspects.barred(image.mm_hash, (c.info.address for c in candidates))
        avoid = {*but, *machine.avoided, *self._silent(), *barred}
        return another_encoder(candidates, image, self._make_rule, at, avoid, self)

    def rival(
        self, machine: Generation, index: int, late: Address, waited_s: float
    ) -> Address | None:
        """For an image that is late: who would be done with it soon."""
        if not self.suspects.deaths.may_hedge(machine.prompt.items[index].mm_hash):
            return None
        encoder = self.another_encoder(machine, index, {late.instance_id})
        one = next((c for c in self.candidates() if c.info.address == encoder), None)
        num_patches = prod(machine.prompt.items[index].grid_thw)
        if one is None or not pays(one.backlog, one.load.costs, num_patches, waited_s):
            return None
        return encoder

    def in_flight(self, mm_hash: str) -> tuple[str, ...]:
        """See `Whereabouts`."""
        return self.books.in_flight(mm_hash)

    def resident(self, mm_hash: str) -> tuple[str, ...]:
        """See `Whereabouts`."""
        return self._index.resident(mm_hash)

    def num_resident(self, instance_id: str) -> int:
        """Images whose rows this encoder has reported."""
        return len(self._index.held(instance_id))

    def may_come(self, machine: Generation) -> bool:
        """Whether what could not be placed may be placed one day."""
        is_found = not _is_absent(machine) or self._registry.has_known("encode")
        return is_found and self.may_run(machine.prompt.adapter)

    # --- sending ----------------------------------------------------------------------------------

    def send(self, machine: Generation) -> bool:
        """Send the present attempt to its instances.  False: prefill takes no messages."""
        placement = machine.placement
        self._book(machine)
        deadline_s, token_due_s = self.due_s(machine)
        items = self._send_encodes(machine, placement, token_due_s)
        prompt = machine.prompt
        if prompt.stage == "encode":
            return True
        if self._affinity is not None:
            self._affinity.sent(machine)
        message = PrefillRequest(
            request_id=machine.key,
            attempt=machine.attempt,
            token_ids=(*prompt.token_ids, *machine.token_ids),
            num_emitted=len(machine.token_ids),
            items=items,
            sampling=prompt.sampling,
            decode=placement.decode,
            gateway=self._actor.address,
            deadline_s=deadline_s,
            reports=prompt.wants_timeline,
            scope=prompt.scope,
            first_token_deadline_s=token_due_s,
            lease_s=self.holds.lease_s(machine),
            is_suspect=self.suspects.is_suspect(machine),
            adapter=prompt.adapter.digest,
        )
        return self._actor.send(placement.prefill, message)

    def due_s(self, machine: Generation) -> tuple[float, float]:
        """When all of it is due, and its next token, in the cluster's time."""
        deadline_s = self._at(machine.admitted_s + machine.limits.total_s)
        patience_ends_s = self._actor.timers.due_s(machine, (TokenTimedOut,))
        return deadline_s, min(deadline_s, self._at(patience_ends_s + DEADLINE_GRACE_S))

    def _at(self, when_s: float) -> float:
        """A time of this process's clock, in the cluster's time."""
        return when_s + self._actor.cluster_offset_s

    def _send_encodes(
        self, machine: Generation, placement: Placement, token_due_s: float
    ) -> tuple[MediaItem, ...]:
        items = []
        images: dict[str, Offered] = {}
        pairs = zip(machine.prompt.items, placement.encoders, strict=True)
        for index, (item, encoder) in enumerate(pairs):
            room = str(RoomKey(machine.key, machine.attempt, index))
            request = EncodeRequest(
                request_id=machine.key,
                attempt=machine.attempt,
                room=room,
                mm_hash=item.mm_hash,
                num_rows=item.num_rows,
                grid_thw=item.grid_thw,
                consumer=None if machine.prompt.stage == "encode" else placement.prefill,
                first_token_deadline_s=token_due_s,
                reports=machine.prompt.wants_timeline,
                clip=item.clip,
                bounds=item.bounds,
                pixels_nbytes=item.pixels_nbytes,
                is_suspect=self.suspects.deaths.is_suspect(item.mm_hash),
                adapter=machine.prompt.adapter.of_rows,
            )
            images[room] = Offered(index, encoder, request, item.image)
            items.append(item.placed(index, room, encoder))
        self.offers.begin(machine, images)
        return tuple(items)

    def move(self, machine: Generation, index: int, encoder: Address) -> None:
        """Send an image to this encoder, which its placement names already."""
        self._book(machine)
        mm_hash = machine.prompt.items[index].mm_hash
        is_suspect = self.suspects.deaths.is_suspect(mm_hash)
        further = self.offers.move(machine, index, encoder, is_suspect=is_suspect)
        if machine.prompt.stage != "encode":
            self.tell_room(machine, further)

    def hedge(self, machine: Generation, index: int, encoder: Address) -> None:
        """Send an image to this encoder, too; the former one keeps it."""
        former = self.offers.latest(machine, index)
        self._book(machine)
        if former is not None:
            mm_hash, num_patches = former.request.mm_hash, prod(former.request.grid_thw)
            self.books.also(machine.key, former.encoder.instance_id, mm_hash, num_patches)
        self.tell_room(machine, self.offers.hedge(machine, index, encoder), is_rival=True)

    def tell_room(self, machine: Generation, image: Offered, *, is_rival: bool = False) -> None:
        """Prefill may have the rows of this image in its room."""
        added = RoomAdded(
            request_id=machine.key,
            attempt=machine.attempt,
            index=image.index,
            room=image.request.room,
            encoder=image.encoder,
            is_rival=is_rival,
        )
        self._actor.send(machine.placement.prefill, added)

    def needed(self, machine: Generation) -> tuple[Address, ...]:
        """Instances whose loss ends the attempt; prefill reports rows that a lost encoder owes."""
        placement = machine.placement
        if machine.prompt.stage == "encode":
            return placement.encoders
        return placement.prefill, placement.decode

    def transfer_params(self, machine: Generation) -> TransferParams:
        """How rows and KV of the latest attempt move."""
        placement = machine.placed
        if placement is None:
            return TransferParams()
        prefill, decode = placement.prefill, placement.decode
        over = self._registry.transport_between
        ec: dict[str, JsonObject] = {
            item.mm_hash: {
                "remote_engine_id": encoder.instance_id,
                "transport": over(encoder, prefill),
                "num_rows": item.num_rows,
            }
            for item, encoder in zip(machine.prompt.items, placement.encoders, strict=True)
        }
        kv: JsonObject = {
            "do_remote_prefill": prefill.instance_id != decode.instance_id,
            "remote_engine_id": prefill.instance_id,
            "remote_request_id": machine.key,
            "decode_engine_id": decode.instance_id,
            "transport": over(prefill, decode),
            "num_prompt_tokens": len(machine.prompt.token_ids),
        }
        if machine.prompt.stage == "encode":
            kv = {}
        elif lease_s := self.holds.lease_s(machine):
            kv |= {"do_remote_prefill": True, "do_remote_decode": False, "lease_s": lease_s}
        return TransferParams(ec, kv)

    # --- what is done of an attempt ---------------------------------------------------------------

    def encoded(self, instance_id: str, mm_hash: str) -> None:
        """An encoder has reported these rows."""
        self.books.encoded(instance_id, mm_hash)
        self.suspects.deaths.acquit(mm_hash)

    def began(self, machine: Generation) -> None:
        """The first token of the present attempt is here."""
        self.books.prefilled(machine.key)
        if not machine.token_ids:
            self.holds.taken(machine)
        self.on_began()

    # --- the end of an attempt --------------------------------------------------------------------

    def withdraw(self, machine: Generation) -> None:
        """The attempt is given up: its encoders get aborts, nothing is offered again."""
        self.offers.given_up(machine)
        self.books.ended(machine.key)

    def forget(self, machine: Generation) -> None:
        """The generation has ended."""
        self.on_ended(machine)
        self.holds.ended(machine)
        if self._affinity is not None:
            self._affinity.ended(machine)
        self.offers.answered(machine)
        self.books.ended(machine.key)

    def _book(self, machine: Generation) -> None:
        """What its present attempt has to encode, compute and decode, and where."""
        placement, prompt = machine.placement, machine.prompt
        prefill, decode = placement.prefill.instance_id, placement.decode.instance_id
        images = [
            (encoder.instance_id, item.mm_hash, prod(item.grid_thw))
            for item, encoder in zip(prompt.items, placement.encoders, strict=True)
        ]
        is_encode = prompt.stage == "encode"
        num_tokens = len(prompt.token_ids) + len(machine.token_ids)
        held = self._affinity.share(machine, prefill) if self._affinity is not None else 0.0
        attempt = Attempt(
            "" if is_encode else prefill,
            "" if is_encode else decode,
            round(num_tokens * (1.0 - held)),
            {(e, h): size for e, h, size in images if e not in self._index.resident(h)},
            tuple((encoder, mm_hash) for encoder, mm_hash, _ in images),
            tuple(sorted(placement.instances())),
        )
        self.books.sent(machine.key, attempt)


def _image(item: PreparedItem) -> Image:
    return Image(item.mm_hash, prod(item.grid_thw), item.num_rows)


def _is_absent(machine: Generation) -> bool:
    """Storage did not have one of its images: encoders are asked."""
    return FailureKind.ABSENT in machine.failures
