"""REQUEST's tokens: read alike from prompt and answer, and sent when a word of them is full."""

from __future__ import annotations

from types import SimpleNamespace

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


def test_tokens_wait_for_more_until_a_word_is_full_or_it_ends() -> None:
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
