"""Tokens to text while they arrive.

A token may hold part of a character, so tokens cannot be decoded one by one.  Nearly all models of
today have byte-level vocabularies: each token stands for some bytes, and an incremental UTF-8
decoder gives the certain text of their concatenation.  That is exact for any bytes, also broken
ones, and costs one dictionary look-up per token.

Other decoders change text with its left neighbour (sentencepiece drops the space at the start of a
text).  There a short window is decoded twice, with and without the new tokens, as in vLLM and TGI.
What the longer text adds is certain unless it ends within a character, by a replacement character.
A model that never completes one is not waited for: cost stays constant.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer, decoders

from epd.api.answers.token_bytes import TokenBytes

WINDOW = 6  # tokens of left context
MAX_WAITS = 8  # pushes that may wait for the end of a character, which takes four bytes at most
REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """One stream's text."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that is certain now; may be empty."""

    def finish(self) -> str:
        """No more tokens come: what is left, with its broken characters."""


class Vocabulary:
    """What the tokens of one model read like; shared by all its streams."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        added = tokenizer.get_added_tokens_decoder()
        token_bytes = TokenBytes(tokenizer)
        self._texts: dict[int, str] = {}
        self._shown = _Lookup(token_bytes, {})
        self._hidden = _Lookup(token_bytes, {i: b"" for i, token in added.items() if token.special})

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """For a new stream."""
        if self._is_byte_level:
            return ByteDetokenizer(self._hidden if skip_special_tokens else self._shown)
        return WindowDetokenizer(self._tokenizer, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """One token alone: its text, broken if it holds part of a character, and its bytes."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            self._texts[token_id] = text
        return text, self._shown[token_id]


class _Lookup(dict[int, bytes]):
    """Token id to bytes; those that are not `known` are looked up once."""

    def __init__(self, token_bytes: TokenBytes, known: dict[int, bytes]) -> None:
        super().__init__(known)
        self._token_bytes = token_bytes

    def __missing__(self, token_id: int) -> bytes:
        data = self[token_id] = self._token_bytes(token_id)
        return data


class ByteDetokenizer:
    """For byte-level vocabularies."""

    def __init__(self, token_bytes: dict[int, bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(map(self._token_bytes.__getitem__, token_ids)))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For every other decoder."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []  # the window, then tokens whose text is not out yet
        self._read = 0  # length of the window
        self._num_waits = 0

    def push(self, token_ids: Sequence[int]) -> str:
        self._ids.extend(token_ids)
        return self._advance(may_wait=self._num_waits < MAX_WAITS)

    def finish(self) -> str:
        return self._advance(may_wait=False)

    def _advance(self, *, may_wait: bool) -> str:
        before = self._decode(self._ids[: self._read])
        after = self._decode(self._ids)
        if may_wait and after.endswith(REPLACEMENT):
            self._num_waits += 1
            return ""  # in the middle of a character
        self._num_waits = 0
        del self._ids[: max(0, self._read - WINDOW)]
        self._read = len(self._ids)
        return after[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)
