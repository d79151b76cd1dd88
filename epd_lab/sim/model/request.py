"""One attempt at an instance that runs the language model: REQUEST, its memory and its steps.

Played: the rows that it waits for, the step loop, the queue for blocks, the transfer of its KV, the
abort and the deadline.  The prompt is a message and a token for each image, the answer two tokens
long; a step computes one token, so that everything can happen in the middle of each.  Where the
loop runs `ahead`, the answer has three tokens at most, and any of them may be the last.

Laws: blocks are freed once, and not under a step (F6, F43); rows are given back, and not under a
step; an offer of KV does not outlive its request; the gateway is told one end, and nothing after.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from epd.failure import Failure, FailureKind
from epd.fsm import request as r
from epd.fsm.kernel import Event
from epd.messages import KvState, SamplingParams, TokenLogprobs
from epd_lab.sim.model.laws import Step, require
from epd_lab.sim.model.world import World

MAX_TOKENS = 2
MAX_TOKENS_AHEAD = 3
BLOCKS = (3, 4)


@dataclass(frozen=True, slots=True)
class _Item:
    """An image of one row."""

    room: str
    offset: int

    @property
    def end(self) -> int:
        return self.offset + 1


@dataclass(frozen=True, slots=True)
class _Message:
    """What a request is made of."""

    items: tuple[_Item, ...]
    num_emitted: int = 0
    sampling: SamplingParams = SamplingParams(max_tokens=MAX_TOKENS, seed=0)
    gateway: str = "gateway"
    deadline_s: float = 0.0
    request_id: str = "id"
    attempt: int = 1


def token(index: int) -> TokenLogprobs:
    """The token with this output index; its id is the index."""
    return TokenLogprobs(index, 0.0, ())


class RequestWorld(World):
    """An attempt whose KV comes from another instance (`remote_kv`), stays here, or goes away."""

    def __init__(
        self,
        num_items: int = 0,
        *,
        remote_kv: bool = False,
        decode_here: bool = True,
        num_emitted: int = 0,
        brief: bool = False,
        ahead: bool = False,
        held: bool = False,
    ) -> None:
        items = tuple(_Item(f"item {index}", 1 + index) for index in range(num_items))
        prompt = (0,) * max(2, 1 + num_items)
        message: Any = _Message(items, num_emitted)
        here = decode_here or remote_kv
        self.request = r.Request("id/1", message, prompt, decode_here=here)
        self.num_sent = 0  # of its tokens
        self.remote_kv = remote_kv
        self.held = held  # it is for its prompt alone, whose blocks are held afterwards
        self.max_tokens = MAX_TOKENS_AHEAD if ahead else MAX_TOKENS
        self.depth = 2 if ahead else 1  # steps under way at a time
        self.brief = brief  # long steps, and nobody takes its blocks away: part of a larger model
        self.loading: set[str] = set()  # rooms of items whose rows are not here yet
        self.queued = False
        self.blocks = "none"  # none, owned, transfer
        self.rows = False
        self.transfer = "none"  # none, open, over
        self.words: dict[str, None] = {}  # said to the gateway, in order
        self.begun = False
        self.promised = False
        self.taken: tuple[int, ...] = ()  # tokens that each step under way computes, in order
        self.reading: tuple[bool, ...] = ()  # whether it computes some of the prompt

    def fire(self, event: Event) -> None:
        request = self.request
        self.perform(request, request.fire(event), event)
        if request.terminal:
            self._at_end()

    def _at_end(self) -> None:
        require(self.blocks != "owned", "blocks are left over")
        require(not self.rows, "references to rows are left over")
        require(not self.queued, "a place in the batch is left over")
        require(not self.request.steps, "a step still runs")
        handed = self.blocks == "transfer" or self.remote_kv
        require(self.transfer != "open" or handed, "an offer is left standing")
        self.request.output, self.request.block_table = [], ()  # nobody reads them any more

    # --- effects ----------------------------------------------------------------------------------

    def acquire_embeddings(self, request: r.Request, event: Event) -> None:
        self.rows = True
        self.loading = {item.room for item in request.message.items}

    def release_embeddings(self, request: r.Request, event: Event) -> None:
        require(not any(self.reading), "rows are given back under a step")
        self.rows = False
        self.loading.clear()

    def enqueue(self, request: r.Request, event: Event) -> None:
        self.queued = True

    def start_decoding(self, request: r.Request, event: Event) -> None:
        self.queued = True

    def dequeue(self, request: r.Request, event: Event) -> None:
        self.queued = False

    def release_blocks(self, request: r.Request, event: Event) -> None:
        require(not request.steps, "blocks are freed under a step (F6)")
        require(self.blocks == "owned", f"blocks are freed that are {self.blocks}")
        self.blocks = "none"

    def offer_kv(self, request: r.Request, event: Event) -> None:
        self._open()

    def reserve_blocks(self, request: r.Request, event: Event) -> None:
        self._open()

    def _open(self) -> None:
        require(self.transfer == "none", "one transfer of KV per attempt")
        self.transfer = "open"

    def withdraw_offer(self, request: r.Request, event: Event) -> None:
        if self.transfer == "open":
            self.transfer = "over"

    def hand_over_kv(self, request: r.Request, event: Event) -> None:
        require(self.blocks == "owned" and self.transfer == "open", "nothing to hand over")
        self.blocks = "transfer"

    def emit_tokens(self, request: r.Request, event: Event) -> None:
        ended = "aborted" in self.words or "failed" in self.words
        require(not ended, "tokens after the end")
        start = request.num_emitted + self.num_sent
        count = len(request.output) - self.num_sent
        self.num_sent = len(request.output)
        final = f" final {request.finish_reason}" if request.finish_reason else ""
        self.words[f"tokens {start} {count}{final}"] = None

    def arm_lease(self, request: r.Request, event: Event) -> None:
        require(self.blocks == "owned", "nothing is held")

    def end_lease(self, request: r.Request, event: Event) -> None:
        require(self.blocks == "owned", "nothing was held")

    def send_failure(self, request: r.Request, event: Event) -> None:
        ended = "failed" in self.words or any("final" in word for word in self.words)
        require(not ended, "a failure after the end")
        self.words["failed"] = None

    def send_aborted(self, request: r.Request, event: Event) -> None:
        self.words["aborted"] = None

    # --- everything that may happen next ----------------------------------------------------------

    def steps(self) -> Iterator[Step[RequestWorld]]:
        request = self.request
        if not self.begun:
            yield self.act("it arrives", "work", _begin)
            return
        if not request.terminal:
            yield from self._outside()
        if self.loading and not self.promised:
            yield self.act("its rows are promised", "work", _promise)
        for room in sorted(self.loading):
            yield self.act(f"{room} is ready", "work", partial(_load, room=room))
            yield self._event(r.EmbeddingFailed(Failure(FailureKind.MEDIA, "bad image")), "fault")
        if self.queued and request.state in (r.S.WAITING, r.S.PREEMPTED):
            yield self.act("it is scheduled", "work", _schedule)
        if self.transfer == "open":
            yield from self._transfer()
        if request.steps:
            yield from self._returns()
        running = request.state in (r.S.RUNNING, r.S.DECODING)
        if running and len(request.steps) < self.depth and self._next():
            yield self.act("a step begins", "work", _begin_step)
        if not self.brief:
            yield from self._blocks()

    def _next(self) -> int:
        """How many tokens a step may compute now."""
        request = self.request
        coming = 0  # the token that the step under way samples, if it is not certainly the last
        ahead = request.num_computed + sum(self.taken)
        stays = request.decode_here and not self.held
        if self.taken and stays and ahead >= request.num_tokens:
            index = request.num_emitted + len(request.output)
            coming = int(index + 1 < self.max_tokens)
        known, ready = request.num_tokens + coming, request.num_ready()
        known = known if ready is None else min(ready, known)
        left = known - request.num_computed - sum(self.taken)
        return left if self.brief else min(1, left)

    def _blocks(self) -> Iterator[Step[RequestWorld]]:
        """An older request needs them, if this one can compute again what it loses."""
        request = self.request
        prompt = request.state in (r.S.RUNNING, r.S.WAITING_MID_PROMPT)
        if prompt or (request.state is r.S.DECODING and not request.message.items):
            if not request.steps:
                yield self.act("it gives way", "fault", _give_way)
            else:
                yield self._event(r.Preempted(), "fault")
        ahead = request.state is r.S.RUNNING and len(request.steps) > 1
        if (ahead or request.state is r.S.DECODING) and request.block_table == BLOCKS:
            yield self._event(r.Grown((5,)), "fault")

    def _outside(self) -> Iterator[Step[RequestWorld]]:
        request = self.request
        is_held = request.state is r.S.HELD
        events: tuple[tuple[Event, str], ...] = (
            (r.AbortReceived(), "work" if is_held else "fault"),  # somebody has come for it
            (r.DeadlinePassed(), "time"),
        )
        if is_held:
            events += ((r.LeaseEnded(), "time"), (r.LeaseRevoked(), "fault"))
        for event, kind in events:
            if self.changes(self.request, event):
                yield self._event(event, kind)

    def _transfer(self) -> Iterator[Step[RequestWorld]]:
        yield self._over(r.KvFailed(Failure(FailureKind.LOST, "instance lost")), "fault")
        if self.remote_kv:
            kv = KvState(
                num_tokens=2,
                first_token=token(0),
                rope_delta=0,
                num_layers=1,
                num_blocks=2,
                num_whole=2,
            )
            yield self._over(r.RemoteKvArrived(BLOCKS, kv), "work", "owned")
            yield self._over(r.KvWithdrawn(), "fault")
        elif self.blocks == "transfer":
            yield self._over(r.KvDelivered(), "work", "none")

    def _over(self, event: Event, kind: str, blocks: str = "") -> Step[RequestWorld]:
        def do(world: RequestWorld) -> None:
            world.transfer = "over"
            world.blocks = blocks or world.blocks
            world.fire(event)

        return self.act(type(event).__name__, kind, do)

    def _returns(self) -> Iterator[Step[RequestWorld]]:
        """A step is over: what it says of this sequence."""
        request = self.request
        if request.ended_for_client:
            yield self._returned(r.StepReturned(), "work")
            return
        yield self._returned(r.StepFailed(Failure(FailureKind.ENGINE, "because")), "fault")
        index = request.num_emitted + len(request.output)
        taken = self.taken[0]
        if request.num_computed + taken < request.num_tokens:
            yield self._returned(r.ChunkComputed(), "work")
            return
        if self.held:
            yield self._returned(r.PromptHeld(token(index), "length"), "work")
            return
        if index + 1 >= self.max_tokens or self.depth > 1:
            yield self._returned(r.LastTokenSampled(token(index), "stop"), "work")
        if index + 1 >= self.max_tokens:
            return
        if request.state is r.S.RUNNING:
            yield self._returned(r.FirstTokenSampled(token(index)), "work")
        else:
            yield self._returned(r.TokenSampled(token(index)), "work")

    def _returned(self, event: Event, kind: str) -> Step[RequestWorld]:
        def do(world: RequestWorld) -> None:
            world.taken, world.reading = world.taken[1:], world.reading[1:]
            world.fire(event)

        return self.act(type(event).__name__, kind, do)

    def _event(self, event: Event, kind: str) -> Step[RequestWorld]:
        return self.act(type(event).__name__, kind, lambda w: w.fire(event))

    # --- ends -------------------------------------------------------------------------------------

    def quiescent(self) -> bool:
        return self.request.terminal

    def succeeded(self) -> bool:
        last = any("final" in word for word in self.words)
        return self.request.state is r.S.FINISHED and (last or self.blocks != "owned")


def _begin(world: RequestWorld) -> None:
    world.begun = True
    if world.remote_kv:
        world.fire(r.KvOffered())
    else:
        world.fire(r.EmbeddingsRequired() if world.request.message.items else r.TextOnly())


def _load(world: RequestWorld, room: str) -> None:
    world.loading.discard(room)
    world.fire(r.EmbeddingReady(room))


def _schedule(world: RequestWorld) -> None:
    world.blocks = "owned"
    world.fire(r.Scheduled(BLOCKS))


def _promise(world: RequestWorld) -> None:
    world.promised = True
    world.fire(r.EmbeddingsPromised())


def _give_way(world: RequestWorld) -> None:
    world.fire(r.Preempted())
    require(world.blocks == "none", "it gave way and kept its blocks")


def _begin_step(world: RequestWorld) -> None:
    require(world.blocks == "owned", "a step writes into blocks that are not its own")
    first = world.request.num_computed + sum(world.taken)
    world.reading += (first < len(world.request.prompt),)
    count = world._next()
    world.taken += (count,)
    world.fire(r.StepLaunched(count, ahead=False))
