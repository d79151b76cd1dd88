"""Bugs of answers put back: what sampling reads is lost, begins anew, or is another request's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import msgspec

from epd import messages
from epd.engine.base import ChunkScores, Outcome, Settled, StepSequence
from epd.fsm import generation, request
from epd.fsm.request import TABLE as REQUEST
from epd.messages import KvOffer, SamplingParams, TokenChunk
from epd.roles.steps.prompt_scores import PromptScores
from epd.roles.steps.record import Record
from epd.roles.steps.step import new_tokens, sequence_of
from tests.sim.mutants.planting import Planted, mutant, patched, row, several

R, G = request.S, generation.S


def in_each_step(
    spoil: Callable[[request.Request, StepSequence], None],
) -> AbstractContextManager[Any]:
    """What a step is told of a request is not quite right."""

    def spoiled(machine: request.Request, *args: Any) -> StepSequence:
        sequence = sequence_of(machine, *args)
        spoil(machine, sequence)
        return sequence

    return mock.patch("epd.roles.steps.requests.sequence_of", spoiled)


def in_each_offer(**changes: Any) -> AbstractContextManager[Any]:
    """What decode is told of sampling is not what the client asked for."""

    def spoiled(**fields: Any) -> KvOffer:
        offer = messages.KvOffer(**fields)
        sampling: SamplingParams = msgspec.structs.replace(offer.sampling, **changes)
        return msgspec.structs.replace(offer, sampling=sampling)

    return mock.patch("epd.roles.prefill.kv_producer.KvOffer", spoiled)


@mutant
def a_migration_forgets_what_was_said() -> Planted:
    """F20: what other attempts have said counts as prompt: penalties and grammars begin anew."""

    def spoil(machine: request.Request, sequence: StepSequence) -> None:
        if sequence.output_ids:
            sequence.prompt_ids = machine.prompt
            sequence.output_ids = sequence.output_ids[machine.num_emitted :]

    return in_each_step(spoil)


@mutant
def bad_words_begin_anew_at_a_migration() -> Planted:
    """F20: the first token of an attempt is chosen as if nothing had been said before."""

    def spoil(machine: request.Request, sequence: StepSequence) -> None:
        if not machine.output:
            sequence.output_ids = ()

    return in_each_step(spoil)


@mutant
def the_seed_starts_anew_at_a_migration() -> Planted:
    """F20: the next attempt draws the first numbers of the seed again."""

    def spoil(machine: request.Request, sequence: StepSequence) -> None:
        sequence.output_index -= machine.num_emitted

    return in_each_step(spoil)


@mutant
def the_seed_starts_anew_at_decode() -> Planted:
    """Decode counts the tokens that it has sampled itself."""

    def spoil(machine: request.Request, sequence: StepSequence) -> None:
        sequence.output_index -= isinstance(machine.message, KvOffer)

    return in_each_step(spoil)


@mutant
def decode_looks_back_at_its_own() -> Planted:
    """Decode does not count the first token, which prefill has sampled, for penalties."""

    def spoil(machine: request.Request, sequence: StepSequence) -> None:
        if isinstance(machine.message, KvOffer):
            sequence.output_ids = sequence.output_ids[1:]

    return in_each_step(spoil)


@mutant
def the_past_is_a_window() -> Planted:
    """Penalties and grammars see the last few tokens of an answer."""

    def spoil(machine: request.Request, sequence: StepSequence) -> None:
        sequence.output_ids = sequence.output_ids[-4:]

    return in_each_step(spoil)


@mutant
def a_preempted_grammar_starts_anew() -> Planted:
    """F24: who was preempted goes on in the first state of its grammar."""

    said: dict[str, int] = {}

    def mark(machine: request.Request, event: request.Scheduled) -> None:
        request.keep_blocks(machine, event)
        said[machine.key] = len(machine.output)

    def spoil(machine: request.Request, sequence: StepSequence) -> None:
        if machine.sampling.grammar and (num_said := said.get(machine.key)):
            sequence.output_ids = sequence.output_ids[machine.num_emitted + num_said :]

    return several(
        row(REQUEST, R.PREEMPTED, request.Scheduled, R.RUNNING, (), mark), in_each_step(spoil)
    )


@mutant
def penalties_stay_at_prefill() -> Planted:
    """Decode is not told of penalties."""
    return in_each_offer(frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0)


@mutant
def the_bias_stays_at_prefill() -> Planted:
    """Decode is not told of biases, nor of what may not be said."""
    return in_each_offer(logit_bias=(), allowed_token_ids=(), bad_words=())


@mutant
def the_grammar_stays_at_prefill() -> Planted:
    """Decode says what it likes."""
    return in_each_offer(grammar="")


@mutant
def decode_ends_when_it_likes() -> Planted:
    """Decode is not told of `min_tokens`, and ends at what no client named."""
    return in_each_offer(min_tokens=0)


@mutant
def what_is_on_its_way_is_said_already() -> Planted:
    """Penalties and grammars count the token before once more for the one that is being sampled."""

    def spoil(machine: request.Request, sequence: StepSequence) -> None:
        if sequence.is_pending and sequence.output_ids:
            sequence.output_ids = [*sequence.output_ids, sequence.output_ids[-1]]

    return in_each_step(spoil)


@mutant
def drafts_are_looked_back_at() -> Planted:
    """Penalties count drafts as said before they are verified."""

    def spoil(machine: request.Request, sequence: StepSequence) -> None:
        if sequence.output_ids:
            sequence.output_ids = [*sequence.output_ids, *sequence.drafts]

    return in_each_step(spoil)


@mutant
def only_the_last_chunk_is_scored() -> Planted:
    """What earlier chunks of a prompt have scored is forgotten."""
    take = PromptScores.take

    def forgetful(self: PromptScores, machine: request.Request, outcome: Outcome) -> Settled:
        if not isinstance(outcome, ChunkScores):
            self.forget(machine.key)
        return take(self, machine, outcome)

    return patched(PromptScores, "take", forgetful)


@mutant
def a_scored_prompt_is_found_in_the_cache() -> Planted:
    """Tokens whose KV was computed for others are not scored."""
    return mock.patch("epd.roles.steps.requests.is_scored", lambda machine: False)


@mutant
def log_probabilities_of_other_tokens() -> Planted:
    """Each chunk of tokens comes with the log-probabilities of an answer's first ones."""

    def first_ones(machine: request.Request, record: Record) -> TokenChunk:
        chunk = new_tokens(machine, record)
        said = tuple(machine.output[: len(chunk.token_ids)]) if chunk.logprobs else ()
        return msgspec.structs.replace(chunk, logprobs=said)

    return mock.patch("epd.roles.steps.token_outbox.new_tokens", first_ones)


@mutant
def who_has_enough_is_computed_on() -> Planted:
    """F43: instances are not told that a client has found its stop string, whatever they say."""
    do = (generation.Do.ARM_ABORT,)
    return several(
        patched(generation.Generation, "has_attempt", True),
        row(generation.TABLE, G.STREAMING, generation.StopRequested, G.STOPPING, do),
        row(generation.TABLE, G.PLACED, generation.StopRequested, G.STOPPING, do),
    )
