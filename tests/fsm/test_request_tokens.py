"""REQUEST's tokens: read alike from prompt and answer, counted, and sent in words."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from epd.fsm.request import (
    ChunkComputed,
    Do,
    EmbeddingReady,
    FirstTokenSampled,
    Preempted,
    Scheduled,
    StepLaunched,
    TextOnly,
    TokenSampled,
)
from epd.messages import TokenLogprobs
from epd.roles.steps.record import Record
from epd.scheduling.prefix_keys import PrefixKeys
from tests.fsm.tables import launch, make_request

TOKEN = TokenLogprobs(9, 0.0)


def test_tokens_are_read_from_prompt_and_answer_alike() -> None:
    made = make_request()
    made.output = [TokenLogprobs(token_id, 0.0) for token_id in (7, 8)]
    whole = [*made.prompt, 7, 8]
    for start in range(6):
        for stop in range(start, 6):
            assert made.tokens(start, stop) == whole[start:stop]


def test_tokens_wait_for_more_until_a_message_is_full_or_it_ends() -> None:
    """The first one never waits."""
    made, record = make_request(), Record(PrefixKeys(4, (), ""))
    made.sampling = SimpleNamespace(tokens_per_word=3)
    made.output = [TOKEN] * 4
    held = []
    for record.num_sent in range(5):
        held.append(record.holds_tokens(made))
    assert held == [False, False, True, True, True]
    made.finish_reason = "stop"
    assert not record.holds_tokens(made)


@pytest.mark.parametrize("preempted", [False, True])
def test_rows_that_come_in_the_line_let_the_batch_go_further(preempted: bool) -> None:
    """WAITING or PREEMPTED: what it may compute has grown."""
    made = make_request()
    made.fire(TextOnly())
    if preempted:
        made.fire(Scheduled((3,)))
        made.fire(Preempted())
    assert made.fire(EmbeddingReady("a")) == (Do.EXTEND,)


def test_what_was_cached_is_counted_when_it_is_first_taken() -> None:
    made = make_request()
    made.fire(TextOnly())
    assert made.num_cached is None
    for blocks, num_cached in (((3,), 2), ((4,), 1)):
        made.fire(Scheduled(blocks, num_cached))
        assert (made.block_table, made.num_computed, made.num_cached) == (blocks, num_cached, 2)
        made.fire(Preempted())


def test_what_a_step_computes_counts_from_its_launch() -> None:
    """And the token that it samples as on its way, where the next step may take it."""
    made = make_request(decode_here=True)
    made.fire(TextOnly())
    made.fire(Scheduled((3,), num_cached=2))
    assert (made.num_left, made.num_expected) == (1, 3)
    made.fire(StepLaunched(1, ahead=True))
    assert (len(made.steps), made.num_computed) == (1, 2)
    assert (made.num_left, made.num_expected, made.num_tokens) == (1, 4, 3)
    made.fire(StepLaunched(3, ahead=False))
    assert made.num_left == -2, "draft tokens are verified"
    made.fire(FirstTokenSampled(TOKEN))
    assert (len(made.steps), made.num_left, made.num_expected) == (1, -2, 4)
    made.fire(TokenSampled(TOKEN, (TOKEN,)))
    assert (len(made.steps), made.num_left, made.num_expected) == (0, 1, 6)


def test_a_chunk_ends_where_a_state_is_kept() -> None:
    made = make_request()
    made.fire(TextOnly())
    made.fire(Scheduled((3,), 1, (7,), {2: (8,)}))
    assert (made.num_found, made.states_found, made.states_kept) == (1, (7,), {2: (8,)})
    assert (made.num_left, made.num_tokens) == (1, 3)
    launch(made, 1)
    assert made.num_left == 1, "behind it the next one begins"
    made.fire(ChunkComputed())
    made.fire(Preempted())
    made.fire(Scheduled((3,)))
    assert (made.num_found, made.states_found, made.states_kept) == (0, (), {})


def test_an_image_that_lacks_bounds_what_can_be_computed() -> None:
    made = make_request()
    image = SimpleNamespace(room="x", offset=1, end=2)
    made.message = SimpleNamespace(items=(image,), num_emitted=1)
    made.missing = {"x"}
    assert (made.num_left, made.lacks_rows, made.recomputable) == (1, True, False)
    made.missing.clear()
    assert (made.num_left, made.lacks_rows) == (3, False)


def test_who_cannot_be_computed_again_needs_all_its_blocks_at_once() -> None:
    made = make_request()
    image = SimpleNamespace(room="x", offset=1, end=2)
    made.sampling = SimpleNamespace(max_tokens=8)
    for items, decode_here, num_promised in (
        ((image,), True, 3 + 8 - 1 - 1),
        ((image,), False, 0),
        ((), True, 0),
    ):
        made.message = SimpleNamespace(items=items, num_emitted=1)
        made.decode_here = decode_here
        assert made.num_promised == num_promised, "the last token is never computed"
