"""What the simulated sampler reads, and what it must not say."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from epd.messages import SamplingParams
from epd_lab.sim import wishes
from epd_lab.sim.core.rand import KeyedRandom
from epd_lab.sim.engine import golden
from epd_lab.sim.engine.sampler import EOS, Past, follow, sample
from epd_lab.sim.workload import Ask, Workload

PROMPT = (500, 501, 502)
SAID = (10, 14, 15)  # reversed, or with another end, it follows "modulo 7" as well
PLAIN = wishes.SEEDED
LOOKS_BACK = {
    "frequency_penalty": 0.5,
    "presence_penalty": 0.8,
    "repetition_penalty": 1.3,
    "grammar": "modulo 7",
    "bad_words": ((10, 11),),
}


def asks(kind: str) -> list[Ask]:
    work = Workload(40, kinds=(kind,), image_share=0.0, max_tokens=24)
    return [work.ask(KeyedRandom(7, kind, n), n) for n in range(40)]


def tokens_of(params: SamplingParams, count: int = 60, **past: Any) -> list[int]:
    """Of as many different KVs, so that chance alone makes two lists equal nearly never."""
    rest = {"output_index": 3, "prompt_ids": PROMPT, "output_ids": SAID} | past
    return [sample(Past(bytes([n]), **rest), params).token_id for n in range(count)]


@pytest.mark.parametrize("name", LOOKS_BACK)
def test_who_looks_back_sees_every_token_in_its_place(name: str) -> None:
    params = msgspec.structs.replace(PLAIN, top_k=8, **{name: LOOKS_BACK[name]})
    right = tokens_of(params)
    assert right == tokens_of(params)
    for output_ids in (SAID[:2], SAID[::-1], (*SAID[:2], 17), (*SAID, SAID[0])):
        if name != "grammar" or _follows(output_ids):
            assert tokens_of(params, output_ids=output_ids) != right
    assert tokens_of(params, prompt_ids=PROMPT[1:]) != right
    assert tokens_of(msgspec.structs.replace(PLAIN, top_k=8)) != right


def _follows(output_ids: tuple[int, ...]) -> bool:
    try:
        follow("modulo 7", output_ids)
    except ValueError:
        return False
    return True


def test_a_draw_reads_the_seed_and_its_index_and_the_greedy_neither() -> None:
    other = msgspec.structs.replace(PLAIN, seed=1)
    assert tokens_of(other) != tokens_of(PLAIN) != tokens_of(PLAIN, output_index=4)
    greedy = msgspec.structs.replace(PLAIN, temperature=0.0)
    assert tokens_of(msgspec.structs.replace(greedy, seed=1)) == tokens_of(greedy)
    assert tokens_of(greedy, output_index=4) == tokens_of(greedy)


def test_an_answer_that_left_its_grammar_has_no_next_token() -> None:
    params = msgspec.structs.replace(PLAIN, top_k=8, grammar="modulo 7")
    bad = next(ids for ids in ((n,) for n in range(10, 18)) if not _follows(ids))
    with pytest.raises(ValueError, match="left its grammar"):
        tokens_of(params, output_ids=bad)


def test_answers_are_as_their_clients_wish() -> None:
    """And each kind really says something, of more than one token, and sometimes ends by itself."""
    for ask in asks("grammar"):
        params = ask.sampling()
        assert follow(params.grammar, ask.answer())[0] == 7
    for ask in asks("restricted"):
        params, answer = ask.sampling(), ask.answer()
        assert not params.allowed_token_ids or set(answer) <= set(params.allowed_token_ids)
        for word in params.bad_words:
            found = zip(*(answer[n:] for n in range(len(word))), strict=False)
            assert word not in set(found)
    for ask in asks("at least"):
        params, answer = ask.sampling(), ask.answer()
        assert not set(answer[: params.min_tokens]) & set(params.stop_token_ids)
    for ask in asks("scored"):
        first = ask.said()[0]
        assert [token.token_id for token in first.prompt] == list(ask.placed()[0][1:])
    for kind in wishes.KINDS:
        answers = [ask.answer() for ask in asks(kind)]
        assert sum(map(len, answers)) > 3 * len(answers)
        assert any(answer[-1] == EOS for answer in answers), kind


def test_every_kind_is_in_the_mix_and_only_a_few_look_back_with_three_words() -> None:
    """Workloads that can be drafted have three words, of which one at least may always be said."""
    kinds = {kind for kind in wishes.KINDS if kind != "scored"}
    assert set(wishes.MIXED) == kinds
    for kind in wishes.KINDS:
        work = Workload(30, kinds=(kind,), num_words=3, image_share=0.0, max_tokens=24)
        for n in range(30):
            assert work.ask(KeyedRandom(8, kind, n), n).answer()


def test_the_right_answer_is_a_function_of_the_request_alone() -> None:
    ask = asks("penalised")[0]
    token_ids, placed = ask.placed()
    assert golden.answer.__wrapped__(token_ids, placed, ask.sampling()) == ask.said()
