"""Detokenizer and stop strings: whatever the cuts, the text is the same."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from epd.api.answers.detokenize import MAX_WAITS, Detokenizer, Vocabulary
from epd.api.asked.stop import StopMatcher
from epd.tiny import CHECKPOINT

TOKENIZER = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
TOKENIZER.add_tokens(["é", "☃!"])  # added, not special: ids 264 and 265
BYTE_LEVEL = Vocabulary(TOKENIZER)


def with_byte_fallback() -> Tokenizer:
    """Like Llama 2: pieces that begin with a space, bytes for what has no piece."""
    pieces = ["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += ["▁", "▁he", "llo", "▁world", "☃", "a", "b"]
    tokenizer = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


FALLBACK_TOKENIZER = with_byte_fallback()
FALLBACK = Vocabulary(FALLBACK_TOKENIZER)
CUTS = st.lists(st.integers(0, 1000), max_size=20)


def in_pieces(things: Sequence, cuts: list[int]) -> list:
    edges = sorted({0, len(things), *(c % (len(things) + 1) for c in cuts)})
    return [things[a:b] for a, b in itertools.pairwise(edges)]


def streamed(detokenizer: Detokenizer, pieces: Sequence[Sequence[int]]) -> str:
    return "".join(detokenizer.push(piece) for piece in pieces) + detokenizer.finish()


@given(st.lists(st.integers(0, 300), max_size=60), CUTS, st.booleans())
def test_any_tokens_stream_as_they_decode(ids: list[int], cuts: list[int], skip: bool) -> None:
    """Whole characters, broken ones, special and added tokens, ids beyond the vocabulary."""
    detokenizer = BYTE_LEVEL.detokenizer(skip_special_tokens=skip)
    assert streamed(detokenizer, in_pieces(ids, cuts)) == TOKENIZER.decode(
        ids, skip_special_tokens=skip
    )


@given(st.text(max_size=60), CUTS)
def test_text_comes_back(text: str, cuts: list[int]) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert streamed(BYTE_LEVEL.detokenizer(), in_pieces(ids, cuts)) == TOKENIZER.decode(ids)


WORDS = st.sampled_from(["▁", "▁he", "llo", "▁world", "☃", "a", "b", "</s>", "é", "你", "🙂"])


@given(st.lists(WORDS, max_size=40), CUTS)
def test_a_decoder_with_context_streams_as_it_decodes(words: list[str], cuts: list[int]) -> None:
    ids: list[int] = []
    for word in words:
        token_id = FALLBACK_TOKENIZER.token_to_id(word)
        ids += [token_id] if token_id is not None else [2 + byte for byte in word.encode()]
    expected = FALLBACK_TOKENIZER.decode(ids)
    assert streamed(FALLBACK.detokenizer(), in_pieces(ids, cuts)) == expected


def test_nothing_is_held_longer_than_a_character() -> None:
    detokenizer = BYTE_LEVEL.detokenizer()
    ids = TOKENIZER.encode("a☂b", add_special_tokens=False).ids
    assert [detokenizer.push([i]) for i in ids] == ["a", "", "", "☂", "b"]


def test_broken_characters_are_not_waited_for() -> None:
    """A model that never completes a character is streamed, at constant cost."""
    detokenizer = FALLBACK.detokenizer()
    texts = [detokenizer.push([2 + 0x82]) for _ in range(5 * MAX_WAITS)]
    assert texts.count("") < len(texts) - 3
    assert len(detokenizer._ids) <= 3 * MAX_WAITS


def test_a_token_knows_its_bytes() -> None:
    euro = TOKENIZER.encode("€", add_special_tokens=False).ids
    assert b"".join(BYTE_LEVEL.token_text(i)[1] for i in euro) == "€".encode()
    assert BYTE_LEVEL.token_text(258) == ("<|im_end|>", b"<|im_end|>")
    assert FALLBACK.token_text(2 + 0xE2)[1] == b"\xe2"


# --- stop strings ---------------------------------------------------------------------------------

ALPHABET = st.text(alphabet="ab", max_size=40)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4)


def first_stop(text: str, stops: list[str]) -> int | None:
    """Where the answer ends: by definition, looking at one character more each time."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts)
    return None


def pushed(matcher: StopMatcher, pieces: list[str]) -> tuple[str, bool]:
    """The certain text up to a stop, and whether there was one."""
    emitted = ""
    for piece in pieces:
        certain, stopped = matcher.push(piece)
        emitted += certain
        if stopped:
            return emitted, True
    return emitted, False


@given(ALPHABET, STOPS, CUTS)
def test_the_cut_does_not_depend_on_the_pieces(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher = StopMatcher(stops)
    emitted, stopped = pushed(matcher, in_pieces(text, cuts))
    if not stopped:
        emitted += matcher.finish()
    end = first_stop(text, stops)
    assert bool(matcher.found) == (end is not None)
    assert emitted == text[:end]


@given(ALPHABET, STOPS, CUTS)
def test_no_more_is_held_back_than_may_become_a_stop(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    emitted, stopped = pushed(StopMatcher(stops), in_pieces(text, cuts))
    held = text[len(emitted) :]
    assert stopped or not held or any(stop.startswith(held) for stop in stops)


@given(st.lists(st.integers(0, 263), max_size=60), STOPS, CUTS)
def test_streamed_text_ends_at_the_first_stop(
    ids: list[int], stops: list[str], cuts: list[int]
) -> None:
    detokenizer, matcher = BYTE_LEVEL.detokenizer(), StopMatcher(stops)
    emitted = ""
    for piece in in_pieces(ids, cuts):
        emitted += matcher.push(detokenizer.push(piece))[0]
    emitted += matcher.push(detokenizer.finish())[0] + matcher.finish()
    whole = TOKENIZER.decode(ids)
    assert emitted == whole[: first_stop(whole, stops)]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["hello wo", "rld"], ["hello ", ""]),
        (["hello wo", "ndering"], ["hello ", "wondering"]),
    ],
)
def test_a_possible_beginning_is_held_back(pieces: list[str], expected: list[str]) -> None:
    matcher = StopMatcher(["world"])
    assert [matcher.push(piece)[0] for piece in pieces] == expected


def test_without_stop_strings_everything_passes() -> None:
    matcher = StopMatcher([])
    assert matcher.push("anything") == ("anything", False)
    assert matcher.finish() == ""
