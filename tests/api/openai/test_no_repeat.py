"""DeepSeek-OCR's rule against repeated runs of tokens, under its own name and under vLLM's."""

from __future__ import annotations

import pytest

from epd.messages import NoRepeat
from tests.api.openai.test_validation import MODEL, chat, completion, refusal


@pytest.mark.parametrize("name", ["no_repeat_ngram", "vllm_xargs"])
def test_the_rule_against_repeated_runs_has_the_name_of_vllm_too(name: str):
    rule = {"ngram_size": 30, "window_size": 90, "whitelist_token_ids": [5, 6.0]}
    for read in (chat, completion):
        sampling = read(**{name: rule}).sampling(0, 7, 11, MODEL)
        asked = NoRepeat(ngram_size=30, window_size=90, whitelist_token_ids=(5, 6))
        assert sampling.no_repeat_ngram == asked and sampling.reads_output
        for bad in ({"ngram_size": 1}, {"ngram_size": "30"}, {"ngram_size": 129}, {}, [], 30,
                    {"ngram_size": 30, "window_size": 29}, {"ngram_size": 101},
                    {"ngram_size": 30, "window_size": 1025}, {"ngram_size": 2, "size": 3},
                    {"ngram_size": 2, "whitelist_token_ids": [1 << 31]}):  # fmt: skip
            assert refusal(read, **{name: bad}).param.startswith(name)
    both = {"no_repeat_ngram": rule, "vllm_xargs": rule}
    assert refusal(chat, **both).param == "vllm_xargs"
