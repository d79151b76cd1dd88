"""What contradicts itself is refused at the door; what only looks odd is not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.fakes import EOS
from tests.api.openai.test_validation import MODEL, chat, refusal


@pytest.mark.parametrize("name", ["max_tokens", "seed", "n", "top_k", "min_tokens", "top_logprobs"])
def test_whole_floats_are_integers(name: str):
    """JSON has one kind of number, and the document says "integer", which 2.0 is."""
    more = {"max_tokens": 3, "logprobs": True}
    assert chat(**more | {name: 2.0}) == chat(**more | {name: 2})
    assert chat(stop_token_ids=[3.0]).stop_token_ids == (3,)
    error = refusal(chat, **more | {name: 2.5})
    assert (error.param, error.code) == (name, "invalid_type")


def test_min_tokens_above_what_the_context_leaves():
    assert chat(min_tokens=50).max_new_tokens(150, MODEL) == 50
    error = refusal(lambda: chat(min_tokens=51).max_new_tokens(150, MODEL))
    assert (error.param, error.code) == ("min_tokens", "out_of_range")


UNREPEATED = {"ngram_size": 2, "whitelist_token_ids": [8, 9]}


@pytest.mark.parametrize(
    ("asked", "bad_words"),
    [
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, ()),
        ({"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1}, ()),
        ({"allowed_token_ids": [5]}, ((5,),)),
        ({"allowed_token_ids": [5, 6]}, ((5,), (7, 6))),
        ({"allowed_token_ids": [5, EOS], "min_tokens": 1}, ((5,),)),
        ({"allowed_token_ids": [5], "no_repeat_ngram": UNREPEATED}, ()),
        ({"allowed_token_ids": [5, 9], "no_repeat_ngram": UNREPEATED}, ((9,),)),
    ],
)
def test_what_leaves_no_token_is_refused(asked: dict[str, Any], bad_words: Any):
    error = refusal(lambda: chat(**asked).check_choice(bad_words, MODEL))
    assert error.param == "allowed_token_ids"
    one_more = {**asked, "allowed_token_ids": [*asked["allowed_token_ids"], 8]}
    chat(**one_more).check_choice(bad_words, MODEL)
    chat(**{**asked, "allowed_token_ids": []}).check_choice(bad_words, MODEL)


def test_no_top_logprobs_need_no_logprobs():
    assert chat(top_logprobs=0, logprobs=False) == chat()
