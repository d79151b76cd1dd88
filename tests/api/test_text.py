"""Detokenizer and stop strings: whatever the cuts, the text is the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from epd.api.detokenize import Detokenizer
from epd.api.stop import StopMatcher
from epd.tiny import CHECKPOINT

TOKENIZER = Tokenizer.from_file(str(Path(CHECKPOINT) / "tokenizer.json"))


def in_pieces(things: list[int] | str, cuts: list[int]) -> list:
    edges = sorted({0, len(things), *(c % (len(things) + 1) for c in cuts)})
    return [things[a:b] for a, b in zip(edges, edges[1:], strict=False)]


@given(st.text(max_size=60), st.lists(st.integers(0, 1000), max_size=20))
def test_streamed_text_is_the_whole_text(text: str, cuts: list[int]) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    detokenizer = Detokenizer(TOKENIZER)
    streamed = "".join(detokenizer.push(piece) for piece in in_pieces(ids, cuts))
    assert streamed + detokenizer.finish() == TOKENIZER.decode(ids)


@given(st.lists(st.integers(0, 255), max_size=60), st.lists(st.integers(0, 1000), max_size=20))
def test_broken_bytes_stream_like_they_decode(ids: list[int], cuts: list[int]) -> None:
    """Tokens that are no valid UTF-8: nothing is lost, nothing raises, at most marks differ."""
    detokenizer = Detokenizer(TOKENIZER)
    streamed = "".join(detokenizer.push(piece) for piece in in_pieces(ids, cuts))
    streamed += detokenizer.finish()
    whole = TOKENIZER.decode(ids)
    assert streamed.replace("\ufffd", "") == whole.replace("\ufffd", "")


def test_nothing_is_held_longer_than_a_character() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    ids = TOKENIZER.encode("a☃b", add_special_tokens=False).ids
    assert [detokenizer.push([i]) for i in ids] == ["a", "", "", "☃", "b"]


ALPHABET = st.text(alphabet="ab", max_size=40)


@given(
    ALPHABET,
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 100), max_size=20),
)
def test_stop_strings_cut_where_the_whole_text_is_cut(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    matcher = StopMatcher(stops)
    emitted, stopped = "", False
    for piece in in_pieces(text, cuts):
        certain, stopped = matcher.push(piece)
        emitted += certain
        if stopped:
            break
    if not stopped:
        emitted += matcher.finish()
    if found:
        assert stopped
        # The first stop string to be complete wins; with all text in one piece that is the leftmost.
        assert text.startswith(emitted)
        assert any(text[len(emitted) :].startswith(stop) for stop in stops)
        assert len(emitted) >= min(found)
    else:
        assert (emitted, stopped) == (text, False)


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
