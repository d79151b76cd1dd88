"""The step loop of one instance: plan a step, launch it, settle its outcomes.

Theory of operation
-------------------
Turning a step's outcomes into events and messages, and planning the next one, takes the host a
millisecond or two.  A device that gets the next step only then stands still meanwhile.  So the loop
may run *ahead*: while step n runs, step n + 1 is planned and launched behind it.  The host does not
have the tokens of step n then.

- A sequence that decodes goes into step n + 1 with PENDING in place of its token: the device takes
  it from where step n puts it.  Positions, blocks and limits count the token that is on its way.
  A prompt whose first token is being sampled counts as decoding from the launch of its last chunk,
  if it goes on here.
- Whether that token ends the answer shows one step late.  If it does, step n + 1 has computed
  the sequence once too often.  That token is dropped, and the blocks are given back when the step
  that writes into them has returned (FINISHING; faults F6, F28).  A limit is counted before.
- A request with drafts in a step sits out one: the number of its tokens is open.
- Blocks can be taken only from a request in no step: the loop waits until nothing is under way.
- A request in a step that has yielded nothing here is at hand (`hands.py`), as is reported before
  the launch.  A suspect sits out while another one is at hand.

Steps are settled in the order of their launch.  Receiving anything never waits for the loop and it
never waits for anything received (fault F27).

Source: asynchronous scheduling of vLLM, overlapped scheduling of SGLang.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from epd.engine.base import LanguageEngine, Outcome, StepFailure, StepResult, StepSequence
from epd.fsm.request import Request
from epd.groups.asks import RankLost
from epd.roles.base import Actor
from epd.roles.progress import Work
from epd.roles.steps.step import runs_ahead
from epd.scheduling.batching import Share
from epd.scheduling.step_cost import StepCost

Plan = list[Share[Request]]


class Batch(Protocol):
    """Who is served: the requests of an instance."""

    def plan(self, *, alone: bool) -> Plan:
        """The next step; empty: there is nothing to compute, or it must wait for a step under way
        (`alone`: there is none)."""

    def unplannable(self, request: Request, error: Exception) -> None:
        """What it brings to a step raised this: it is in no further one."""

    def sequence(self, request: Request, count: int, *, decoding: bool) -> StepSequence:
        """Its next `count` tokens, or the next one of its answer and drafts behind it."""

    def launched(self, request: Request, count: int, *, ahead: bool) -> None:
        """They are in a step; `ahead`: the next one may take the token that it samples."""

    def begin_decoding(self, request: Request) -> None:
        """A step that samples its first token is under way, and it goes on here."""

    def layers_computed(self, request: Request, start: int, num_layers: int) -> None:
        """The first layers of a prompt's last chunk, which begins at `start`, are computed."""

    def settle(self, parts: list[tuple[Part, Outcome]], elapsed_s: float) -> None:
        """A step is over; it took so long on the device (0: it failed)."""


@dataclass(slots=True)
class Part:
    """A request's part of a step: `count` tokens of it, the next of its answer or of its prompt."""

    request: Request
    count: int
    decoding: bool
    drafts: Sequence[int] = ()  # of what follows, once the step is over


@dataclass(slots=True)
class _Step:
    parts: list[Part]
    result: asyncio.Future[StepResult]
    work: Work
    num_decodes: int  # sequences
    num_prompt: int  # tokens
    unproven: Sequence[Request] = ()  # that had yielded nothing here


class StepLoop:
    """Keeps up to `depth` steps under way."""

    def __init__(
        self,
        actor: Actor,
        engine: LanguageEngine,
        batch: Batch,
        cost: StepCost,
        *,
        runs_ahead: bool,
    ) -> None:
        self._actor = actor
        self._engine = engine
        self._batch = batch
        self._cost = cost
        self._depth = 2 if runs_ahead else 1
        self._under_way: deque[_Step] = deque()
        self.is_awake = False  # a turn is to come
        self.num_turns = 0
        self._hands = actor.hands
        self._hands.on_free.append(self.wake)

    def wake(self) -> None:
        """Something may be computed now: it looks in the event loop's next turn.  While as many
        steps are under way as may be, the end of one is what it waits for."""
        if not self.is_awake and len(self._under_way) < self._depth:
            self.is_awake = True
            self._actor.mailbox.put("step loop", self._turn)

    def _turn(self) -> None:
        """An item when a step ends, and when woken: settle what is over, and when all is done that
        it has caused, launch what can be."""
        if self._actor.closing:
            return
        self.is_awake = True  # whoever wakes it meanwhile is seen by the plan
        try:
            while self._under_way and self._under_way[0].result.done():
                self._settle(self._under_way.popleft())
        finally:
            self._actor.mailbox.look("step loop", self._go_on)

    def _go_on(self) -> None:
        try:
            while len(self._under_way) < self._depth and not self._is_refused():
                plan = self._batch.plan(alone=not self._under_way)
                if not plan:
                    break
                self._launch(plan)
        except Exception as error:
            self._actor.fault("step loop", error)
        self.is_awake = False
        self.num_turns += 1

    def _hold(self, launching: Sequence[Request] = ()) -> None:
        lists = [step.unproven for step in self._under_way if step.unproven]
        if not (lists or launching or self._hands.requests):
            return  # nearly always: all have yielded
        unproven = [one for each in (*lists, launching) for one in each if not one.has_yielded]
        suspects = [one.request_id for one in unproven if one.message.is_suspect]
        self._hands.hold(tuple(dict.fromkeys(one.request_id for one in unproven)), *suspects[:1])

    def _is_refused(self) -> bool:
        """The last step was not launched.  Its requests must not be planned as if they had its
        tokens: other ranks, which did not get it, would take those of another step."""
        return bool(self._under_way) and self._under_way[-1].result.done()

    def _launch(self, plan: Plan) -> None:
        parts: list[Part] = []
        sequences = []
        unproven = [r for r, _, _ in plan if len(r.output) < 2 and not r.has_yielded]
        self._hold(unproven)
        leaving: list[tuple[Request, int]] = []  # whose KV others wait for
        for request, count, decoding in plan:
            try:
                sequence = self._batch.sequence(request, count, decoding=decoding)
                ahead = self._depth > 1 and runs_ahead(request, sequence)
            except Exception as error:
                self._batch.unplannable(request, error)
                continue
            self._batch.launched(request, count, ahead=ahead)
            if ahead and not decoding:
                self._batch.begin_decoding(request)
            sequences.append(sequence)
            if sequence.sample is not None and not (decoding or request.decode_here):
                leaving.append((request, sequence.start))
            parts.append(Part(request, count, decoding))
        if not parts:
            return  # the next plan is without them
        result: asyncio.Future[StepResult]
        try:
            put = self._actor.mailbox.put
            tell = partial(put, "layers", self._passed, leaving) if leaving else None
            result = asyncio.ensure_future(self._engine.step(sequences, tell))
        except Exception as error:
            result = asyncio.get_running_loop().create_future()
            result.set_exception(error)
        result.add_done_callback(lambda _: self._actor.mailbox.put("step", self._turn))
        num_prompt = sum([part.count for part in parts if not part.decoding])
        num_decodes = sum([part.decoding for part in parts])
        work = self._actor.progress.steps.begin(self._cost.expected_s(num_decodes, num_prompt))
        step = _Step(parts, result, work, num_decodes, num_prompt, unproven)
        self._under_way.append(step)

    def _passed(self, leaving: list[tuple[Request, int]], num_layers: int) -> None:
        for request, start in leaving:
            if request.steps:
                self._batch.layers_computed(request, start, num_layers)

    def _settle(self, step: _Step) -> None:
        settled: list[tuple[Part, Outcome]]
        elapsed_s = 0.0
        self._actor.progress.steps.end(step.work)
        try:
            result = step.result.result()
            settled = list(zip(step.parts, result.outcomes, strict=True))
            for place, drafts in result.drafts.items():
                part, outcome = settled[place]
                settled[place] = replace(part, drafts=drafts), outcome
        except Exception as error:
            if not isinstance(error, RankLost):  # with which this instance ends, as it should
                self._actor.fault("step", error)
            settled = [(part, StepFailure(f"the step failed: {error}")) for part in step.parts]
        else:
            elapsed_s = result.elapsed_s
            self._cost.observe(step.num_decodes, step.num_prompt, elapsed_s)
            self._actor.times.note_step(step.num_decodes, step.num_prompt, elapsed_s)
        self._batch.settle(settled, elapsed_s)
        self._hold()
