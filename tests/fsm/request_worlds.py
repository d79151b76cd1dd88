"""Worlds of the machines that follow a request: GENERATION (gateway), REQUEST (an instance)."""

from __future__ import annotations

from collections.abc import Callable

from epd.failure import Failure, FailureKind
from epd.fsm import generation as g
from epd.fsm import request as r
from epd.fsm.kernel import Event
from tests.fsm.tables import KV, PLACEMENT, make_event, make_generation, make_request
from tests.fsm.world import Choices, World

NUM_KINDS = 2  # of failure that the choices have: engine, and what time-outs and holes say: lost


SAID_BY_API = (g.CancelRequested, g.StopRequested, g.Refused, g.Abandoned)


class GenerationWorld(World):
    def __init__(self) -> None:
        super().__init__()
        self.machine: g.Generation = make_generation()
        self.admitted = False
        self.silent = False  # the API reads no more
        self.num_away = 0  # times that nobody took it

    def choices(self) -> Choices:
        state = self.machine.state
        if state is g.S.RECEIVED:
            yield from (g.Admitted(), g.Refused("full"))
            return
        if state in (g.S.PREPARING, g.S.AWAITING_TOPOLOGY, g.S.MIGRATING):
            yield from (g.Placed(PLACEMENT), g.NoTopology("nobody is left"))
            yield g.TopologyUnknown("there never was one")
        yield g.PlacementDue()
        if state is g.S.AWAITING_TOPOLOGY:
            yield g.PlacementTimedOut()
        yield from (g.DeadlinePassed(), g.TokenTimedOut("late"), g.CancelRequested("hung up"))
        yield from (g.Refused("it is wrong"), g.Abandoned("a fault"))
        if state is not g.S.PREPARING:  # what instances and timers of attempts may still say
            for kind in (FailureKind.ENGINE, FailureKind.CONTRACT, FailureKind.AWAY):
                yield g.AttemptFailed(Failure(kind, "because"))
            yield from (
                g.AttemptRefused(Failure(FailureKind.MEDIA, "bad")),
                g.StopRequested("enough"),
            )
            yield from (g.Accepted(), g.TokensMissed("a hole"), g.AttemptTimedOut("silent"))
            yield from (make_event(g.TokensArrived), make_event(g.FinalTokensArrived))
            yield from (g.AbortConfirmed("peer"), g.AbortTimedOut())

    def before(self, event: Event) -> None:
        said = isinstance(event, SAID_BY_API) and not self.machine.terminal
        self.silent |= said and self.admitted
        is_away = isinstance(event, g.AttemptFailed) and event.failure.kind is FailureKind.AWAY
        self.num_away += is_away
        self.admitted |= isinstance(event, g.Admitted)

    def perform(self, effect: g.Do, event: Event) -> None:
        if effect is g.Do.DELIVER:
            self.need(self.answers() == 0, "tokens after the answer")
        if effect in (g.Do.ANSWER_ERROR, g.Do.LOG_FAILURE):
            failure = self.machine.failure
            self.need_reason(failure.reason if failure is not None else "", event)
            late = isinstance(event, g.DeadlinePassed | g.TokenTimedOut)
            known = failure is not None and failure.kind is FailureKind.DEADLINE
            self.need(late == known, "another kind of failure")
        if effect is g.Do.DISPATCH:
            bound = 1 + NUM_KINDS * (self.machine.max_attempts - 1) + self.num_away
            self.need(self.machine.attempt <= bound, "too many attempts")
            self.need(self.done[effect] == self.machine.attempt, "an attempt is sent once")

    def answers(self) -> int:
        ends = (g.Do.DELIVER_FINAL, g.Do.DELIVER_CUT, g.Do.ANSWER_ERROR)
        return sum(self.done[effect] for effect in ends)

    def at_end(self) -> None:
        answered = self.admitted and not self.silent
        self.need(self.answers() == (1 if answered else 0), f"{self.answers()} answers")
        self.need(self.done[g.Do.CLOSE] == self.admitted, "the place is given back once")
        failed = self.machine.state is g.S.FAILED
        self.need(self.done[g.Do.LOG_FAILURE] == failed, "each failure of ours is logged once")


class RequestWorld(World):
    def __init__(self, images: int, remote_kv: bool, decode_here: bool) -> None:
        super().__init__()
        self.machine: r.Request = make_request(decode_here=decode_here or remote_kv, images=images)
        self.images, self.remote_kv = images, remote_kv
        self.waiting_rooms: set[str] = set()
        self.queued = False
        self.blocks = "none"  # none, owned, transfer
        self.rows = False
        self.transfer = "none"  # none, open, over
        self.ended: list[str] = []
        self.promised = False

    def choices(self) -> Choices:
        q = self.machine
        if not self.past:
            yield from self._arrival()
            return
        yield from (r.AbortReceived(), r.DeadlinePassed())
        if self.done[r.Do.ARM_GRACE]:
            yield r.GraceEnded()
        if self.done[r.Do.ACQUIRE_EMBEDDINGS] and not self.promised:
            yield r.EmbeddingsPromised()
        for room in sorted(self.waiting_rooms):
            yield r.EmbeddingReady(room)
            yield r.EmbeddingFailed(Failure(FailureKind.MEDIA, "bad image"))
        if self.queued and q.state in (r.S.WAITING, r.S.PREEMPTED):
            yield r.Scheduled((3, 4))
        if q.state in (r.S.RUNNING, r.S.WAITING_MID_PROMPT, r.S.DECODING):
            yield r.Preempted()
        if q.state is r.S.DECODING or (q.state is r.S.RUNNING and len(q.steps) > 1):
            yield r.Grown((5,))
        if self.transfer == "open":
            yield from self._transfer()
        if len(q.steps) < 2 and self._may_begin():
            yield r.StepLaunched(1, ahead=False)
        if q.steps:
            yield from self._step()

    def _arrival(self) -> Choices:
        if self.remote_kv:
            yield r.KvOffered()
        else:
            yield r.EmbeddingsRequired() if self.images else r.TextOnly()

    def _transfer(self) -> Choices:
        yield r.KvFailed(Failure(FailureKind.LOST, "instance lost"))
        if self.remote_kv:
            yield from (r.RemoteKvArrived((3, 4), KV), r.KvWithdrawn())
        elif self.blocks == "transfer":
            yield r.KvDelivered()

    def _may_begin(self) -> bool:
        """A step may take it; a second one, if nothing can stop the prompt in its middle."""
        q = self.machine
        return q.state is r.S.DECODING or (q.state is r.S.RUNNING and not (q.steps and q.missing))

    def _step(self) -> Choices:
        """The first step under way returns with its outcome."""
        q = self.machine
        if q.state in (r.S.ABORTING, r.S.FINISHING):
            yield r.StepReturned()
            return
        yield r.StepFailed(Failure(FailureKind.ENGINE, "because"))
        if q.state is r.S.RUNNING:
            yield r.ChunkComputed()
            if len(q.steps) == 1 or (q.decode_here and not q.missing):  # the step ahead decodes it
                yield make_event(r.LastTokenSampled)
                if not q.missing:
                    yield make_event(r.FirstTokenSampled)
        else:
            yield make_event(r.LastTokenSampled)
            yield make_event(r.TokenSampled)

    def before(self, event: Event) -> None:
        if isinstance(event, r.Scheduled):
            self.blocks = "owned"
        elif isinstance(event, r.RemoteKvArrived):
            self.blocks, self.transfer = "owned", "over"
        elif isinstance(event, r.KvFailed | r.KvWithdrawn | r.KvDelivered):
            self.transfer = "over"
        elif isinstance(event, r.EmbeddingsPromised):
            self.promised = True
        elif isinstance(event, r.EmbeddingReady):
            self.waiting_rooms.discard(event.room)
        elif isinstance(event, r.EmbeddingFailed):
            self.waiting_rooms.clear()

    def perform(self, effect: r.Do, event: Event) -> None:
        act: dict[r.Do, Callable[[], None]] = {
            r.Do.RELEASE_BLOCKS: self._release_blocks,
            r.Do.HAND_OVER_KV: self._hand_over,
            r.Do.ACQUIRE_EMBEDDINGS: self._acquire,
            r.Do.RELEASE_EMBEDDINGS: self._release_rows,
            r.Do.OFFER_KV: self._open_transfer,
            r.Do.RESERVE_BLOCKS: self._open_transfer,
            r.Do.WITHDRAW_OFFER: self._close_transfer,
            r.Do.ENQUEUE: lambda: self._queue(True),
            r.Do.START_DECODING: lambda: self._queue(True),
            r.Do.DEQUEUE: lambda: self._queue(False),
            r.Do.SEND_FAILURE: lambda: self.ended.append("failure"),
        }
        act.get(effect, lambda: None)()
        if effect is r.Do.SEND_FAILURE:
            failure = self.machine.failure
            self.need_reason(failure.reason if failure is not None else "", event)
            late = isinstance(event, r.DeadlinePassed)
            known = failure is not None and failure.kind is FailureKind.DEADLINE
            self.need(late == known, "another kind of failure")
        if effect is r.Do.SEND_ABORTED and "aborted" not in self.ended:
            self.ended.append("aborted")
        if effect is r.Do.EMIT_TOKENS:
            self.need(not self.ended, "tokens after the end")
            if self.machine.finish_reason:
                self.ended.append("finished")

    def _release_blocks(self) -> None:
        self.need(not self.machine.steps, "blocks are freed under a step (F6)")
        self.need(bool(self.machine.block_table), "it does not know which blocks")
        self.need(self.blocks == "owned", f"RELEASE_BLOCKS while blocks are {self.blocks}")
        self.blocks = "none"

    def _hand_over(self) -> None:
        self.need(self.blocks == "owned" and self.transfer == "open", "nothing to hand over")
        self.blocks = "transfer"

    def _acquire(self) -> None:
        self.rows = True
        self.waiting_rooms = set("ab"[: self.images])

    def _release_rows(self) -> None:
        decodes = bool(self.machine.output)  # the step ahead reads none
        self.need(not self.machine.steps or decodes, "rows are given back under a step")
        self.rows = False
        self.waiting_rooms.clear()

    def _open_transfer(self) -> None:
        self.need(self.transfer == "none", "one transfer of KV per attempt")
        self.transfer = "open"

    def _close_transfer(self) -> None:
        if self.transfer == "open":
            self.transfer = "over"

    def _queue(self, joins: bool) -> None:
        self.queued = joins

    def at_end(self) -> None:
        self.need(self.blocks != "owned", "blocks are left over")
        self.need(not self.rows, "references to rows are left over")
        self.need(not self.queued, "a place in the batch is left over")
        self.need(not self.machine.steps, "a step still runs")
        passed_on = self.past[-1] in ("KvDelivered", "KvWithdrawn")
        self.need(passed_on or bool(self.ended), "the gateway is told no end")
        handed = self.blocks == "transfer" or self.remote_kv
        self.need(self.transfer != "open" or handed, "an offer is left standing")
