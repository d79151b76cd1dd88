"""Grammars over a real vocabulary: the state is what the answer's tokens say, whoever asks."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLParserLimits

from epd.api.asked.grammar import checked_grammar, to_grammar
from epd.api.asked.structured import Constraint
from epd.api.asked.tools import ToolUse
from epd.model_files import grammar as module
from epd.model_files.grammar import Grammars
from epd.tiny import CHECKPOINT
from tests.answers import may_follow
from tests.hostile.forked import forked, outcomes
from tests.hostile.grammars import counts

VOCAB_SIZE = 272
ENDS = [256, 258]
SCHEMA = {
    "type": "object",
    "properties": {
        "item": {"type": "string", "maxLength": 6},
        "price": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["food", "drink"]},
    },
    "required": ["item", "price", "kind"],
    "additionalProperties": False,
}
JSON = to_grammar(Constraint("json", SCHEMA, ""))
CHOICE = to_grammar(Constraint("choice", ["yes", "no"], ""))


def grammars() -> Grammars:
    return Grammars(CHECKPOINT, VOCAB_SIZE)


def allowed(
    state: Grammars, name: str, grammar: str, token_ids: list[int]
) -> npt.NDArray[np.bool_]:
    bits = state.allowed(name, grammar, token_ids)
    return np.unpackbits(bits, count=VOCAB_SIZE, bitorder="little").view(np.bool_)


def walk(state: Grammars, draw: np.random.Generator, key: str, limit: int = 200) -> list[int]:
    """Any answer that the grammar admits, up to its end."""
    token_ids: list[int] = []
    while len(token_ids) < limit:
        admitted = np.flatnonzero(allowed(state, key, JSON, token_ids))
        token = int(draw.choice(admitted))
        if token in ENDS:
            return token_ids
        token_ids.append(token)
    raise AssertionError("no end")


@given(st.integers(0, 2**32))
def test_whatever_is_drawn_is_valid(seed: int) -> None:
    token_ids = walk(grammars(), np.random.default_rng(seed), "r")
    found = json.loads(bytes(token_ids))  # the vocabulary is of bytes
    assert set(found) == {"item", "price", "kind"}
    assert len(found["item"]) <= 6
    assert 0 <= found["price"] <= 999
    assert found["kind"] in ("food", "drink")


def test_the_state_is_a_function_of_the_tokens() -> None:
    """As after a migration: an engine that never saw the request answers the same."""
    seen = grammars()
    token_ids = walk(seen, np.random.default_rng(3), "r")
    for count in range(len(token_ids) + 1):
        fresh = allowed(grammars(), "r", JSON, token_ids[:count])
        again = allowed(seen, "r", JSON, token_ids[:count])
        assert (fresh == again).all()
        assert count == len(token_ids) or fresh[token_ids[count]]
    assert np.flatnonzero(allowed(seen, "r", JSON, token_ids)).tolist() == ENDS


def test_an_answer_under_counts_goes_on_elsewhere() -> None:
    """All of its tokens had to do with the fuel of one: a migration was a 500 in mid-answer."""
    asked = {"type": "string", "pattern": r"^(\w{1,20}\s?){1,50}$", "maxLength": 500}
    grammar, token_ids = to_grammar(Constraint("json", asked, "")), list(b'"' + b"a" * 160)
    state, fresh = grammars(), grammars()
    for count in range(len(token_ids)):
        here = allowed(state, "r", grammar, token_ids[:count])
    assert (allowed(fresh, "r", grammar, token_ids[: len(token_ids) - 1]) == here).all()


@pytest.mark.parametrize(
    "seeds",
    [
        range(8),
        *(pytest.param(range(n, n + 50), marks=pytest.mark.long) for n in range(0, 400, 50)),
    ],
    ids=str,
)
def test_counts_of_counts_are_refused_or_followed(seeds: range) -> None:
    """Whatever the proof accepts goes on past where a proof ends."""
    found = outcomes(_followed, seeds, share=50)
    assert found["followed"] and found["refused"] and len(found) == 2, found


@pytest.mark.parametrize("count", [2, 20])
def test_what_follows_few_answers_is_proved(count: int) -> None:
    """Most ended before it, or did not come by it."""
    grammar = to_grammar(Constraint("regex", f"((b+){{706,}}|[ab]?){{{count}}}", ""))
    state = grammars()
    assert not state.fault(grammar)
    assert "too many expressions" in state.proof(grammar)


@pytest.mark.parametrize("seed", [794, 1295, pytest.param(2876, marks=pytest.mark.long)])
def test_what_costs_more_with_each_token_is_refused_or_followed(seed: int) -> None:
    """Each was accepted, and ended its answer: it has no counted group, or texts that few take."""
    assert forked(lambda: _followed(seed)) in ("followed", "refused")


def _followed(seed: int) -> str:
    draw, state = random.Random(seed), grammars()
    text: Any = counts(seed)
    if seed % 2:
        text = {"type": "string", "pattern": f"^{text}$", "maxLength": draw.randrange(20, 900)}
    grammar = to_grammar(Constraint("json" if seed % 2 else "regex", text, ""))
    if state.fault(grammar) or state.proof(grammar):
        return "refused"
    matcher = state._matcher(grammar)
    for _ in range(700):
        may = may_follow(matcher)
        if not may:
            break
        going_on = [token for token in may if token != ord('"')]
        assert matcher.take(draw.choice(going_on or may)), (seed, text)
    assert not matcher.reason(), (seed, text, matcher.reason())
    return "followed"


def test_requests_do_not_mix_and_forgotten_ones_are_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_MATCHERS", 2)
    state = grammars()
    for name in ("a", "b", "c", "d", "a"):
        assert allowed(state, name, CHOICE, list(b"y"))[ord("e")]
        assert allowed(state, name, CHOICE, list(b"n"))[ord("o")]  # another answer under the name
    assert allowed(state, "a", JSON, [])[ord("{")]


def test_tokens_outside_the_grammar() -> None:
    state = grammars()
    with pytest.raises(ValueError, match="left its grammar"):
        allowed(state, "a", CHOICE, list(b"q"))
    assert allowed(state, "a", CHOICE, [])[ord("y")]


def test_faults() -> None:
    state = grammars()
    assert state.fault(JSON) == ""
    assert "not exist" in state.fault(to_grammar(Constraint("json", {"$ref": "#/no"}, "")))
    impossible = {"type": "integer", "minimum": 5, "maximum": 3}
    assert state.fault(to_grammar(Constraint("json", impossible, "")))


def test_what_cannot_be_followed_for_a_few_tokens_is_no_proof(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It compiles and has a first mask; behind `{` its parser gives up."""
    wide = {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(1100)}}
    grammar = to_grammar(Constraint("json", wide, ""))
    monkeypatch.setattr(module, "MAX_BUILD_S", 1.0)  # it takes half of the real one
    assert not grammars().proof(grammar)
    monkeypatch.setattr(module, "PROOF_LIMITS", LLParserLimits(max_items_in_row=2000))
    assert not grammars().fault(grammar)
    assert "Current row has" in grammars().proof(grammar)


ADDED = json.loads((CHECKPOINT / "tokenizer.json").read_text("utf-8"))["added_tokens"]


@pytest.mark.parametrize("text", [token["content"] for token in ADDED])
def test_text_that_spells_a_special_token_is_ordinary(text: str) -> None:
    """No token of the answer is the special one, wherever the text stands, and the text is it."""
    for kind, value in (
        ("choice", [f"a{text}b"]),
        ("json", {"const": f"{text}x"}),
        ("json", {"type": "object", "properties": {text: {"const": 1}}, "required": [text]}),
        ("json", {"type": "string", "pattern": f"^x{re.escape(text)}$"}),
        ("regex", re.escape(f"{text}{text}")),
        ("grammar", f"start: A /y{re.escape(text)}/\nA: {json.dumps(text)}"),
        ("grammar", f'root ::= "x{text}"'),
        ("tools", {"type": "object", "properties": {text: {"const": text}}, "required": [text]}),
    ):
        state, token_ids = grammars(), list[int]()
        if kind == "tools":
            tool: Any = {"type": "function", "function": {"name": "f", "parameters": value}}
            grammar = checked_grammar(ToolUse((tool,), ("f",), is_named=True), state.fault)
        else:
            grammar = to_grammar(Constraint(kind, value, ""))
        while (may := np.flatnonzero(allowed(state, "r", grammar, token_ids)))[-1] not in ENDS:
            token_ids.append(int(may[-1]))
        assert max(token_ids) < 256 and text in bytes(token_ids).decode()


@pytest.mark.parametrize("is_beside_tools", [False, True])
def test_a_long_choice_is_followed(is_beside_tools: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one terminal: as a rule for each it compiled for 0.15 s."""
    monkeypatch.setattr(module, "MAX_BUILD_S", 0.1)
    choice = Constraint("choice", [f"c{i}" for i in range(6000)], "")
    grammar = to_grammar(choice)
    if is_beside_tools:
        tool: Any = {"type": "function", "function": {"name": "f"}}
        grammar = checked_grammar(ToolUse((tool,), otherwise=choice), grammars().fault)
    assert not grammars().fault(grammar) and not grammars().proof(grammar)


def test_no_tokenizer(tmp_path: pytest.TempPathFactory) -> None:
    state = Grammars(str(tmp_path), VOCAB_SIZE)
    state.warm_up()
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        state.fault(JSON)


def test_an_end_that_the_files_lack_may_follow_what_is_complete() -> None:
    """That of a chat template, or the request's own (F75); to the matcher it is the end."""
    own, far = 261, 1 << 40
    free = to_grammar(Constraint("regex", "[ab]{2,4}", ""))
    state = grammars()

    def ends(token_ids: list[int]) -> set[int]:
        bits = state.allowed("r", free, token_ids, (own, 258, far))
        found = np.flatnonzero(np.unpackbits(bits, count=VOCAB_SIZE, bitorder="little"))
        return {int(token) for token in found} - {97, 98}

    assert [ends(list(b"abab"[:count])) for count in range(5)] == [set(), set()] + [
        {own, *ENDS}
    ] * 3
    assert ends([97, 98, own]) == {own, *ENDS}
    with pytest.raises(ValueError, match="left its grammar"):
        grammars().allowed("r", free, [97, own], (own,))
    with pytest.raises(ValueError, match="left its grammar"):
        grammars().allowed("r", free, [97, 98, own])
