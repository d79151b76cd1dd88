"""REQUEST's tokens: read alike from prompt and answer, counted, and sent in words."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from epd.fsm.request import Do, EmbeddingReady, Preempted, Scheduled, TextOnly
from epd.messages import TokenLogprobs
from tests.fsm.tables import make_request

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
    made = make_request()
    made.sampling = SimpleNamespace(tokens_per_word=3)
    made.output = [TOKEN] * 4
    held = []
    for made.num_sent in range(5):
        held.append(made.holds_tokens)
    assert held == [False, False, True, True, True]
    made.finish_reason = "stop"
    assert not made.holds_tokens


@pytest.mark.parametrize("preempted", [False, True])
def test_rows_that_come_in_the_line_let_the_batch_go_further(preempted: bool) -> None:
    """WAITING or PREEMPTED: what it may compute has grown."""
    made = make_request()
    made.fire(TextOnly())
    if preempted:
        made.fire(Scheduled((3,)))
        made.fire(Preempted())
    assert made.fire(EmbeddingReady("a", "rows")) == (Do.EXTEND,)
    assert made.rows == {"a": "rows"}


def test_what_was_cached_is_counted_when_it_is_first_taken() -> None:
    made = make_request()
    made.fire(TextOnly())
    assert made.num_cached is None
    for blocks, num_cached in (((3,), 2), ((4,), 1)):
        made.fire(Scheduled(blocks, num_cached))
        assert (made.block_table, made.num_computed, made.num_cached) == (blocks, num_cached, 2)
        made.fire(Preempted())
