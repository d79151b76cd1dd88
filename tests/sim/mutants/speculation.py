"""Bugs of speculative decoding put back: drafts that are believed, kept, shared, or said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest import mock

from epd.engine.base import Outcome, StepFailure, StepSequence, verify
from epd.fsm import request
from epd.fsm.kernel import Event
from epd.messages import TokenLogprobs
from epd.roles.steps.outcomes import Outcomes
from epd.roles.steps.record import Record
from epd.roles.steps.requests import Requests
from epd.roles.steps.step_loop import Part
from epd.scheduling.prefix_keys import PrefixKeys
from tests.sim.mutants.planting import Planted, mutant, patched


@mutant
def a_rejected_draft_is_said() -> Planted:
    """One draft too many is accepted: the first one that the model does not confirm."""

    def gullible(
        drafts: Sequence[int], sample: Callable[[int], TokenLogprobs | StepFailure]
    ) -> Outcome:
        said = verify(drafts, sample)
        if isinstance(said, tuple) and len(said) <= len(drafts):
            return (*said[:-1], TokenLogprobs(drafts[len(said) - 1], -0.5))
        return said

    return mock.patch("epd_lab.sim.engine.engines.verify", gullible)


@mutant
def a_rejected_draft_keeps_its_place() -> Planted:
    """Wrong drafts count as computed, so the token behind the right ones never is."""
    event_of = Outcomes.event_of

    def keep(self: Outcomes, part: Part, outcome: Outcome, record: Record) -> Event:
        event = event_of(self, part, outcome, record)
        if isinstance(event, request.TokenSampled):
            part.request.num_computed += part.count - 1 - len(event.accepted)
        return event

    return patched(Outcomes, "event_of", keep)


@mutant
def a_rejected_draft_is_published() -> Planted:
    """Blocks that drafts have filled can be found by others before the drafts are verified."""
    end_of = Requests._end_of

    def hasty(self: Requests, part: Part, outcome: Outcome) -> Event:
        machine = part.request
        if part.decoding and not machine.ended_for_client:
            drafts = self.record(machine).drafts[: part.count - 1]
            text = [*machine.tokens(0, machine.num_tokens), *drafts]
            keys = PrefixKeys(
                self.engine.kv_layout.block_size, machine.message.items, machine.message.scope
            )
            keys.extend(lambda start, stop: text[start:stop], len(text))
            for block, key in zip(machine.block_table, keys.keys, strict=False):
                self.pool.publish(block, key)
        return end_of(self, part, outcome)

    return patched(Requests, "_end_of", hasty)


@mutant
def said_behind_its_end() -> Planted:
    """What was sampled behind a token that ends the answer is said as well."""
    return mock.patch("epd.roles.steps.outcomes.until_end", lambda machine, tokens: tokens)


@mutant
def a_step_runs_ahead_of_drafts() -> Planted:
    """The step behind drafts takes the first of its tokens for the last."""

    def always(machine: request.Request, sequence: StepSequence) -> bool:
        return sequence.output_index + 1 < machine.sampling.max_tokens

    return mock.patch("epd.roles.steps.step_loop.runs_ahead", always)
